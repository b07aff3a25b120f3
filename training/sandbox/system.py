"""System calls by number, for what the C library has no function for, and what a process gives up or bounds with them:
privileges, core dumps, memory, threads, files (prctl(2), getrlimit(2)). All raise OSError as `os` does.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import resource
import socket
import struct
from contextlib import suppress
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def call(number: int, *arguments: int | bytes | None) -> int:
    """The call's result. `arguments`: numbers, which go as 64 bits, and structures, of which the address goes."""
    return _checked(_libc.syscall(ctypes.c_long(number), *map(_given, arguments)))


def prctl(option: int, *arguments: int | bytes) -> int:
    """prctl(2); what is not given is 0."""
    return _checked(_libc.prctl(ctypes.c_int(option), *map(_given, (*arguments, 0, 0, 0, 0)[:4])))


def _given(value: int | bytes | None) -> Any:
    return ctypes.c_long(value) if isinstance(value, int) else value


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


# -- what a process may win back or use up

_PR_SET_DUMPABLE = 4
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION = 0x20080522  # two words of 32 capabilities

OPEN_FILES = 4096
MORE_THREADS = 4096  # of this user, beyond those that there are: the limit counts all of the user's
SCRATCH_FILE = 1 << 30  # bytes of a file in the end
UNLIMITED = resource.RLIM_INFINITY


def give_up_privileges() -> list[str]:
    """No program that it starts gains rights, and it keeps none of root's (capabilities(7)); else why, in words."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    number = _CAPSET.get(platform.machine())
    if number is not None:
        # none effective, permitted or inheritable, of the low and the high 32
        call(number, struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24))
        return []
    return [] if os.geteuid() else [f"root's capabilities cannot be given up on {platform.machine()}"]


_UNSHARE = {"x86_64": 272, "aarch64": 97}
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP


def make_own_network() -> None:
    """Be, with all processes forked from here, in a network with no interface but loopback (network_namespaces(7)).

    For that this process goes to a user namespace, in which its user is who he was and others are nobody. Only a
    process with one thread may; some systems let no ordinary user.
    """
    user, group = os.getuid(), os.getgid()
    call(_UNSHARE.get(platform.machine(), -1), _NEW_USER | _NEW_NET)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack("16s16x", b"lo")))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


def has_own_network() -> bool:
    """Whether there is no interface here but loopback."""
    with open("/proc/self/net/dev") as table:
        return all(line.partition(":")[0].strip() == "lo" for line in table.readlines()[2:])


def leave_no_core() -> None:
    """A crash leaves no image of its memory. A zero limit does not keep it from a program such as systemd-coredump."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl(_PR_SET_DUMPABLE, 0)


def cap_memory(most: int) -> None:
    """Bytes of its own (private, writable) at the most, 0 for no cap; files that it maps do not count."""
    if most:
        _lower(resource.RLIMIT_DATA, most)


def set_limits() -> None:
    _lower(resource.RLIMIT_NOFILE, OPEN_FILES)
    _lower(resource.RLIMIT_NPROC, _threads_of(os.getuid()) + MORE_THREADS)
    # The parameters are a file to the kernel, and their size is not known yet: `cap_files` follows.
    _lower(resource.RLIMIT_FSIZE, max(SCRATCH_FILE, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))


def cap_files(largest: int = 0) -> None:
    """From now on no file may grow beyond SCRATCH_FILE or `largest`: the memory of the parameters has its size."""
    _lower(resource.RLIMIT_FSIZE, max(SCRATCH_FILE, largest))


def _lower(which: int, to: int) -> None:
    """Set soft and hard limit to `to`, or leave them lower than that."""
    soft, hard = (to if limit == UNLIMITED else min(to, limit) for limit in resource.getrlimit(which))
    resource.setrlimit(which, (soft, hard))


def _threads_of(uid: int) -> int:
    """Threads of all processes of a user; of those that can be seen."""
    threads = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
                if os.stat(f"/proc/{name}").st_uid == uid:
                    threads += len(os.listdir(f"/proc/{name}/task"))
    return threads
