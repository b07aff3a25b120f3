"""Models of `transformers` on this machine: fetched from the hub, found, and known by the hash of their files.

    python -m swarmnode.training.hub Qwen/Qwen2.5-0.5B-Instruct       # prints the folder that it lies in

Run by the daemon as a process of its own, which hears nothing from peers, before the trainer starts: so only who owns
the machine says what is fetched from where, and the trainer needs no network. A folder is left as it is. What goes
wrong is printed in one line. With HF_HUB_OFFLINE=1 it only looks. Exit code 1: the model cannot be had.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

# Weights in safetensors and what tokenizers read; no pickled weights, no code, no copies for other runtimes.
WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
UNWANTED = ["*/*", "consolidated*"]


def fetch(name: str) -> Path:
    """Have the model `name` in the cache; the folder that it lies in.

    Raises OSError or ValueError where it cannot be had, ImportError likewise.
    """
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED))


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


def main() -> None:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    (name,) = sys.argv[1:]
    folder = Path(name).expanduser()
    try:
        print(folder.absolute() if folder.is_dir() else fetch(name))
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        print(f"the model {name!r} cannot be fetched: {' '.join(str(error).split())}")
        sys.exit(1)


if __name__ == "__main__":
    main()
