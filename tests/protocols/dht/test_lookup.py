"""Lookups: what dead, frozen and lying routers cannot do to them; on virtual time, routers being functions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import pytest
import trio
import trio.testing

from swarmnode.node.identity import peer_id_of
from swarmnode.protocols.dht.lookup import LookupLimits, lookup, sorted_by_distance

KEY = b"some key"
LIMITS = LookupLimits()
PEERS = [peer_id_of(hashlib.sha256(f"peer {number}".encode()).digest()) for number in range(400)]


class Routers:
    """A network of functions: each peer knows a seventh of the others, and names the twenty nearest to the key."""

    def __init__(self, peers: list[str], *, dead: Iterable[str] = (), frozen: Iterable[str] = ()) -> None:
        self.dead, self.frozen = set(dead), set(frozen)
        self.asked: list[str] = []
        self.lies: dict[str, list[str]] = {}
        self.known = {peer: peers[(number + 1) % 7 :: 7] for number, peer in enumerate(peers)}

    enough = False

    async def ask(self, peer: str) -> list[str] | None:
        self.asked.append(peer)
        await trio.sleep(0.02)
        if peer in self.frozen:
            await trio.sleep_forever()
        if peer in self.dead or peer not in self.known:
            return None
        return self.lies.get(peer) or sorted_by_distance(KEY, self.known[peer])[:20]


def look_up(routers: Routers, first_hand: list[str]) -> tuple[list[str], float]:
    async def main() -> tuple[list[str], float]:
        started = trio.current_time()
        return await lookup(KEY, first_hand, routers, me="me"), trio.current_time() - started

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_lookup_finds_the_closest_and_asks_nobody_twice() -> None:
    routers = Routers(PEERS)
    answered, _ = look_up(routers, PEERS[-20:])
    assert answered[:8] == sorted_by_distance(KEY, PEERS)[:8]
    assert len(routers.asked) == len(set(routers.asked)) <= LIMITS.most + 20


def test_few_are_asked_where_answers_come_soon_and_a_frozen_one_holds_a_path_up_for_a_moment() -> None:
    class Known(Routers):
        @property
        def enough(self) -> bool:
            return bool(set(sorted_by_distance(KEY, PEERS)[:3]) & set(self.asked))

    quick = Known(PEERS)
    _, seconds = look_up(quick, PEERS[-40:])
    assert quick.enough and seconds < LIMITS.hurry and len(quick.asked) <= LIMITS.paths * 5
    nearest = sorted_by_distance(KEY, PEERS[-40:])[: LIMITS.paths]
    held = Known(PEERS, frozen=nearest)
    _, seconds = look_up(held, PEERS[-40:])
    assert held.enough and LIMITS.hurry < seconds < LIMITS.hurry + 0.2


def test_a_lookup_that_asked_all_does_not_wait_for_who_would_have_helped() -> None:
    assert look_up(Routers(PEERS[:3]), PEERS[:3])[1] < LIMITS.hurry


def test_it_ends_in_time_where_all_or_a_quarter_are_frozen() -> None:
    assert look_up(Routers(PEERS, frozen=PEERS), PEERS[-40:])[1] <= LIMITS.seconds
    assert look_up(Routers(PEERS, frozen=PEERS[::4]), PEERS[-40:])[0]


@pytest.mark.parametrize("live", [False, True], ids=["invented", "answering"])
def test_a_fifth_of_liars_hides_no_first_hand_peer_and_not_the_closest(live: bool) -> None:
    ground = [peer_id_of(hashlib.sha256(f"ground {number}".encode()).digest()) for number in range(4000)]
    ground = sorted_by_distance(KEY, ground)[:100]
    routers = Routers(PEERS)
    for liar in PEERS[::5]:
        routers.lies[liar] = ground
    if live:
        for peer in ground:
            routers.known[peer] = routers.lies[peer] = ground
    first_hand = PEERS[-21:]
    answered, _ = look_up(routers, first_hand)
    assert set(first_hand) <= set(answered)
    honest = [peer for peer in sorted_by_distance(KEY, PEERS)[:20] if peer in answered]
    assert len(honest) >= (10 if not live else 1)


def test_first_hand_dead_peers_do_not_end_a_lookup() -> None:
    first_hand = PEERS[-20:]
    routers = Routers(PEERS, dead=first_hand[:-1])
    answered, _ = look_up(routers, first_hand)
    assert sorted_by_distance(KEY, PEERS)[0] in answered


def test_nobody_known_is_an_empty_answer() -> None:
    assert look_up(Routers(PEERS), []) == ([], 0.0)
