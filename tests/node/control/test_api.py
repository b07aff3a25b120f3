"""What a daemon answers to its owner about the model is of the state whose hash it shows."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import trio
from simswarm import SimSwarm

from swarmnode.cli.terminal import short_peer
from swarmnode.crdt.hlc import PeerClocks
from swarmnode.node.control import Declined, number_in
from swarmnode.node.control.api import Api, _of_run, _of_standstill, problems_of, warnings_of
from swarmnode.node.control.peers_api import PeersApi, which_peer
from swarmnode.node.control.runs_api import RunsApi
from swarmnode.node.control.stores_api import absolute_path
from swarmnode.node.exitcodes import UsageMistake
from swarmnode.protocols.methods.open.method import Open
from swarmnode.protocols.methods.trainer import Vector
from swarmnode.protocols.metrics import Metrics
from swarmnode.protocols.network import PeerId, Traffic, Unreachable
from swarmnode.protocols.peers.scoring import Standing
from swarmnode.testing.simnet import run_with_nursery
from swarmnode.testing.toy import ToyModel
from swarmnode.testing.toytrainer import SimTrainer
from swarmnode.training.rl.tasks import TaskRef


class Sampled(SimTrainer):
    """Notes the parameters that answered."""

    asked: Vector

    async def sample(self, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
        await trio.lowlevel.checkpoint()
        self.asked = self.parameters()
        return prompt


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({}, []),
        ({"idle_for": 400.0}, ["no round has brought a result for 7 min, and one usually takes 30.0 s"]),
        ({"idle_for": 400.0, "usual_seconds": 60.0}, []),  # its rounds are long
        ({"idle_for": 400.0, "paused": True}, []),
        ({"ended": "exit code 7", "restarts": 1}, ["the trainer ended (exit code 7), 1 time so far"]),
    ],
)
def test_a_standstill_is_a_problem_and_a_pause_is_none(now: dict[str, Any], told: list[str]) -> None:
    node: Any = SimpleNamespace(
        **(
            {"paused": False, "finished": trio.Event(), "idle_for": 20.0, "usual_seconds": 30.0}
            | {"ended": "", "restarts": 0}
            | now
        )
    )
    found = _of_standstill(node, node)
    assert len(found) == len(told) and all(text.startswith(start) for text, start in zip(found, told, strict=True))


def test_what_lasts_until_the_next_start_makes_no_node_ill() -> None:
    session = SimpleNamespace(warnings={"checkpoint": "the disk is full", "roster": "few judges"})
    node: Any = SimpleNamespace(session=session, data=SimpleNamespace(warnings={"share": "a part of the text"}))
    assert _of_run(node, notices=False) == ["the disk is full"]
    assert _of_run(node, notices=True) == ["few judges", "a part of the text"]


@pytest.mark.parametrize(("peers", "kind"), [(1, "notice"), (3, "problem")])
def test_a_clock_that_is_off_is_told_and_counted(
    peers: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer than three peers nobody can tell whose clock is wrong."""
    monkeypatch.setattr("swarmnode.node.control.api.runs_as_root", lambda: False)
    clocks = PeerClocks(lambda: 7_200_000, lambda: 0.0)
    for number in range(peers):
        clocks.record(str(number), 0)
    scoring = SimpleNamespace(below_good=lambda: [])
    node: Any = SimpleNamespace(
        state=SimpleNamespace(clocks=clocks, warning=""),
        network=SimpleNamespace(peers=lambda: ["a"], scoring=scoring, traffic=lambda: Traffic(0, 0)),
        defects=SimpleNamespace(warning=""),
        answering=SimpleNamespace(problems=list),
        metrics=Metrics(),
        socket=tmp_path / "s",
        **dict.fromkeys(("session", "data", "successors", "membership", "trainer", "nat")),
    )

    monkeypatch.setattr("swarmnode.node.control.api.report", lambda *parts: parts[-1])

    async def counted() -> tuple[str, Any]:
        async with trio.open_nursery() as nursery:
            await nursery.start((api := Api(node)).run)
            text, netcheck = node.metrics.text(), await api.netcheck({})
            nursery.cancel_scope.cancel()
        return str(text), netcheck

    (told,) = warnings_of(node)
    assert told.startswith("the clock of this machine is 7200 s ahead of that of")
    assert problems_of(node) == ([told] if kind == "problem" else [])
    text, netcheck = trio.run(counted)
    assert f'swarmnode_warnings{{kind="{kind}"}} 1\n' in text and netcheck == told


def test_figures_of_an_open_run_are_of_the_shared_state_and_training_goes_on_where_it_was() -> None:
    def trainer(name: str, peer: PeerId) -> Sampled:
        return Sampled(ToyModel(seed=0, peer_id=peer), seconds_per_step=0.4)

    async def main(nursery: trio.Nursery) -> None:
        swarm = SimSwarm(nursery, method="open", validators=("a", "b"), trainer=trainer)
        await swarm.start("a", wait_peers=1)
        await swarm.start("b", join="a")
        await swarm.round_done(2, "a", "b")
        node = swarm.nodes["a"]
        await trio.sleep(1.0)  # the working copy has trained on
        method: Any = node.method
        toy: Any = node.trainer
        assert isinstance(method, Open)
        daemon: Any = SimpleNamespace(session=node.session, trainer=toy, chosen=None)
        api = Api(daemon)

        shared = method.saved()
        reference = ToyModel(seed=0, peer_id=node.network.me)
        reference.vector[:] = shared.state.parameters
        answer = await api.evaluate({})
        assert method.saved().round == shared.round, "the round went on while it was measured"
        assert answer == {"heldout_bits_per_byte": reference.heldout_loss(None)}
        assert answer["heldout_bits_per_byte"] == node.rounds[shared.round - 1]["loss"]

        assert (await api.sample({"prompt": "def main("}))["text"] == "def main("
        assert np.array_equal(toy.asked, shared.state.parameters)
        assert not np.array_equal(toy.parameters(), shared.state.parameters), "what was trained is lost"
        await swarm.round_done(shared.round + 1, "a", "b")

    run_with_nursery(main)


@pytest.mark.parametrize("given", ["many", [], {}, "nan", float("inf"), 10**30, -1])
def test_what_is_no_number_is_told_to_who_asks_and_is_no_fault_of_the_daemon(given: Any) -> None:
    asked = {"limit": 7, "within": 0.5, "seed": "8"}
    assert number_in(asked, "limit", 20) == 7 and number_in(asked, "count", 3) == 3 and number_in(asked, "seed", 0) == 8
    assert number_in(asked, "within", 20.0) == 0.5 and number_in({"limit": None}, "limit", 20) == 20
    for usual in (3, 0.5):
        with pytest.raises(UsageMistake, match="limit"):
            number_in({"limit": given}, "limit", usual)

    async def main() -> None:
        node: Any = SimpleNamespace(catalogue=SimpleNamespace(search=None))
        with pytest.raises(UsageMistake, match="within"):
            await Api(node).discover({"within": given})

    trio.run(main)


MYSELF = "12D3KooWHqWu4f2Kk8G6pN1KbLV2KQKLGDPp8r29Uw3bA1Jrei65"


def knowing(connected: tuple[str, ...] = (), away: tuple[str, ...] = (), kept_out: tuple[str, ...] = ()) -> Any:
    """A network of the node MYSELF."""
    return SimpleNamespace(
        me=MYSELF,
        peers=lambda: [SimpleNamespace(peer=peer) for peer in connected],
        swarm=SimpleNamespace(peerstore=SimpleNamespace(peer_ids=lambda: [MYSELF, *connected, *away])),
        scoring=SimpleNamespace(
            blocked=set(kept_out), kept_out=lambda: [], standing=lambda peer: Standing.BANNED if peer in kept_out else 0
        ),
    )


def test_a_peer_may_be_named_as_peers_prints_it_whether_it_is_connected_or_known() -> None:
    one, other = "12D3KooWBzHKPFNxhKvV8RBYHb3epemWjkghamekAbj3kLedSqEP", "12D3KooW" + "x" * 44
    for network in knowing((one, other)), knowing((other,), (one,)), knowing((other,), kept_out=(one,)):
        for name in (short_peer(one), one[-6:], one):
            assert which_peer(network, name) == one
    with pytest.raises(Declined, match="knows no peer that is called zzz"):
        which_peer(knowing((one, other)), "zzz")


def test_this_node_itself_and_who_is_blocked_are_not_said_to_be_off() -> None:
    blocked = "12D3KooWBzHKPFNxhKvV8RBYHb3epemWjkghamekAbj3kLedSqEP"

    async def refused(target: str, timeout: float) -> str:
        raise Unreachable(f"{target} is blocked")

    async def main() -> None:
        network = knowing(kept_out=(blocked,))
        network.connect = refused
        api = PeersApi(cast(Any, SimpleNamespace(network=network)))
        for asked in (api.ping({"peer": MYSELF[-6:]}), api.link({"peer": MYSELF, "to": "unblocked"})):
            with pytest.raises(UsageMistake, match="is this node itself"):
                await asked
        with pytest.raises(Declined, match=r"is blocked by .*unblock edSqEP$"):
            await api.ping({"peer": blocked[-6:]})

    trio.run(main)


def test_an_author_of_rollouts_may_be_named_as_they_are_listed() -> None:
    """It may have gone; its groups are here."""
    gone, other = "12D3KooWBzHKPFNxhKvV8RBYHb3epemWjkghamekAbj3kLedSqEP", "12D3KooW" + "x" * 44

    class Pool(list[Any]):
        me, own = other, staticmethod(list)

    pool = Pool(SimpleNamespace(signed=signed_group(peer), used=False) for peer in (gone, other))
    network = knowing()
    method = SimpleNamespace(rollouts=SimpleNamespace(pool=pool))
    daemon: Any = SimpleNamespace(network=network, session=SimpleNamespace(method=method))

    async def main() -> None:
        for name, author in ((short_peer(gone), gone), (gone[-6:], gone), (gone, gone), ("me", other)):
            (group,) = (await RunsApi(daemon).rollouts_ls({"author": name}))["groups"]
            assert group["author"] == author
        with pytest.raises(Declined, match="nobody"):
            await RunsApi(daemon).rollouts_ls({"author": "nobody"})

    trio.run(main)


def signed_group(author: PeerId) -> Any:
    group = SimpleNamespace(task=TaskRef("digits/swap", 5, 1), answers=(), version=0)
    return SimpleNamespace(id=b"1", author=author, group=group, version=0, size=1, packed=SimpleNamespace(made_at=0))


@pytest.mark.parametrize(
    ("chosen", "by_data", "policy", "shown"),
    [(0, True, "", os.cpu_count()), (0, False, "gpt:2x64", 1), (0, False, "hf:gpt2", os.cpu_count()), (3, True, "", 3)],
)
def test_status_tells_how_many_threads_the_trainer_takes(chosen: int, by_data: bool, policy: str, shown: int) -> None:
    trainer = SimpleNamespace(pid=1, device="cpu", ranks=1, restarts=0, sandbox=None, sampling=None)
    run = SimpleNamespace(spec=SimpleNamespace(needs_data=by_data, rollouts=SimpleNamespace(policy=policy)))
    daemon = SimpleNamespace(trainer=trainer, config=SimpleNamespace(threads=chosen, policy=""), chosen=run)
    api: Any = SimpleNamespace(_node=daemon)
    assert (Api._trainer_status(api) or {})["threads"] == shown


def test_a_pause_that_cannot_be_written_down_says_both() -> None:
    paused: list[bool] = []

    async def pause() -> None:
        paused.append(True)

    session = SimpleNamespace(finished=trio.Event(), pause=pause)
    api = steering(session, Path("/proc/no such place/paused"))
    with pytest.raises(Declined, match=r"paused, but not for long.*no such place"):
        trio.run(api.pause, {})
    assert paused


def test_what_was_said_last_holds_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two who pause and resume at once: the mark says what the session does."""
    mark, said = tmp_path / "paused", []

    def slow(path: Path, content: bytes) -> None:
        time.sleep(0.2)
        path.write_bytes(content)

    async def pause() -> None:
        said.append("paused")

    session = SimpleNamespace(
        finished=trio.Event(), pause=pause, resume=lambda: said.append("resumed"), holds={}, paused=True
    )
    api = steering(session, mark)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(api.pause, {})
            await trio.sleep(0.05)
            nursery.start_soon(api.resume, {})

    monkeypatch.setattr("swarmnode.node.control.api.write_atomic", slow)
    trio.run(main)
    assert said[-1] == "resumed" and not mark.exists()


def test_a_node_that_starts_is_paused_once_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, said = tmp_path / "paused", list[str]()
    api = steering(None, mark)
    trio.run(api.pause, {})
    assert mark.exists()
    assert trio.run(api.resume, {}) == {"was_paused": True, "holds": []} and not mark.exists()

    async def pause() -> None:
        said.append("paused")

    def begins(path: Path, content: bytes) -> None:
        api._node.session = SimpleNamespace(finished=trio.Event(), pause=pause)  # type: ignore[assignment]
        path.write_bytes(content)

    monkeypatch.setattr("swarmnode.node.control.api.write_atomic", begins)
    trio.run(api.pause, {})
    assert said == ["paused"] and mark.exists()


def test_a_node_goes_on_though_its_mark_cannot_be_deleted() -> None:
    said = list[str]()
    session = SimpleNamespace(finished=trio.Event(), resume=lambda: said.append("resumed"), holds={}, paused=True)
    api = steering(session, Path("/proc/version"))
    with pytest.raises(Declined, match=r"going on, but the next start is paused again: .*version"):
        trio.run(api.resume, {})
    assert said == ["resumed"]


def steering(session: Any, mark: Path) -> Api:
    api = object.__new__(Api)
    node = SimpleNamespace(session=session, pause_mark=mark, writing=trio.Lock(), chosen=SimpleNamespace())
    api._node = node  # type: ignore[assignment]
    return api


def test_a_path_that_cannot_be_looked_at_is_left_to_who_opens_it(tmp_path: Path) -> None:
    long = "/" + "x" * 300
    assert trio.run(absolute_path, long) == Path(long)
    os.mkfifo(tmp_path / "pipe")
    for path in ("file", str(tmp_path / "pipe")):
        with pytest.raises(Declined):
            trio.run(absolute_path, path)
