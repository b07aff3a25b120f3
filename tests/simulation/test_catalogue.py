"""Runs are found by strangers, and no flood, forgery, replay or old entry hides an honest one; 64 simulated nodes."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import pytest
import trio

from swarmnode.crdt.envelope import Domain, Envelope, InvalidEnvelope
from swarmnode.node.discovery.finder import AddressBook, Discovery
from swarmnode.protocols import catalogue
from swarmnode.protocols.calls.rpc import Refused, Rpc
from swarmnode.protocols.catalogue import (
    KEPT,
    KEY,
    LIFETIME,
    LISTINGS,
    SKEW,
    Catalogue,
    GenuineListing,
    ListedRun,
    Listings,
    SignedListing,
    opened,
    sealed,
)
from swarmnode.protocols.state.membership import RunListing, serve_runs
from swarmnode.protocols.wire import Empty, plain
from swarmnode.testing.simnet import SimNetwork, SimWorld, run_with_nursery
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.runspec import encode as encode_spec

ASKED_WITHIN = 15.0  # s of virtual time


def spec(name: str, **run: object) -> RunSpec:
    return parse_runspec({"run": {"name": name, **run}}, source="test")


def listing(of: RunSpec, node: SimNetwork) -> ListedRun:
    return ListedRun(bytes.fromhex(of.run_id), parameters=10, memory=0, rate=0, addresses=node.addresses)


class Member:
    """A node with what it says of its run; `knows` is the specification that it gives."""

    def __init__(self, network: SimNetwork, *, keeps: bool = False) -> None:
        self.network, self.rpc = network, Rpc(network)
        self.catalogue = Catalogue(network, self.rpc, keeps=keeps)
        self.knows: RunSpec | None = None
        serve_runs(self.rpc, self._runs, lambda run_id: encode_spec(self.knows) if self.knows else None)

    def _runs(self) -> tuple[RunListing, ...]:
        return (RunListing(self.knows.run_id, self.knows.run.name, 7, 3),) if self.knows is not None else ()

    async def start(self, nursery: trio.Nursery, *seeds: str, run: RunSpec | None = None) -> Member:
        if run is not None:
            self.knows, self.catalogue.listing = run, listing(run, self.network)
        await nursery.start(self.network.run)
        for part in (self.rpc.run, self.catalogue.run, Discovery(self.network, AddressBook(None), seeds=seeds).run):
            await nursery.start(part)
        return self


def simulate(main: Callable[[SimWorld, trio.Nursery], Awaitable[None]]) -> None:
    run_with_nursery(main, SimWorld())


async def found_by(world: SimWorld, nursery: trio.Nursery, *seeds: str) -> list[str]:
    newcomer = await Member(world.node("newcomer")).start(nursery, *seeds)
    began = trio.current_time()
    runs = await newcomer.catalogue.search(within=ASKED_WITHIN)
    assert trio.current_time() - began <= ASKED_WITHIN
    return [run.spec.run.name for run in runs]


def test_a_newcomer_with_one_address_finds_the_runs_of_64_nodes() -> None:
    runs = [spec(f"run-{number}") for number in range(4)]

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        seed = await Member(world.node("seed"), keeps=True).start(nursery)
        place = seed.network.addresses[0]
        for number in range(62):
            member = Member(world.node(number))
            await member.start(nursery, place, run=runs[number % 5] if number % 5 < 4 else None)
        await trio.sleep(30)
        assert sorted(await found_by(world, nursery, place)) == [run.run.name for run in runs]

    simulate(main)


def test_the_seed_may_be_gone_once_the_newcomer_knows_a_member() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        seed = await Member(world.node("seed"), keeps=True).start(nursery)
        members = [await Member(world.node(n)).start(nursery, seed.network.addresses[0], run=spec("a")) for n in (1, 2)]
        await trio.sleep(30)
        world.kill(seed.network.me)
        assert await found_by(world, nursery, members[0].network.addresses[0]) == ["a"]

    simulate(main)


def flood(world: SimWorld, liar: SimNetwork, count: int, run: RunSpec) -> Iterator[tuple[GenuineListing, str]]:
    """Genuine listings of fake runs, each of an author of its own; 256 in each network."""
    for number in range(count):
        author = world.node(f"fake {number}")
        said = replace(listing(run, author), run_id=number.to_bytes(32, "big"))
        record = SignedListing(author.me, sealed(author, said))
        yield opened(liar, record), f"198.51.{number // 256}.0/24"


def test_ten_thousand_fake_runs_do_not_hide_an_honest_one() -> None:
    honest = spec("honest")

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        seed = await Member(world.node("seed"), keeps=True).start(nursery)
        place = seed.network.addresses[0]
        members = [world.node(number) for number in range(3)]
        fakes = list(flood(world, seed.network, 10_000, honest))
        for entry, network in fakes[:5_000]:
            seed.catalogue.keep(entry, network)
        for member in members:
            await Member(member).start(nursery, place, run=honest)
        await trio.sleep(30)
        for entry, network in fakes[5_000:]:
            seed.catalogue.keep(entry, network)
        assert len(seed.catalogue._kept) == KEPT
        # and the DHT names liars only, who list fakes as well
        for number in range(30):
            liar = Member(world.node(f"liar {number}"))
            liar.catalogue._kept = {entry.author: (entry, "") for entry, _ in random.sample(fakes, KEPT)}
            await liar.start(nursery)
            world.provide(KEY, liar.network.me)
        assert await found_by(world, nursery, place) == ["honest"]

    simulate(main)


def test_what_members_do_not_confirm_is_not_shown() -> None:
    honest, other = spec("honest"), spec("other")

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        seed = await Member(world.node("seed"), keeps=True).start(nursery)
        place = seed.network.addresses[0]
        member = await Member(world.node("member")).start(nursery, place, run=honest)
        absent = await Member(world.node("absent")).start(nursery, place, run=honest)
        absent.knows = other  # it lists a run in which it takes no part
        await Member(world.node("of the other")).start(nursery, place, run=other)
        await Member(world.node("quiet")).start(nursery, place, run=spec("quiet", unlisted=True))
        await trio.sleep(30)
        newcomer = await Member(world.node("newcomer")).start(nursery, place)
        found = {run.spec.run.name: run for run in await newcomer.catalogue.search(within=ASKED_WITHIN)}
        assert set(found) == {"honest", "other"}  # as its specification, not its listing, calls it
        assert set(found["honest"].witnesses) == {member.network.me}

    simulate(main)


def test_who_hands_on_a_forgery_is_believed_in_nothing() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        liar = await Member(world.node("liar")).start(nursery)
        victim, reader = world.node("victim"), await Member(world.node("reader")).start(nursery)
        said = listing(spec("honest"), victim)
        forged = SignedListing(victim.me, sealed(liar.network, said))
        entry = opened(reader.network, SignedListing(victim.me, sealed(victim, said)))
        liar.catalogue._kept = {victim.me: (replace(entry, record=forged.record), "")}
        await reader.network.connect(liar.network.addresses[0])
        assert await reader.catalogue._ask(liar.network.me) == []
        assert reader.rpc.violations.count(liar.network.me) == 1

    simulate(main)


def test_old_replayed_and_malformed_listings_do_not_count() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        node, now = world.node("node"), int(catalogue.wall_clock() * 1000)
        said = listing(spec("a"), node)
        assert len(sealed(node, replace(said, addresses=("x" * 255,) * 2))) <= 1024

        def told(said: ListedRun, signed: int) -> SignedListing:
            return SignedListing(node.me, LISTINGS.seal(plain(replace(said, signed=signed)), node.sign).sealed)

        good = told(said, now)
        entry = opened(node, good)
        assert entry.listing == replace(said, signed=now)
        assert entry.is_good(now / 1000 + LIFETIME - 1) and not entry.is_good(now / 1000 + LIFETIME)
        assert entry.is_good(now / 1000 - SKEW) and not entry.is_good(now / 1000 - SKEW - 1)
        other = Domain("other", 1, 1024).seal(plain(replace(said, signed=now)), node.sign).sealed
        for why, record in (
            ("not signed by", SignedListing(node.me, other)),
            ("not signed by", replace(good, author=world.node("other").me)),
            ("run id", told(replace(said, run_id=b"short"), now)),
            ("number", told(said, -1)),
            ("beyond its end", SignedListing(node.me, Envelope(b"\x81", bytes(64)).sealed)),
            ("no envelope", SignedListing(node.me, bytes(1025))),
        ):
            with pytest.raises(InvalidEnvelope, match=why):
                opened(node, record)
        keeper = Member(world.node("keeper"), keeps=True).catalogue
        newer = opened(node, told(replace(said, parameters=8), now + 5))
        for each in (newer, entry):
            keeper.keep(each, "")
        assert [entry.listing.parameters for entry in keeper._ranked()] == [8]

    simulate(main)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its last value is how many seconds the catalogue's clock is ahead."""
    real, by = catalogue.wall_clock, [0.0]
    monkeypatch.setattr(catalogue, "wall_clock", lambda: real() + by[-1])
    return by


def test_a_node_whose_clock_is_behind_believes_no_listing_and_blames_nobody(ahead: list[float]) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        member = await Member(world.node("member")).start(nursery, run=spec("a"))
        reader = await Member(world.node("reader")).start(nursery, member.network.addresses[0])
        signed = member.catalogue._own()
        ahead.append(-SKEW - 10)
        member.catalogue._signed = signed, catalogue.wall_clock()  # its own clock is right
        assert await reader.catalogue._ask(member.network.me) == []
        assert reader.rpc.violations.count(member.network.me) == 0

    simulate(main)


def test_a_listing_is_signed_again_once_a_clock_that_was_ahead_is_set(ahead: list[float]) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        member = await Member(world.node("member")).start(nursery, run=spec("a"))
        reader = await Member(world.node("reader")).start(nursery, member.network.addresses[0])
        ahead.append(SKEW + 100)
        member.catalogue._own()
        ahead.append(0.0)
        assert await reader.catalogue._ask(member.network.me)

    simulate(main)


def test_who_asks_on_and_on_is_told_nothing_for_a_while_and_others_are_told() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        seed = await Member(world.node("seed")).start(nursery, run=spec("a"))
        place = seed.network.addresses[0]
        greedy, other = [await Member(world.node(name)).start(nursery, place) for name in ("greedy", "other")]
        with pytest.raises(Refused) as refused:
            for _ in range(30):
                await greedy.rpc.call(seed.network.me, "catalogue", Empty(), Listings, timeout=4)
        assert refused.value.code == "busy"
        assert await other.catalogue._ask(seed.network.me)
        await trio.sleep(3)
        assert await greedy.catalogue._ask(seed.network.me)

    simulate(main)
