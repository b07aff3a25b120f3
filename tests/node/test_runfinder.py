"""Which run a node takes part in, and who judges one that begins here."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import trio
import trio.testing
from hosts import identity

from swarmnode.node import runfinder
from swarmnode.node.exitcodes import ExpectedError
from swarmnode.node.runfinder import ANSWER_WITHIN, OTHERS_WITHIN, REFUSED_FOR, NoRun, RunFinder
from swarmnode.node.storage.checkpoints import Checkpoints
from swarmnode.node.storage.datadir import ChosenRun, DataDir, RunStore, RunUnavailable
from swarmnode.protocols.calls.rpc import CallError
from swarmnode.protocols.methods.method import Saved
from swarmnode.protocols.network import Unreachable
from swarmnode.protocols.state.membership import RunListing
from swarmnode.training.options import SettingError
from swarmnode.training.outer import Layout, OuterState
from swarmnode.training.runspec import RunSpec, encode, parse_runspec

KNOWN = '[run]\nname = "t"\n'
OPEN = '[run]\nname = "t"\ntrust = "open"\n'


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with DataDir(tmp_path / "data") as datadir:
        yield RunStore(datadir)


def choose(
    store: RunStore,
    file: Path | None,
    *,
    me: str = "12D3me",
    joining: bool = False,
    data: str = "run",
    index: str = "00" * 32,
) -> ChosenRun:
    node = SimpleNamespace(
        store=store,
        network=SimpleNamespace(me=me),
        shard_store=None,
        config=SimpleNamespace(
            join=("/ip4/203.0.113.7/tcp/4077",) if joining else (),
            **dict.fromkeys(("task", "corpus", "tokenizer", "weights", "base"), ""),
            data=data,
        ),
        emit=print,
        options=SimpleNamespace(runspec=file, run_id=None, json_events=True, choose=False),
    )

    def publish(spec: RunSpec, corpus: str, shard_store: object, **how: object) -> RunSpec:
        return spec.resolved(heldout_sha256="00", index=index)

    with (
        mock.patch.object(runfinder, "publish", publish),
        mock.patch.object(runfinder, "finishing", lambda *_: nullcontext()),
    ):
        return trio.run(RunFinder(cast(Any, node)).choose)


def test_who_begins_an_open_run_is_its_validator_and_begins_the_same_run_again(store: RunStore, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(OPEN)
    chosen = choose(store, file)
    assert chosen.spec.trust.validators == ("12D3me",)
    assert chosen.run_id == chosen.spec.run_id
    assert choose(store, file, joining=True) == chosen  # after a restart, with an address to join
    assert choose(store, file, me="12D3other").run_id != chosen.run_id


def test_one_that_joins_by_a_file_without_validators_is_told_to_name_the_run(store: RunStore, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(OPEN)
    with pytest.raises(NoRun, match="validators"):
        choose(store, file, joining=True)
    file.write_text(OPEN + 'nonce = "07"\n[trust]\nvalidators = ["12D3other"]\n')
    assert choose(store, file, joining=True).spec.trust.validators == ("12D3other",)


def test_two_who_create_a_run_from_one_file_have_two_runs_and_each_goes_on_with_its_own(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(KNOWN)
    with DataDir(tmp_path / "a") as one, DataDir(tmp_path / "b") as other:
        mine, theirs = choose(RunStore(one), file), choose(RunStore(other), file)
        assert mine.run_id != theirs.run_id
        assert choose(RunStore(one), file) == mine and choose(RunStore(other), file, joining=True) == theirs
        file.write_text(KNOWN + "seed = 5\n")
        assert choose(RunStore(one), file).run_id != mine.run_id


def test_who_begins_again_with_another_text_is_told_of_the_run_that_there_is(store: RunStore, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(KNOWN)
    run_id = choose(store, file).run_id
    with pytest.raises(NoRun, match=f"the text here is another.*(?s:.)*--run {run_id}"):
        choose(store, file, index="11" * 32)
    file.write_text(KNOWN + 'nonce = "07"\n')
    assert choose(store, file, index="11" * 32).run_id != run_id


def test_who_joined_another_ones_run_begins_its_own_by_the_same_file(store: RunStore, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(KNOWN)
    joined = choose(store, file, me="12D3alice")
    assert choose(store, file, me="12D3bob", index="11" * 32).run_id != joined.run_id


def test_a_file_that_names_a_nonce_is_one_run_on_every_machine(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(KNOWN + 'nonce = "c0ffee"\n')
    with DataDir(tmp_path / "a") as one, DataDir(tmp_path / "b") as other:
        assert choose(RunStore(one), file) == choose(RunStore(other), file, joining=True)
        file.write_text(KNOWN)
        assert choose(RunStore(one), file).spec.run.nonce == "c0ffee"  # the run by that file that is known here


def test_one_that_joins_by_a_file_without_a_nonce_is_told_what_to_do(store: RunStore, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(KNOWN)
    with pytest.raises(NoRun, match=r'nonce = "[0-9a-f]{32}"'):
        choose(store, file, joining=True)


def test_who_creates_a_run_owns_it_unless_the_file_says_otherwise(store: RunStore, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(KNOWN)
    chosen = choose(store, file)
    assert chosen.spec.owner == "12D3me" and choose(store, file) == chosen
    for says, owner in (('owner = "12D3other"', "12D3other"), ('owner = "none"', ""), ('nonce = "07"', "")):
        file.write_text(f"{KNOWN}seed = 2\n{says}\n")
        assert choose(store, file).spec.owner == owner
    file.write_text(OPEN + '[trust]\nvalidators = ["12D3other"]\n')
    assert choose(store, file).spec.owner == "12D3other"


def test_text_that_shall_stay_here_is_not_published_by_who_begins_a_run(store: RunStore, tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text(KNOWN)
    with pytest.raises(NoRun, match="would publish"):
        choose(store, file, data="local")
    file.write_text(KNOWN + '[data]\nsource = "local"\n')
    assert choose(store, file, data="local").creator


def test_several_runs_by_one_file_are_listed(store: RunStore, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    for nonce in ("01", "02"):
        file.write_text(f'{KNOWN}nonce = "{nonce}"\n')
        choose(store, file)
    file.write_text(KNOWN)
    with pytest.raises(NoRun, match="2 runs by this file are known here"):
        choose(store, file)


def test_several_known_runs_are_told_by_name_rounds_and_age(store: RunStore, tmp_path: Path) -> None:
    file, runs = tmp_path / "run.toml", {}
    for name in ("old", "new"):
        file.write_text(f'[run]\nname = "{name}"\n')
        runs[name] = choose(store, file).run_id
    layout = Layout.of([("weight", (2,))])
    checkpoints = Checkpoints(store.folder(runs["old"]) / "checkpoints", run_id=runs["old"], layout=layout, keep=3)
    zeros = np.zeros(2, np.float32)
    checkpoints.save(Saved(18, OuterState(zeros, zeros), zeros, ("a",)))
    os.utime(store.folder(runs["old"]) / "checkpoints", (0, 86400 * 365))
    with pytest.raises(NoRun) as told:
        choose(store, None)
    first, second = str(told.value).splitlines()[1:]
    assert first.startswith(f"  swarmnode run --run {runs['new']}  # new, begun 20") and "no checkpoint" in first
    assert second.startswith(f"  swarmnode run --run {runs['old']}  # old, 18 rounds, saved 197")


def test_a_run_with_a_task_of_its_own_asks_for_the_file(store: RunStore, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(KNOWN + '[task]\nname = "my-gru"\n')
    with pytest.raises(SettingError, match=r"'my-gru', which is none of the built-in tasks: add --task FILE.py:CLASS"):
        choose(store, file)
    store.keep(parse_runspec({"run": {"name": "t"}, "task": {"name": "my-gru"}}, source="test"))
    with pytest.raises(SettingError, match=r"add --task FILE.py:CLASS"):  # so does who joined it, or goes on with it
        choose(store, None)


def test_a_damaged_run_keeps_nobody_from_another(store: RunStore, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(KNOWN)
    first = choose(store, file)
    (store.folder(first.run_id) / "run.spec").write_bytes(b"damaged")
    assert choose(store, file).run_id != first.run_id


def test_nobody_is_waited_for_at_addresses_that_lead_nowhere() -> None:
    cut = "/ip4/192.0.2.1/tcp/4077/p2p/12D3KooWCut"

    async def main() -> float:
        discovery = SimpleNamespace(gave_up=True, join_failures={cut: f"{cut}: copy it whole"})
        network = SimpleNamespace(peers=lambda: ())
        finder = RunFinder(cast(Any, SimpleNamespace(store=None, network=network, discovery=discovery)))
        began = trio.current_time()
        with pytest.raises(RunUnavailable, match=f"{cut}: copy it whole"):
            await finder._peers()
        return trio.current_time() - began

    assert trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0)) < 1


def test_a_run_that_the_peers_do_not_know_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> bytes:
        raise CallError("this node does not know that run")

    async def gone(*_: object, **__: object) -> None:
        raise Unreachable("it went")

    async def main() -> float:
        network = SimpleNamespace(peers=lambda: [SimpleNamespace(peer="12D3other")], open_stream=gone)
        finder = RunFinder(cast(Any, SimpleNamespace(store=None, network=network, rpc=None)))
        began = trio.current_time()
        with pytest.raises(RunUnavailable, match="does not know that run"):
            await finder._from_peers("ab" * 32)
        return trio.current_time() - began

    monkeypatch.setattr(runfinder, "ask_spec", refuse)
    taken = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert REFUSED_FOR <= taken < 10


def joined(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, **runs: RunSpec | None
) -> tuple[RunSpec | RunUnavailable, float]:
    """What a node comes to that joins peers, and in how many seconds; a peer by its run, None where it is frozen."""

    async def told(rpc: object, peer: str) -> tuple[RunListing, ...]:
        run = runs[peer]
        if peer == "flooding":
            return tuple(RunListing(f"{number:064x}", "u", 3, 2) for number in range(1000))
        if run is None:
            await trio.sleep(5)
            raise CallError("did not answer runs within 5 s")
        return (RunListing(run.run_id, run.run.name, 3, 2),)

    async def given(rpc: object, peer: str, run_id: str) -> bytes:
        run = runs[peer]
        if run is None or run.run_id != run_id:
            raise CallError("this node does not know that run")
        return encode(run)

    async def gone(*_: object, **__: object) -> None:
        raise Unreachable("it went")

    async def main() -> tuple[RunSpec | RunUnavailable, float]:
        network = SimpleNamespace(peers=lambda: [SimpleNamespace(peer=peer) for peer in runs], open_stream=gone)
        options = SimpleNamespace(json_events=True)
        finder = RunFinder(cast(Any, SimpleNamespace(store=store, network=network, rpc=None, options=options)))
        began = trio.current_time()
        try:
            return await finder._run_of_peers(), trio.current_time() - began
        except RunUnavailable as error:
            return error, trio.current_time() - began

    monkeypatch.setattr(runfinder, "ask_runs", told)
    monkeypatch.setattr(runfinder, "ask_spec", given)
    monkeypatch.setattr(runfinder, "in_thread", inline)
    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_node_that_asks_which_run_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = threading.Event()

    async def main() -> None:
        runs = {letter * 64: RunListing(letter * 64, "t", 1, 1) for letter in "ab"}
        node = SimpleNamespace(store=None, network=None, options=SimpleNamespace(json_events=False), asks=False)
        finder = RunFinder(cast(Any, node))
        monkeypatch.setattr(finder, "_told_by_peers", mock.AsyncMock(return_value=runs))
        with trio.move_on_after(0.1):
            await finder._run_of_peers()
        assert not node.asks

    monkeypatch.setattr(runfinder, "_ask_which_run", lambda _: entered.wait(60))
    monkeypatch.setattr(runfinder, "sys", SimpleNamespace(stdin=mock.Mock(), stdout=mock.Mock()))
    began = time.monotonic()
    trio.run(main)
    entered.set()
    assert time.monotonic() - began < 30


def test_who_ends_the_input_in_place_of_a_choice_is_told_how_to_name_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {letter * 64: RunListing(letter * 64, "t", 1, 1) for letter in "ab"}
    node = SimpleNamespace(store=None, network=None, options=SimpleNamespace(json_events=False), asks=False)
    finder = RunFinder(cast(Any, node))
    monkeypatch.setattr(finder, "_told_by_peers", mock.AsyncMock(return_value=runs))
    monkeypatch.setattr(runfinder, "sys", SimpleNamespace(stdin=mock.Mock(), stdout=mock.Mock()))
    monkeypatch.setattr("builtins.input", mock.Mock(side_effect=["²", EOFError]))
    with pytest.raises(RunUnavailable, match="add one of these"):
        trio.run(finder._run_of_peers)


async def inline(call: Callable[[], Any]) -> Any:
    """As threads do, which a simulated clock does not wait for."""
    return call()


def test_peers_that_are_frozen_hold_up_nobody_who_joins(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    run = parse_runspec({"run": {"name": "t"}}, source="test")
    spec, took = joined(store, monkeypatch, a=None, b=None, c=run, d=None)
    assert spec == run
    assert took <= OTHERS_WITHIN


def test_slow_peers_keep_nobody_from_one_who_gives_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = parse_runspec({"run": {"name": "t"}}, source="test")

    async def given(rpc: object, peer: str, run_id: str) -> bytes:
        if peer != "honest":
            await trio.sleep(5)
            raise CallError("did not answer spec within 5 s")
        return encode(run)

    async def slow(*_: object, **__: object) -> None:
        await trio.sleep(5)
        raise Unreachable("it went")

    async def main() -> float:
        peers = [SimpleNamespace(peer=peer) for peer in (*"abcdef", "honest")]
        network = SimpleNamespace(peers=lambda: peers, open_stream=slow)
        began = trio.current_time()
        finder = RunFinder(cast(Any, SimpleNamespace(store=None, network=network, rpc=None)))
        assert await finder._from_peers(run.run_id) == run
        return trio.current_time() - began

    monkeypatch.setattr(runfinder, "ask_spec", given)
    assert trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0)) < 1


def test_a_node_whose_peers_tell_of_no_run_goes_on_with_the_one_it_has(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = parse_runspec({"run": {"name": "t"}}, source="test")
    store.keep(run)
    spec, took = joined(store, monkeypatch, a=None, b=None)
    assert spec == run
    assert took <= ANSWER_WITHIN
    store.keep(parse_runspec({"run": {"name": "u"}}, source="test"))
    assert isinstance(joined(store, monkeypatch, a=None)[0], RunUnavailable)  # which one, its owner has to say


def test_what_a_stranger_calls_its_run_moves_no_cursor_and_adds_no_line(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = parse_runspec({"run": {"name": "t"}}, source="test")
    strange = SimpleNamespace(run_id="ab" * 32, run=SimpleNamespace(name="u\n  2  v\x1b[2J"))
    clearing = SimpleNamespace(run_id="\x1b[2J\x1b[H" + "0" * 57, run=SimpleNamespace(name="w"))
    error, _ = joined(store, monkeypatch, a=honest, b=cast(Any, strange), c=cast(Any, clearing))
    assert "take part in 2 runs" in str(error) and "\x1b" not in str(error)
    assert [line.split()[0] for line in str(error).splitlines()[1:]] == ["--run", "--run"]


def test_a_peer_that_tells_a_thousand_runs_hides_no_other(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    run = parse_runspec({"run": {"name": "t"}}, source="test")
    error, _ = joined(store, monkeypatch, flooding=None, honest=run)
    assert len(str(error).splitlines()) == 2 + runfinder.RUNS and run.run_id in str(error)


def test_who_finds_no_run_is_told_what_each_peer_said(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    error, _ = joined(store, monkeypatch, a=None)
    assert "a: did not answer runs within 5 s" in str(error)


def test_only_what_can_be_dialled_is_told_of_where_a_run_is() -> None:
    """A member may sign anything, and who joins the run by its name would be told that the address is wrong."""
    place = f"/ip4/192.0.2.1/tcp/4077/p2p/{identity().peer_id}"
    found: Any = SimpleNamespace(
        spec=parse_runspec({"run": {"name": "r"}}, source="test"),
        entry=SimpleNamespace(listing=SimpleNamespace(parameters=1, memory=0, rate=0, signed=0)),
        answer=SimpleNamespace(round=1, members=1),
        by_owner=False,
        witnesses={},
        places=("x/p2p/me", place, "/dns4/h/tcp/443/wss"),
    )
    assert runfinder._told_of(found)["addresses"] == [place]


def test_a_run_that_admits_other_keys_is_declined_before_it_is_kept(store: RunStore, tmp_path: Path) -> None:
    """On the page one then chooses again."""
    file = tmp_path / "run.toml"
    others = identity().peer_id
    file.write_text(f'{OPEN}nonce = "0a"\n[trust]\nidentity_bits = 20\nvalidators = ["{others}"]\n')
    with pytest.raises(ExpectedError, match="20 bits of work"):
        choose(store, file, me=identity().peer_id)
    assert not store.known()
