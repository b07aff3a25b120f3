"""Landlock: which files a process may read and write, by directory (Linux 5.13; landlock(7)).

What is not named is refused. Nothing at all may be executed; shared libraries are read. Since Linux 6.7 TCP is refused
as well, since 6.12 signals to, and abstract sockets of, processes outside. `rights` names what a Python program with
torch needs: neither a home directory nor the node's key.
"""

from __future__ import annotations

import errno
import glob
import os
import stat
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence

from swarmnode.training.sandbox.system import call

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1

WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
_FIRST = (1 << 13) - 1  # all rights of the first version: execute, read, write, make and remove of every kind
_SINCE = {2: 1 << 13, 3: TRUNCATE, 5: IOCTL_DEV}  # rights that later versions know: link and rename to elsewhere, ...
_OF_FILES = (1 << 0) | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # the others have a meaning for directories only
_BIND_AND_CONNECT_TCP = 0b11  # version 4
_ABSTRACT_SOCKETS, _SIGNALS = 0b01, 0b10  # version 6

READ = READ_FILE | READ_DIR
DEVICE = READ_FILE | WRITE_FILE | IOCTL_DEV
_SPECIAL = 1 << 6 | 0b1111 << 9  # to make devices, sockets, FIFOs, and symbolic links: the daemon would follow them
WRITE = (_FIRST & ~1 & ~_SPECIAL) | _SINCE[2] | TRUNCATE  # everything else but to execute


def version() -> int:
    """The kernel's version of Landlock, from 1; 0 where there is none."""
    try:
        return call(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EACCES):
            return 0
        raise


def restrict(rights: Mapping[str, int], *, ranks: bool) -> list[str]:
    """Allow this process `rights` and nothing else; what the kernel cannot refuse, in words.

    One of several `ranks` may use TCP, and its end ends the others, which is a signal; seccomp refuses all other ones.

    Paths that do not exist are passed over. Needs no_new_privs. Raises OSError where there is no Landlock.
    """
    known = version()
    if not known:
        raise OSError(errno.ENOSYS, "this kernel has no Landlock (Linux 5.13), or it is switched off")
    handled = _FIRST
    for since, access in _SINCE.items():
        handled |= access if known >= since else 0
    network = _BIND_AND_CONNECT_TCP if known >= 4 and not ranks else 0
    scoped = (_ABSTRACT_SOCKETS if ranks else _ABSTRACT_SOCKETS | _SIGNALS) if known >= 6 else 0
    size = 8 if known < 4 else 16 if known < 6 else 24  # bytes of the structure that this version reads
    descriptor = call(_CREATE_RULESET, struct.pack("=3Q", handled, network, scoped), size, 0)
    try:
        for path, access in rights.items():
            _allow(descriptor, path, access & handled)
        call(_RESTRICT_SELF, descriptor, 0)
    finally:
        os.close(descriptor)
    return [] if known >= 3 else ["files that it may read can be emptied before Linux 6.2"]


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP):
            return
        raise
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            access &= _OF_FILES
        call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, struct.pack("=Qi", access, place), 0)
    finally:
        os.close(place)


# -- what a trainer needs

LIBRARIES = ("/usr", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store", "/run/opengl-driver")
# passwd has names of users; no passwords have been there for decades
_ETC = "ld.so.cache ld.so.conf ld.so.conf.d localtime passwd group nsswitch.conf os-release nvidia OpenCL"
SETTINGS = tuple(f"/etc/{name}" for name in _ETC.split())
_PROC = "self cpuinfo devices driver filesystems loadavg meminfo modules stat sys uptime version"
SYSTEM = ("/sys", *(f"/proc/{name}" for name in _PROC.split()))
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
CUDA = ("/dev/nvidia*", "/dev/dxg", "/dev/nvhost*", "/dev/nvmap")  # of NVIDIA, also in WSL and on a Jetson
ACCELERATORS = (*CUDA, "/dev/kfd", "/dev/dri/render*")


def rights(*, scratch: str, readable: Sequence[str], gpu: bool) -> dict[str, int]:
    """Everything that a trainer may open: libraries, devices, `readable`, and `scratch` for writing.

    By path, what may be done with a file, or with a directory and all below it.
    """
    given = dict.fromkeys((*LIBRARIES, *SETTINGS, *SYSTEM, *_interpreter(), *readable), READ)
    given |= dict.fromkeys(DEVICES, DEVICE)
    if gpu:
        given |= {path: DEVICE | READ for pattern in ACCELERATORS for path in glob.glob(pattern)}
    if gpu and cuda_devices():  # CUDA fails if it cannot name its threads
        given["/proc/self/task"] = READ | WRITE_FILE | TRUNCATE
    if scratch:
        given[scratch] = WRITE
    return given


def cuda_devices() -> list[str]:
    """The device files of this machine's GPUs that CUDA is for."""
    return [path for pattern in CUDA for path in glob.glob(pattern)]


def _interpreter() -> Iterator[str]:
    """Where this Python, what is installed for it, and this package are."""
    yield from (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)
    yield from (path for path in sys.path if os.path.isabs(path))
    for name in ("swarmnode", "swarmnode.training"):
        yield from sys.modules[name].__path__
    yield from (path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if os.path.isabs(path))
