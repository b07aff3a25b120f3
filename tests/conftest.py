"""What all tests share: how `async def` tests run, and how many examples property tests try.

That is 100 by default, 2000 with `--hypothesis-profile thorough`. Tests of promises therefore do not set `max_examples`
themselves. Examples have no deadline, since runs share machines.
"""

import inspect
import os
import sys
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: with a pool of threads each, torch and numpy mostly wait for one another. Set before
    # either is imported; the nodes that tests start inherit it.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

settings.register_profile("quick", max_examples=100, deadline=None)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile("quick")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is `async def` runs on trio."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    import trio

    from swarmnode.testing.simnet import run_simulation

    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    run = run_simulation if pyfuncitem.get_closest_marker("virtual_time") else trio.run
    run(partial(pyfuncitem.obj, **given))
    return True


@pytest.fixture(autouse=True)
def short_hash_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making one takes a fifth of a second, and simulated nodes lead some rounds only."""
    monkeypatch.setattr("swarmnode.protocols.chain.state.LENGTH", 1 << 10)


@pytest.fixture(autouse=True, scope="module")
def torch_as_before() -> Iterator[None]:
    """What trains in this process sets torch's threads, and has subnormal numbers taken for zero."""
    before = os.environ.get("OMP_NUM_THREADS")
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_flush_denormal(False)
        torch.set_num_threads(int(before or os.cpu_count() or 1))
