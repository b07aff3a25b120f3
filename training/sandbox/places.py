"""Which files of a machine a Python program with torch needs: neither a home directory nor the node's key."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Sequence

from swarmnode.training.sandbox.landlock import DEVICE, READ, WRITE, Right

LIBRARIES = ("/usr", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store", "/run/opengl-driver")
SETTINGS = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/passwd",  # names of users; no passwords have been there for decades
    "/etc/group",
    "/etc/nsswitch.conf",
    "/etc/os-release",
    "/etc/nvidia",
    "/etc/OpenCL",
)
SYSTEM = (
    "/sys",
    "/proc/self",
    "/proc/cpuinfo",
    "/proc/devices",
    "/proc/driver",
    "/proc/filesystems",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/modules",
    "/proc/stat",
    "/proc/sys",
    "/proc/uptime",
    "/proc/version",
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# Of NVIDIA, AMD, WSL and Jetson.
ACCELERATORS = ("/dev/nvidia*", "/dev/kfd", "/dev/dri/render*", "/dev/dxg", "/dev/nvhost*", "/dev/nvmap")


def rights(*, scratch: str, readable: Sequence[str]) -> list[Right]:
    """Everything that a trainer may open: libraries, devices, `readable`, and `scratch` for writing."""
    given = [Right(path, READ) for path in (*LIBRARIES, *SETTINGS, *SYSTEM, *_interpreter(), *readable)]
    given += [Right(path, DEVICE) for path in DEVICES]
    for pattern in ACCELERATORS:
        for path in glob.glob(pattern):
            given.append(Right(path, DEVICE | READ))
    if scratch:
        given.append(Right(scratch, WRITE))
    return given


def _interpreter() -> Iterator[str]:
    """Where this Python, what is installed for it, and this package are."""
    yield from (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)
    yield from (path for path in sys.path if os.path.isabs(path))
    for name in ("swarmnode", "swarmnode.training"):
        yield from sys.modules[name].__path__
    yield from (path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if os.path.isabs(path))
