"""Models of `transformers` in files: fetched from the hub, found, known by a hash, and written as others read them.

    python -m swarmnode.training.hub Qwen/Qwen2.5-0.5B-Instruct       # prints the folder that it lies in

Run by the daemon as a process of its own, which hears nothing from peers, before the trainer starts: so only who owns
the machine says what is fetched from where, and the trainer needs no network. A folder is left as it is. What goes
wrong is printed in one line. With a second argument, `offline`, it only looks. Exit code 1: the model cannot be had.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from swarmnode.training.runspec import ModelSection

# Weights in safetensors and what tokenizers read; no pickled weights, no code, no copies for other runtimes.
WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
UNWANTED = ["*/*", "consolidated*"]


def fetch(name: str, *, offline: bool) -> Path:
    """The folder of the model `name`: such a folder, or one in the cache, into which it is fetched unless `offline`.

    Raises OSError or ValueError where it cannot be had, ImportError likewise.
    """
    if (folder := Path(name).expanduser()).is_dir():
        return folder.absolute()
    from huggingface_hub import snapshot_download

    kinds = {"allow_patterns": WANTED, "ignore_patterns": UNWANTED}
    return Path(snapshot_download(name, local_files_only=offline, **kinds))


def cache() -> Path:
    """Where models are kept on this machine, as the hub's own library has it; the owner's token is not in there."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{base}/huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(named).expanduser().absolute()


def weights_hash(folder: Path) -> str:
    """sha-256 over names and hashes of a model's weights and its config.json, 64 hex digits: two folders that begin
    alike have the same. Blocking; reads all of it. Raises OSError, ValueError where there are no such weights."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{folder} has no *.safetensors, the only form in which weights are read")
    told = hashlib.sha256()
    for path in (folder / "config.json", *weights):
        with path.open("rb") as file:
            told.update(f"{path.name}\n{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return told.hexdigest()


def vocabulary(folder: Path) -> int:
    """How many tokens a model knows, as its config.json says; 0 where that does not. Raises OSError, ValueError."""
    shape = json.loads((folder / "config.json").read_bytes())
    return int(shape.get("vocab_size") or shape.get("text_config", {}).get("vocab_size", 0))


# -- as others read them


def file_name(model: ModelSection, parameter: str) -> str:
    """The name of a trained parameter in the files of `transformers`, or of `peft`, where the model has a base."""
    if model.lora_rank:
        return "base_model." + parameter.replace(".default.", ".")
    return parameter.removeprefix("model.") if model.base else parameter


def write_beside(folder: Path, model: ModelSection, parameters: Sequence[str], *, base: str) -> Path:
    """Write what `from_pretrained` reads beside weights into `folder`; the file that the weights belong into.

    `parameters`: names of what is trained. `base`: where the base lies, if elsewhere than the run says; of a model
    that was trained whole its shape and tokenizer are copied. Raises OSError, ValueError or ImportError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if model.lora_rank:
        layers = {name.partition(".lora_")[0].removeprefix("model.") for name in parameters}
        adapters = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": model.base,
            "r": model.lora_rank,
            "lora_alpha": model.lora_alpha,
            "target_modules": sorted(layers),
            "inference_mode": True,
        }
        (folder / "adapter_config.json").write_text(json.dumps(adapters, indent=2))
        return folder / "adapter_model.safetensors"
    source = fetch(base or model.base, offline=True)
    for pattern in set(WANTED) - {"*.safetensors"}:
        for path in source.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
    shape = json.loads((source / "config.json").read_bytes())
    shape.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(shape | {"dtype": "float32"}, indent=2))
    return folder / "model.safetensors"


def main() -> None:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    name, *offline = sys.argv[1:]
    try:
        print(fetch(name, offline=bool(offline)))
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        hint = (
            '; models of the hub need more packages: pip install "swarmnode[hf]"'
            if isinstance(error, ImportError)
            else ""
        )
        print(f"the model {name!r} cannot be fetched: {' '.join(str(error).split())}{hint}")
        sys.exit(1)


if __name__ == "__main__":
    main()
