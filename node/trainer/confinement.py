"""What the owner's settings allow the trainer: the rules of its sandbox, its environment, its one directory, its model.

The sandbox itself is `training/sandbox`, entered by the trainer. What has to be fetched from outside this machine is
fetched here, before there is a trainer, in a process that hears nothing from peers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import trio

from swarmnode.training.rl import hub
from swarmnode.training.runspec import hf_model
from swarmnode.training.sandbox import Rules

# Words of the names of variables that hold what a trainer has no use for: SWARMNODE_PASSPHRASE, HF_TOKEN, ...
SECRETS = frozenset({"CREDENTIALS", "KEY", "PASSPHRASE", "PASSWORD", "SECRET", "SOCK", "TOKEN"})
SCRATCH = "trainer"  # in the data directory


class NotFetched(Exception):
    """The model that the owner named cannot be had. The message says why."""


def rules(
    *, mode: str, scratch: str, memory: int, corpus: str, heldout: str, texts: tuple[str, ...], task: str,
    policy: str, readable: tuple[str, ...]
) -> Rules:  # fmt: skip
    """The sandbox of a trainer with these settings. Paths may begin with ~ and be relative to this process."""
    files = [corpus, heldout, *readable, *(str(Path(text).parent) for text in texts)]
    if task:
        files.append(str(Path(task.rpartition(":")[0]).expanduser().parent))
    named = hf_model(policy)
    if named is not None and Path(named[1]).expanduser().is_dir():
        files.append(named[1])
    files.append(str(hub.cache()))  # a run file may name a model that is on this machine already
    absolute = dict.fromkeys(str(Path(file).expanduser().absolute()) for file in files if file)
    return Rules(mode=mode, scratch=scratch, readable=tuple(absolute), memory=memory)


def exposed(told: Rules, directory: Path) -> str:
    """What the trainer may read that contains the node's own directory, and so its key; empty where nothing does."""
    own = directory.absolute()
    return next((path for path in told.readable if own == Path(path) or Path(path) in own.parents), "")


def environment(of: Mapping[str, str], *, threads: int, scratch: str) -> dict[str, str]:
    """The trainer's: without secrets, with its caches and temporary files in `scratch`."""
    kept = {name: value for name, value in of.items() if not SECRETS & set(name.upper().split("_"))}
    if threads:
        kept["OMP_NUM_THREADS"] = str(threads)
    if scratch:  # torch does not start without a place for temporary files
        kept |= dict.fromkeys(("TMPDIR", "CUDA_CACHE_PATH", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"), scratch)
    return kept | {"HF_HUB_OFFLINE": "1"}


@contextmanager
def scratch_directory(named: str) -> Iterator[str]:
    """The one directory that the trainer may write to: `named`, or one that lasts as long as this block."""
    if named:
        yield named
        return
    with tempfile.TemporaryDirectory(prefix="swarmnode-trainer-") as made:
        yield made


def empty(scratch: str) -> None:
    """Make the trainer's directory anew. Blocking. Raises OSError."""
    shutil.rmtree(scratch, ignore_errors=True)
    Path(scratch).mkdir(mode=0o700, parents=True, exist_ok=True)


async def fetch_model(policy: str) -> None:
    """Have the model of the owner's policy on this machine, where it is one. Raises NotFetched."""
    named = hf_model(policy)
    if named is None:
        return
    done = await trio.run_process(
        [sys.executable, "-P", "-m", "swarmnode.training.rl.hub", named[1]],
        stdin=subprocess.DEVNULL,
        capture_stdout=True,
        stderr=subprocess.STDOUT,
        check=False,
        env=dict(os.environ),
    )
    if done.returncode:
        words = done.stdout.decode(errors="replace").strip().splitlines()
        raise NotFetched(words[-1] if words else f"the model {named[1]!r} cannot be fetched")
