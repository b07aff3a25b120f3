"""Laboratory tests import what they share from this folder, and share a laboratory with two relays."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from collections.abc import Iterator

import pytest
from agents import Relay, relays
from lab import Lab, why_not

REASON = why_not()


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    if REASON is not None:
        pytest.skip(f"no network laboratory here: {REASON}")
    with Lab() as lab:
        yield lab


@pytest.fixture(scope="session")
def two_relays(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Relay]]:
    with relays(lab, tmp_path_factory.mktemp("relays")) as found:
        yield found
