"""What a daemon sets for its process, in processes of their own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Threads that hold 8 MB for a moment, one after another, as a daemon's workers do. Prints what stays, in MB.
CHURN = """
import ctypes, sys, threading
from swarmnode.node.process import resident_bytes, share_arenas
if sys.argv[1] == "shared":
    share_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, where glibc itself comes to once such vectors were freed
before, all_live, one = resident_bytes(), threading.Barrier(12), threading.Lock()
def work():
    all_live.wait()
    with one:
        held = libc.malloc(8 << 20)
        ctypes.memset(held, 1, 8 << 20)
        libc.malloc(1 << 16)  # what the thread goes on needing lies above
        libc.free(held)
    all_live.wait()
threads = [threading.Thread(target=work) for _ in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print((resident_bytes() - before) / 2**20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
def test_what_one_thread_freed_serves_another() -> None:
    def kept(arenas: str) -> float:
        done = subprocess.run([sys.executable, "-c", CHURN, arenas], capture_output=True, text=True, check=True)
        return float(done.stdout)

    assert kept("shared") < 0.3 * kept("own")
