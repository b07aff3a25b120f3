"""Models of `transformers` in files: fetched from the hub, found, known by a hash, and written as others read them.

    python -m swarmnode.training.hub Qwen/Qwen2.5-0.5B-Instruct       # prints the folder that it lies in

Run by the daemon as a process of its own, which hears nothing from peers, before the trainer starts: so only who owns
the machine says what is fetched from where, and the trainer needs no network. A folder is left as it is. How far it is
is printed every few seconds, what goes wrong in the last line. With a second argument, `offline`, it only looks. Exit
code 1: the model cannot be had.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.options import installing
from swarmnode.training.runspec import RunSpec
from swarmnode.training.sections import ModelSection
from swarmnode.training.tokens import BYTES, LETTERS, TokenizerError, end_of, size_of

# Weights in safetensors and what tokenizers read; no pickled weights, no code, no copies for other runtimes.
WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
UNWANTED = ["*/*", "consolidated*"]
FETCHED = "fetched "  # so begin the lines that tell how far it is
FAR = "{n_fmt}B of {total_fmt}B, {rate_fmt}, {remaining} left"  # as tqdm has it
TELL_EVERY, FEW = 5.0, 1_000_000  # seconds, and bytes: of fewer the rate says little
EPSILON = float(np.finfo(np.float32).eps)  # of the norms in training/gpt.py, as torch has it
ROTARY_BASE = 10_000.0  # of training/gpt.py
STEEP = 4096.0  # a power of 2, so that weights times it are exact; silu(STEEP x) x / STEEP is relu(x) x up to 3e-8
NEVER = "\u2400 \u2400"  # a merge of letters that no byte has: readers of GGUF want one, where a token is a byte


def fetch(name: str, *, offline: bool) -> Path:
    """The folder of the model `name`: such a folder, or one in the cache, into which it is fetched unless `offline`.

    Raises OSError or ValueError where it cannot be had, ImportError likewise.
    """
    if (folder := Path(name).expanduser()).is_dir():
        return folder.absolute()
    from huggingface_hub import snapshot_download
    from tqdm import tqdm

    class Told(tqdm):  # type: ignore[type-arg]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named | {"mininterval": TELL_EVERY, "bar_format": FETCHED + FAR})

        def display(self, *_: Any, **__: Any) -> None:
            if self.unit == "B" and FEW < self.n < self.total:  # another counts files
                print(self, flush=True)

    kinds = {"allow_patterns": WANTED, "ignore_patterns": UNWANTED}
    return Path(snapshot_download(name, local_files_only=offline, tqdm_class=Told, **kinds))


def cache() -> Path:
    """Where models are kept on this machine, as the hub's own library has it; the owner's token is not in there."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{base}/huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(named).expanduser().absolute()


def weights_hash(folder: Path) -> str:
    """sha-256 over names and hashes of a model's weights and its config.json, 64 hex digits: two folders that begin
    alike have the same. Blocking; reads all of it. Raises OSError, ValueError where there are no such weights."""
    weights = sorted(path for path in folder.glob("*.safetensors") if not path.match(UNWANTED[1]))
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


def as_qwen3(
    spec: RunSpec, tensors: Mapping[str, NDArray[np.float32]]
) -> tuple[dict[str, NDArray[np.float32]], dict[str, Any]]:
    """The GPT of a run as a Qwen3 of `transformers`: tensors and config.json of the same function of tokens.

    The norms there have weights, which are 1, and none lies behind the embedding, whose rows are therefore written
    normalised. ReLU² is relu(up) up, so that the gate has the weights of up. `tensors` have the names of training/gpt.
    Raises ValueError where there is no such model.
    """
    model = spec.model
    if spec.task.name not in ("gpt", "byte-lm"):
        raise ValueError(f"the task {spec.task.name} has no model that is written as a Qwen3")
    if model.value_embeddings:
        raise ValueError("no model of transformers has value embeddings ([model] value_embeddings = true)")
    rows, ones = tensors["tokens.weight"], np.ones(model.width, np.float32)
    scale = np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + EPSILON)
    written = {"model.embed_tokens.weight": rows / scale, "model.norm.weight": ones}
    written["lm_head.weight"] = rows if model.tied else tensors["head.weight"]
    for number in range(model.layers):
        here, there = f"blocks.{number}.", f"model.layers.{number}."
        gate = "up" if model.activation == "relu2" else "gate"
        names = {f"self_attn.{one}_proj": f"attention.{one}" for one in "qkv"} | {"self_attn.o_proj": "attention.out"}
        names |= {"mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down", "mlp.gate_proj": f"mlp.{gate}"}
        written |= {f"{there}{name}.weight": tensors[f"{here}{own}.weight"] for name, own in names.items()}
        written |= {f"{there}{name}_layernorm.weight": ones for name in ("input", "post_attention")}
        written |= {f"{there}self_attn.{one}_norm.weight": ones[: model.width // model.heads] for one in "qk"}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "relu" if model.activation == "relu2" else "silu",
        "hidden_size": model.width,
        "intermediate_size": len(tensors["blocks.0.mlp.up.weight"]),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "head_dim": model.width // model.heads,
        "max_position_embeddings": model.context,
        "rope_theta": ROTARY_BASE,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
        "rms_norm_eps": EPSILON,
        "vocab_size": len(rows),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }
    return written, config


def write_gguf(path: Path, spec: RunSpec, tensors: Mapping[str, NDArray[np.float32]], tokenizer: bytes) -> None:
    """Write the GPT of a run as the one file that llama.cpp reads: GGUF 3, architecture qwen3, float32. Blocking.

    That architecture has SwiGLU only, so relu(up) up becomes silu(STEEP up) up / STEEP, which differs by 3e-8 at most.
    `tokenizer`: the run's tokenizer.json; empty in a run on bytes, whose tokens are then the letters of GPT-2's bytes.
    Raises ValueError where llama.cpp has no such model or tokenizer, ImportError without the extra gguf, OSError.
    """
    import gguf

    written, shape = as_qwen3(spec, tensors)
    if not tokenizer and shape["vocab_size"] != BYTES:
        raise ValueError("the run's tokens came without a tokenizer")
    words, merges = _words(tokenizer)
    kinds = [gguf.TokenType.NORMAL] * len(words)
    unused = range(len(words), shape["vocab_size"])
    end = end_of(tokenizer) if tokenizer else None
    if end is not None:
        kinds[end] = gguf.TokenType.CONTROL
    beside = path.with_name(f".{path.name}.part")
    writer = gguf.GGUFWriter(beside, "qwen3")
    writer.add_name(spec.run.name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    sizes = {"block_count": "num_hidden_layers", "context_length": "max_position_embeddings"}
    sizes |= {"embedding_length": "hidden_size", "feed_forward_length": "intermediate_size"}
    sizes |= {"head_count": "num_attention_heads", "head_count_kv": "num_key_value_heads", "key_length": "head_dim"}
    sizes |= {"value_length": "head_dim", "layer_norm_rms_eps": "rms_norm_eps", "rope_freq_base": "rope_theta"}
    for field, key in (sizes | {"vocab_size": "vocab_size"}).items():
        getattr(writer, f"add_{field}")(shape[key])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*words, *(f"[PAD{id}]" for id in unused)])
    writer.add_token_types([*kinds, *(gguf.TokenType.UNUSED for _ in unused)])
    writer.add_token_merges(merges or [NEVER])
    writer.add_bos_token_id(end or 0)  # of bytes that which no text has: readers assume 11 where none is named
    writer.add_eos_token_id(end or 0)
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, spec.model.layers)
    scales = {"mlp.gate_proj": STEEP, "mlp.up_proj": STEEP**-0.5, "mlp.down_proj": STEEP**-0.5}
    for name, tensor in written.items():
        bare = name.removesuffix(".weight")
        scale = scales.get(bare.split(".", 3)[-1], 1.0) if shape["hidden_act"] == "relu" else 1.0
        writer.add_tensor(f"{names.get_name(bare)}.weight", tensor if scale == 1 else tensor * np.float32(scale))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _words(tokenizer: bytes) -> tuple[list[str], list[str]]:
    """Tokens by id and merges as GPT-2 writes them. Raises ValueError for a tokenizer of another kind."""
    if not tokenizer:
        return sorted(LETTERS, key=LETTERS.__getitem__), []
    with suppress(AttributeError, KeyError, TypeError, TokenizerError):  # what peers made may be of any shape
        words, end = [f"[PAD{id}]" for id in range(size_of(tokenizer))], end_of(tokenizer)
        told = json.loads(tokenizer)
        model, cut = told["model"], told.get("pre_tokenizer") or {}
        as_gpt2 = model["type"] == "BPE" and cut["type"] == "ByteLevel" and cut.get("use_regex", True)
        if as_gpt2 and not cut.get("add_prefix_space") and not told.get("normalizer") and end is not None:
            for word, id in [*model["vocab"].items(), *((add["content"], add["id"]) for add in told["added_tokens"])]:
                words[id] = word
            return words, [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    raise ValueError("the run's tokenizer is no byte-level BPE that cuts and ends texts as GPT-2 does")


def main() -> None:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    name, *offline = sys.argv[1:]
    try:
        print(fetch(name, offline=bool(offline)))
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        missing = isinstance(error, ImportError)
        hint = f"; models of the hub need more packages: {installing('swarmnode[hf]')}" if missing else ""
        print(f"the model {name!r} cannot be fetched: {' '.join(str(error).split())}{hint}")
        sys.exit(1)


if __name__ == "__main__":
    main()
