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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class TrainerSettings:
    """How this node's trainer runs; none of it is part of the run."""

    threads: int = 0  # of torch; 0 means one for each core
    nice: int = 10
    device: str = "auto"  # auto, cpu or cuda
    corpus: str = ""  # file or folder; empty is the task's own default
    heldout: str = ""  # file with the run's held-out part; empty takes the corpus's own
    texts: tuple[str, ...] = ()  # files to train on instead of the corpus; `feed` adds to them
    room: int = 0  # bytes of text that there will ever be, where `texts` are given
    task: str = ""  # file.py:Class of a task that is not built in
    policy: str = ""  # of this node in a run by rollouts; empty takes the run's
    sampling: str = "auto"  # what writes the answers of an hf policy: auto, torch or vllm
    sandbox: str = "auto"  # auto, require or off
    scratch: str = ""  # directory of the trainer's own, emptied before each start; empty: it can write nowhere
    readable: tuple[str, ...] = ()  # files and directories that it may read beside those above
    memory: int = 0  # bytes of its own at the most; 0 is no cap


def rules(settings: TrainerSettings) -> Rules:
    """The sandbox of a trainer with these settings. Paths may begin with ~ and be relative to this process."""
    files = [settings.corpus, settings.heldout, *settings.readable]
    files.extend(str(Path(text).parent) for text in settings.texts)
    if settings.task:
        files.append(str(Path(settings.task.rpartition(":")[0]).expanduser().parent))
    named = hf_model(settings.policy)
    if named is not None and Path(named[1]).expanduser().is_dir():
        files.append(named[1])
    files.append(str(hub.cache()))  # a run file may name a model that is on this machine already
    absolute = dict.fromkeys(str(Path(file).expanduser().absolute()) for file in files if file)
    return Rules(mode=settings.sandbox, scratch=settings.scratch, readable=tuple(absolute), memory=settings.memory)


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
