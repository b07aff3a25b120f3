"""System calls by number, for what the C library has no function for. Raises OSError as `os` does."""

from __future__ import annotations

import ctypes
import os
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def call(number: int, *arguments: int | ctypes.Structure | None) -> int:
    """The call's result. `arguments`: numbers, which go as 64 bits, and structures, of which the address goes."""
    return _checked(_libc.syscall(ctypes.c_long(number), *map(_given, arguments)))


def prctl(option: int, *arguments: int | ctypes.Structure) -> int:
    """prctl(2); what is not given is 0."""
    return _checked(_libc.prctl(ctypes.c_int(option), *map(_given, (*arguments, 0, 0, 0, 0)[:4])))


def _given(value: int | ctypes.Structure | None) -> Any:
    if isinstance(value, int):
        return ctypes.c_long(value)
    return None if value is None else ctypes.byref(value)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
