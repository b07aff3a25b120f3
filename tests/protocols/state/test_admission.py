"""Who may take part: a function of the run and the peer id alone, so that all nodes agree."""

from __future__ import annotations

import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.node.identity import peer_id_of
from swarmnode.protocols.state.membership import admitted, work_of, work_of_key
from swarmnode.training.options import SettingError
from swarmnode.training.runspec import RunSpec, parse_runspec


def key(number: int) -> bytes:
    seed = hashlib.sha256(f"key {number}".encode()).digest()
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


KEYS = [key(number) for number in range(64)]
PEERS = [peer_id_of(raw) for raw in KEYS]
WORTHY = next(peer for peer in PEERS if work_of(peer) >= 4)
CHEAP = next(peer for peer in PEERS if work_of(peer) < 4)


def run(**trust: object) -> RunSpec:
    return parse_runspec({"run": {"name": "r", "trust": "open"}, "trust": trust}, source="test")


def test_work_is_what_the_puzzle_says_and_the_peer_id_tells_it() -> None:
    for raw, peer in zip(KEYS, PEERS, strict=True):
        bits = f"{int.from_bytes(hashlib.sha256(hashlib.sha256(raw).digest()).digest(), 'big'):0256b}"
        assert work_of(peer) == work_of_key(raw) == len(bits) - len(bits.lstrip("0"))
    assert {work_of(peer) for peer in PEERS} > {0, 1, 2}


def test_who_has_the_work_is_admitted_and_who_lacks_it_is_not() -> None:
    assert CHEAP in admitted(run())
    asks = admitted(run(identity_bits=4))
    assert WORTHY in asks and CHEAP not in asks
    assert sum(peer in asks for peer in PEERS) == sum(work_of(peer) >= 4 for peer in PEERS) < len(PEERS) // 4


def test_those_whom_the_run_names_need_no_work() -> None:
    assert CHEAP in admitted(run(identity_bits=40, validators=[CHEAP]))
    owned = parse_runspec(
        {"run": {"name": "r", "trust": "open", "owner": CHEAP}, "trust": {"identity_bits": 40}}, source="test"
    )
    assert CHEAP in admitted(owned) and WORTHY not in admitted(owned)
    assert CHEAP in admitted(run(identity_bits=4).begun_by(CHEAP))


@pytest.mark.parametrize("peer", ["", "a", "12D3KooW", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "0OIl"])
def test_what_is_no_key_has_no_work_and_is_refused(peer: str) -> None:
    assert work_of(peer) == -1
    assert peer not in admitted(run(identity_bits=1))


def test_listed_members_alone_are_admitted_and_work_beside_them_is_a_mistake() -> None:
    listed = parse_runspec({"run": {"name": "r", "members": [CHEAP]}}, source="test")
    assert CHEAP in admitted(listed) and WORTHY not in admitted(listed)
    with pytest.raises(SettingError, match="members"):
        parse_runspec(
            {"run": {"name": "r", "trust": "open", "members": [CHEAP]}, "trust": {"identity_bits": 4}}, source="test"
        )


def test_runs_by_rollouts_may_ask_for_work_too() -> None:
    spec = parse_runspec(
        {"run": {"name": "r", "trust": "open"}, "task": {"name": "digits-rl"}, "trust": {"identity_bits": 4}},
        source="test",
    )
    assert CHEAP not in admitted(spec) and WORTHY in admitted(spec)
    with pytest.raises(SettingError, match="no meaning"):
        parse_runspec({"run": {"name": "r"}, "trust": {"identity_bits": 4}}, source="test")


def test_a_run_that_asks_for_nothing_keeps_its_id() -> None:
    assert run(identity_bits=0).run_id == run().run_id != run(identity_bits=1).run_id
