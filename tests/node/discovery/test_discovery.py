"""A node finds its swarm, keeps it, and finds it again; on simnet, so minutes cost nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from disconnecting import disconnect

from swarmnode.node.discovery import finder
from swarmnode.node.discovery.finder import AddressBook, Discovery
from swarmnode.protocols.network import Address, PeerId
from swarmnode.protocols.runner import in_thread
from swarmnode.testing.simnet import SimNetwork, SimWorld, run_with_nursery

KEY = bytes(range(32))


def book() -> AddressBook:
    return AddressBook(None)


async def start(
    nursery: trio.Nursery,
    node: SimNetwork,
    *join: Address,
    notes: AddressBook | None = None,
    rendezvous: bytes | None = None,
) -> Discovery:
    await nursery.start(node.run)
    discovery = Discovery(node, notes or book(), join=join)
    discovery.set_rendezvous(rendezvous)
    await nursery.start(discovery.run)
    return discovery


def connected(node: SimNetwork) -> set[PeerId]:
    return {view.peer for view in node.peers()}


async def until(condition: Callable[[], bool], *, within: float) -> float:
    """Wait until `condition` holds; the virtual seconds that it took."""
    started = trio.current_time()
    with trio.fail_after(within):
        while not condition():  # noqa: ASYNC110 (virtual time)
            await trio.sleep(0.05)
    return trio.current_time() - started


def simulate(main: Callable[[SimWorld, trio.Nursery], Awaitable[None]]) -> None:
    run_with_nursery(main, SimWorld(silence=13.0))


def test_join_address_connects() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        seed, node = world.node("seed"), world.node("node")
        await start(nursery, seed)
        discovery = await start(nursery, node, seed.addresses[0])
        await until(lambda: connected(node) == {seed.me}, within=1)
        assert discovery.join_failures == {} and not discovery.gave_up

    simulate(main)


def test_join_address_that_nobody_answers_is_reported_and_tried_until_it_does() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        seed, node = world.node("seed"), world.node("node")
        discovery = await start(nursery, node, seed.addresses[0])
        await until(lambda: bool(discovery.join_failures), within=5)
        assert list(discovery.join_failures) == [seed.addresses[0]] and not discovery.gave_up
        await until(lambda: discovery.gave_up, within=25)
        await trio.sleep(600)
        await start(nursery, seed)
        await until(lambda: connected(node) == {seed.me}, within=6)
        assert discovery.join_failures == {}

    simulate(main)


def test_other_join_addresses_take_the_place_of_those_before() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        gone, seed, node = world.node("gone"), world.node("seed"), world.node("node")
        discovery = await start(nursery, node, gone.addresses[0])
        await until(lambda: bool(discovery.join_failures), within=5)
        await start(nursery, seed)
        discovery.set_join((seed.addresses[0],))
        await until(lambda: connected(node) == {seed.me}, within=1)
        await start(nursery, gone)
        await trio.sleep(120)
        assert connected(node) == {seed.me} and discovery.join_failures == {}

    simulate(main)


def test_a_join_address_that_was_taken_back_while_it_was_dialled_is_told_of_no_more() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        gone, node = world.node("gone"), world.node("node")
        discovery = await start(nursery, node, gone.addresses[0])
        await trio.sleep(0.001)
        assert discovery.join_failures == {}, "it is dialled still"
        discovery.set_join(())
        await trio.sleep(30)
        assert discovery.join_failures == {}

    simulate(main)


def test_join_addresses_that_cannot_work_are_explained_and_never_dialled() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        node = world.node("node")
        wrong = ("/ip4/10.0.0.1/udp/4077/webrtc-direct", "10.0.0.1:4077", "/ip4/10.0.0.1/tcp/4077/p2p/12D3KooWCut")
        discovery = await start(nursery, node, node.addresses[0], *wrong)
        assert discovery.gave_up, "somebody waits who could know"
        await trio.sleep(60)
        failures = discovery.join_failures
        assert "own address" in failures[node.addresses[0]]
        assert all("/ip4/ADDRESS/tcp/PORT" in failures[address] for address in wrong[:2])
        assert "copy it whole" in failures[wrong[2]]
        assert node.traffic().bytes_out == 0

    simulate(main)


def test_nameless_join_address_takes_whoever_answers_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        seed, node = world.node("seed"), world.node("node")
        place = seed.addresses[0].partition("/p2p/")[0]
        notes = book()
        discovery = await start(nursery, node, place, notes=notes)
        await until(lambda: bool(discovery.join_failures), within=5)
        await start(nursery, seed)
        await until(lambda: connected(node) == {seed.me}, within=6)
        await trio.sleep(60)
        assert discovery.join_failures == {}
        assert caplog.text.count(f"/p2p/{seed.me}") == 1
        assert notes.entries() == ((seed.me, (seed.addresses[0],)),)
        world.kill(seed.me)
        await until(lambda: bool(discovery.join_failures), within=10)
        back = world.node("seed")
        await nursery.start(back.run)
        await until(lambda: connected(node) == {seed.me}, within=6)
        assert discovery.join_failures == {}

    with caplog.at_level("WARNING"):
        simulate(main)


@pytest.mark.parametrize("after", [0.0, 0.3])
def test_full_node_that_hangs_up_is_left_in_peace_more_and_more(after: float) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        seed, other, node = world.node("seed"), world.node("other"), world.node("node")
        refused = 0

        async def refuse() -> None:
            nonlocal refused
            with seed.watch_peers() as events:
                async for event in events:
                    if event.up and event.peer == node.me:
                        refused += 1
                        await trio.sleep(after)
                        await disconnect(seed, node.me)

        await nursery.start(seed.run)
        nursery.start_soon(refuse)
        await start(nursery, other)
        await start(nursery, node, other.addresses[0], seed.addresses[0].partition("/p2p/")[0])
        await trio.sleep(600)
        assert 10 < refused < 40

    simulate(main)


def test_strangers_that_come_and_go_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "CANDIDATES", 8)

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        seed, friend = world.node("seed"), world.node("friend")
        await start(nursery, friend)
        discovery = await start(nursery, seed, friend.addresses[0])
        for number in range(30):
            stranger = world.node(f"stranger {number}")
            await nursery.start(stranger.run)
            await stranger.connect(seed.me)
            world.kill(stranger.me)
        await trio.sleep(1)
        assert len(discovery._candidates) <= 9
        assert friend.me in discovery._candidates

    simulate(main)


def test_a_book_full_of_dead_peers_keeps_no_member_from_being_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "CANDIDATES", 8)

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        seed, member, node = (world.node(name) for name in ("seed", "member", "node"))
        notes = book()
        for number in range(8):
            dead = world.node(f"dead {number}")
            notes.answered(dead.me, dead.addresses)
        await start(nursery, seed)
        await nursery.start(member.run)  # it looks for nobody
        await member.connect(seed.addresses[0])
        await member.provide(KEY)
        await start(nursery, node, seed.addresses[0], notes=notes, rendezvous=KEY)
        await until(lambda: member.me in connected(node), within=60)

    simulate(main)


def test_tries_back_off_while_there_are_other_peers_and_stay_quick_without() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        seed, absent = world.node("seed"), world.node("absent")
        tries: dict[PeerId, list[float]] = {}

        def count(node: SimNetwork) -> None:
            connect = node.connect

            async def counted(target: str, *, timeout: float = 10.0) -> PeerId:
                if target.endswith(absent.me):
                    tries.setdefault(node.me, []).append(trio.current_time())
                return await connect(target, timeout=timeout)

            node.connect = counted  # type: ignore[method-assign]

        lonely, settled = world.node("lonely"), world.node("settled")
        count(lonely)
        count(settled)
        await start(nursery, seed)
        await start(nursery, lonely, absent.addresses[0])
        await start(nursery, settled, absent.addresses[0], seed.addresses[0])
        await trio.sleep(600)
        assert 100 < len(tries[lonely.me]) < 250
        assert 10 < len(tries[settled.me]) < 25

    simulate(main)


def test_a_seed_is_left_in_peace_once_others_are_known() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        others = [world.node(f"other {number}") for number in range(finder.FEW)]
        seed, late, node = world.node("seed"), world.node("late"), world.node("node")
        for other in others:
            await start(nursery, other)
        await nursery.start(node.run)
        places = tuple(each.addresses[0] for each in (seed, late))
        discovery = Discovery(node, book(), seeds=places)
        await nursery.start(discovery.run)
        await until(lambda: set(discovery.join_failures) == set(places), within=5)
        await start(nursery, seed)
        await until(lambda: connected(node) == {seed.me}, within=10)
        for other in others:
            await other.connect(node.addresses[0])
        await start(nursery, late)
        await trio.sleep(120)
        assert late.me not in connected(node)

    simulate(main)


def test_restarted_node_finds_its_swarm_without_the_one_that_introduced_it(tmp_path: Path) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        seed, friend, node = (world.node(name) for name in ("seed", "friend", "node"))
        await start(nursery, seed, rendezvous=KEY)
        await start(nursery, friend, seed.addresses[0], rendezvous=KEY)
        await start(nursery, node, seed.addresses[0], notes=AddressBook(tmp_path / "book.json"), rendezvous=KEY)
        await until(lambda: connected(node) == {seed.me, friend.me}, within=15)
        await trio.sleep(book_saved())
        world.kill(seed.me)
        world.kill(node.me)
        again = world.node("node")
        await start(nursery, again, notes=AddressBook(tmp_path / "book.json"))
        await until(lambda: connected(again) == {friend.me}, within=3)

    simulate(main)


def test_a_peer_with_another_kind_of_key_ends_nothing(tmp_path: Path) -> None:
    other = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"  # an RSA key

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        node = world.node("node")
        notes = AddressBook(tmp_path / "book.json")
        discovery = Discovery(node, notes, join=("/ip4/192.0.2.1/tcp/4077/key/0123456789abcdef",))
        discovery._came(other)
        assert not notes.entries()
        await trio.lowlevel.checkpoint()

    simulate(main)


def test_a_peer_that_answers_while_the_book_is_written_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes it reads nothing that the event loop changes."""
    readers, entries = set(), AddressBook.entries

    def watched(notes: AddressBook) -> finder.Entries:
        readers.add(threading.get_ident())
        return entries(notes)

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        node = world.node("node")
        await nursery.start(node.run)
        notes = AddressBook(tmp_path / "book.json")
        peer, where = address(1)
        notes.answered(peer, (where,))
        await nursery.start(Discovery(node, notes, runner=in_thread).run)

    monkeypatch.setattr(AddressBook, "entries", watched)
    simulate(main)
    assert AddressBook(tmp_path / "book.json").entries() and readers == {threading.get_ident()}


def book_saved() -> float:
    from swarmnode.node.discovery.finder import SAVE

    return SAVE + 1


def test_members_meet_under_the_rendezvous_key() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        seed = world.node("seed")
        members = [world.node(f"member {number}") for number in range(5)]
        await start(nursery, seed)
        found = [await start(nursery, member, seed.addresses[0]) for member in members]
        await trio.sleep(10)
        assert all(connected(member) == {seed.me} for member in members)
        for discovery in found:
            discovery.set_rendezvous(KEY)
        everyone = {node.me for node in (seed, *members)}
        await until(lambda: all(connected(m) == everyone - {m.me} for m in members), within=20)

    simulate(main)


def test_healed_partition_is_whole_again_within_seconds() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        nodes = [world.node(number) for number in range(6)]
        dials: list[tuple[PeerId, PeerId]] = []

        def note_dials(node: SimNetwork) -> None:
            connect = node.connect

            async def noted(target: str, *, timeout: float = 10.0) -> PeerId:
                dials.append((node.me, target.rpartition("/")[2]))
                return await connect(target, timeout=timeout)

            node.connect = noted  # type: ignore[method-assign]

        for node in nodes:
            note_dials(node)
        await start(nursery, nodes[0], rendezvous=KEY)
        for node in nodes[1:]:
            await start(nursery, node, nodes[0].addresses[0], rendezvous=KEY)
        everyone = {node.me for node in nodes}

        def whole() -> bool:
            return all(connected(node) == everyone - {node.me} for node in nodes)

        await until(whole, within=30)
        await trio.sleep(60)
        sides = [node.me for node in nodes[:3]], [node.me for node in nodes[3:]]
        world.partition(sides)
        await trio.sleep(110)
        # dials that were given up before healing stay lost: a new one is needed, due within seconds of any moment
        dials.clear()
        await trio.sleep(10)
        assert {frozenset((by, of)) for by, of in dials} == {frozenset((a, b)) for a in sides[0] for b in sides[1]}
        assert all(len(connected(node)) == 2 for node in nodes)
        world.heal()
        await until(whole, within=10)

    simulate(main)


def test_killed_peer_that_restarts_is_back_within_seconds() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        seed, other, node = world.node("seed"), world.node("other"), world.node("node")
        await start(nursery, seed)
        await start(nursery, other, seed.addresses[0])
        await start(nursery, node, seed.addresses[0])
        await until(lambda: len(connected(seed)) == 2, within=2)
        await trio.sleep(60)
        world.kill(node.me)
        await until(lambda: len(connected(seed)) == 1, within=2)
        await trio.sleep(300)
        back = world.node("node")
        await nursery.start(back.run)  # it looks for nobody: the others find it
        await until(lambda: seed.me in connected(back), within=6)

    simulate(main)


def test_swarm_survives_the_loss_of_its_bootstrap_node() -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        seed = world.node("seed")
        members = [world.node(f"member {number}") for number in range(4)]
        await start(nursery, seed)
        for member in members:
            await start(nursery, member, seed.addresses[0], rendezvous=KEY)
        everyone = {member.me for member in members}
        await until(lambda: all(connected(m) >= everyone - {m.me} for m in members), within=30)
        world.kill(seed.me)
        await trio.sleep(60)
        assert all(connected(member) == everyone - {member.me} for member in members)

    simulate(main)


def test_full_node_looks_for_nobody_new() -> None:
    from swarmnode.node.discovery.finder import ENOUGH

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        node = world.node("node")
        notes = book()
        others = [world.node(number) for number in range(ENOUGH + 10)]
        for other in others:
            await nursery.start(other.run)
            notes.answered(other.me, other.addresses)
        await start(nursery, node, notes=notes)
        await trio.sleep(120)
        assert ENOUGH <= len(connected(node)) <= ENOUGH + 8

    simulate(main)


def test_simulated_discovery_is_the_same_every_time() -> None:
    def once() -> list[float]:
        times: list[float] = []

        async def main(world: SimWorld, nursery: trio.Nursery) -> None:
            nodes = [world.node(number) for number in range(4)]
            await start(nursery, nodes[0], rendezvous=KEY)
            for node in nodes[1:]:
                await start(nursery, node, nodes[0].addresses[0], rendezvous=KEY)
            times.append(await until(lambda: all(len(connected(node)) == 3 for node in nodes), within=60))
            times.extend(view.connected_at for node in nodes for view in node.peers())

        simulate(main)
        return times

    assert once() == once()


# The address book


def address(number: int, port: int = 4077) -> tuple[PeerId, Address]:
    peer = SimWorld().node(number).me
    return peer, f"/ip4/10.0.0.1/tcp/{port}/p2p/{peer}"


def test_book_keeps_the_newest_first_across_restarts(tmp_path: Path) -> None:
    path = tmp_path / "book.json"
    notes = AddressBook(path)
    for number in (1, 2, 3, 1):
        peer, where = address(number)
        notes.answered(peer, (where,))
    notes.save(notes.entries())
    assert [peer for peer, _ in AddressBook(path).entries()] == [address(number)[0] for number in (1, 3, 2)]
    assert AddressBook(path).entries() == notes.entries()


def test_book_is_bounded_in_peers_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "MAX_PEERS", 3)
    notes = book()
    for number in range(5):
        peer, _ = address(number)
        notes.answered(peer, tuple(address(number, port)[1] for port in range(1, 30)))
    assert len(notes.entries()) == 3
    assert all(len(addresses) == finder.MAX_ADDRESSES for _, addresses in notes.entries())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"peers": 3}', '{"peers": [["nonsense"]]}', '{"peers": [[]]}'])
def test_damaged_book_is_read_as_far_as_possible(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "book.json"
    path.write_text(content)
    notes = AddressBook(path)
    assert notes.entries() == ()
    assert "damaged" in caplog.text
    peer, where = address(1)
    notes.answered(peer, (where,))
    notes.save(notes.entries())
    assert json.loads(path.read_text())["peers"] == [[where]]


def test_book_that_cannot_be_written_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notes = AddressBook(tmp_path / "missing" / "book.json")
    peer, where = address(1)
    notes.answered(peer, (where,))
    notes.save(notes.entries())
    assert "not saved" in caplog.text
    notes.save(notes.entries())
    assert caplog.text.count("not saved") == 2  # it is tried again
