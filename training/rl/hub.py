"""Fetch a model of the Hugging Face hub into this machine's cache.

    python -m swarmnode.training.rl.hub Qwen/Qwen2.5-0.5B-Instruct

A process of its own, because the trainer, which reads what peers send, has no network. It is started only for a model
that this node's owner named, and hears nothing from peers. What is complete in the cache is not asked for again; a
folder on this machine is left as it is. It ends with code 1 and a sentence for people where the model cannot be had.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Weights in safetensors and what tokenizers read; no pickled weights, no code, no copies for other runtimes.
WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
UNWANTED = ["*/*", "consolidated*"]


def fetch(name: str) -> None:
    """Have the model `name` in the cache. Raises OSError or ValueError where it cannot be had, ImportError likewise."""
    from huggingface_hub import snapshot_download

    snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED)


def cache() -> Path:
    """Where models are kept on this machine, as the hub's own library has it; the owner's token is not in there."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{base}/huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(named).expanduser().absolute()


def main() -> None:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    (name,) = sys.argv[1:]
    if Path(name).expanduser().is_dir():
        return
    try:
        fetch(name)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        print(f"the model {name!r} cannot be fetched: {' '.join(str(error).split())}")
        sys.exit(1)


if __name__ == "__main__":
    main()
