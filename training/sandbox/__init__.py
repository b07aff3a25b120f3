"""The trainer's sandbox: what bytes of strangers could make it do, if they ever took it over, ends at the kernel.

    report = enter(Rules(scratch="/var/lib/swarmnode/trainer", readable=("/srv/corpus",)))

A trainer reads peers' parameters, rollouts and run files through torch, numpy and transformers, millions of lines that
nobody here wrote. So before it reads a byte of them it gives up, for good, what it does not need: rights that a program
could win back (`system`), the files of the machine but for those named (`landlock`), and other programs, sockets,
signals to others and changes of owner and mode (`seccomp`). Only ctypes and the standard library, so that it comes
before everything else; the process has one thread then, and those that follow inherit.

A kernel may lack a part. It is named in the report, and the caller decides what then (`[sandbox]` of a node).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from swarmnode.training.sandbox import landlock, seccomp, system
from swarmnode.training.sandbox.system import cap_files as cap_files

NO_NETWORK = (
    "this system gives the trainer's ranks no network of their own (an ordinary user must be allowed to make user and "
    "network namespaces), so that they could open connections to anywhere; a trainer of one rank opens none"
)


@dataclass(frozen=True)
class Rules:
    """What a trainer may have beside what every Python program with torch needs."""

    mode: str = "auto"  # auto: as much as this kernel can enforce; require: all of it; off: none but the cap on memory
    scratch: str = ""  # the one directory that it may write to; empty: none
    readable: tuple[str, ...] = ()  # files and directories of the task: corpus, shards, a model
    memory: int = 0  # bytes of its own; 0 is no cap
    ranks: int = 1  # processes, among which it is divided, and which speak with each other by TCP
    gpu: bool = True  # what is there, with what its driver needs


@dataclass(frozen=True)
class MissingPart:
    part: str
    why: str


@dataclass(frozen=True)
class SandboxReport:
    mode: str
    enforced: tuple[str, ...] = ()
    missing: tuple[MissingPart, ...] = ()


def leave_network(rules: Rules) -> None:
    """Where there will be several ranks, go to a network of their own, if the system lets this process.

    `enter` reports it where not. Called before the ranks are forked, by a process with one thread.
    """
    if rules.ranks > 1 and rules.mode != "off":
        with suppress(OSError):
            system.make_own_network()


def enter(rules: Rules) -> SandboxReport:
    """Put this process under `rules`, for good. Called once, by a process with one thread.

    A part that fails is reported as missing, the others are tried all the same. `off`: only the cap on memory holds.
    """
    system.cap_memory(rules.memory // rules.ranks)
    if rules.mode == "off":
        return SandboxReport("off", missing=(MissingPart("sandbox", "turned off by this node's settings"),))
    several = rules.ranks > 1
    enforced: list[str] = []
    missing: list[MissingPart] = []
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        missing.append(MissingPart("threads", f"{threads - 1} began before the sandbox and are outside of it"))
    rights = landlock.rights(scratch=rules.scratch, readable=rules.readable, gpu=rules.gpu)
    cuda = rules.gpu and bool(landlock.cuda_devices())
    parts: tuple[tuple[str, Callable[[], list[str] | None]], ...] = (
        ("privileges", system.give_up_privileges),
        ("core dumps", system.leave_no_core),
        ("limits", system.set_limits),
        ("files", lambda: landlock.restrict(rights, ranks=several)),
        ("programs, sockets and signals", lambda: seccomp.refuse(os.getpid(), tcp=several, cuda=cuda)),
    )
    if several and not system.has_own_network():
        missing.append(MissingPart("network", NO_NETWORK))
    for part, put_in_force in parts:
        try:
            lacking = put_in_force()
        except OSError as error:
            missing.append(MissingPart(part, str(error.strerror or error)))
        else:
            enforced.append(part)
            missing += [MissingPart(part, why) for why in lacking or ()]
    return SandboxReport(rules.mode, tuple(enforced), tuple(missing))
