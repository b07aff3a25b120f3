"""Find a key that cost work, for runs that admit no others (`[trust] identity_bits`; protocols/state/admission.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.protocols.state.admission import work_of_key

BATCH = 4096  # keys that a process tries before it is heard of: a tenth of a second or two

Progress = Callable[[int, float], None]  # keys tried, and keys a second


def mine(bits: int, *, processes: int = 0, progress: Progress = lambda tried, rate: None) -> Ed25519PrivateKey:
    """A new key with at least so many bits of work, after 2^bits tries on average.

    `processes`: that look for it at the same time, 0 for one on each core. `progress` is told now and then.
    """
    began, tried = time.monotonic(), 0
    workers = processes or os.cpu_count() or 1
    with ProcessPoolExecutor(workers) as pool:
        searching: set[Future[bytes | None]] = {pool.submit(_search, bits, BATCH) for _ in range(workers)}
        try:
            while True:
                done, searching = wait(searching, return_when=FIRST_COMPLETED)
                tried += BATCH * len(done)
                for found in done:
                    seed = found.result()
                    if seed is not None:
                        return Ed25519PrivateKey.from_private_bytes(seed)
                    searching.add(pool.submit(_search, bits, BATCH))
                progress(tried, tried / max(time.monotonic() - began, 1e-9))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _search(bits: int, tries: int) -> bytes | None:
    """The seed of a key with the work, if one is among so many."""
    for _ in range(tries):
        seed = os.urandom(32)
        if work_of_key(Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()) >= bits:
            return seed
    return None
