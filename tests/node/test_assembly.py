"""What a node gives its trainer, and tells its owner."""

from __future__ import annotations

import logging
import math
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from swarmnode.node import assembly, daemon, process
from swarmnode.node.assembly import Node, greeting, invitation, make_trainer, rendezvous
from swarmnode.node.config import MEGABIT, NodeConfig
from swarmnode.node.daemon import Daemon
from swarmnode.node.storage.checkpoints import Checkpoints
from swarmnode.node.storage.datadir import ChosenRun
from swarmnode.node.succession import Succession
from swarmnode.node.trainer.child import rules_of
from swarmnode.protocols.catalogue import ListedRun
from swarmnode.protocols.methods.method import Saved
from swarmnode.training.options import SettingError
from swarmnode.training.outer import Layout, OuterState
from swarmnode.training.runspec import RunSpec, parse_runspec

SPEC = parse_runspec({"run": {"name": "r"}, "task": {"name": "digits-rl"}}, source="test")


@pytest.mark.parametrize(("role", "warm_up"), [("train", SPEC.rollouts.warm_up), ("rollout", 0)])
def test_who_only_samples_does_not_warm_up_a_policy_that_it_will_overwrite(
    role: str, warm_up: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def trainer(spec: RunSpec, **options: Any) -> None:
        given.update(options, spec=spec)

    monkeypatch.setattr(assembly, "TrainerProcess", trainer)
    make_trainer(
        ChosenRun(SPEC, SPEC.run_id, creator=True), NodeConfig(data_dir=str(tmp_path), role=role), me="12D3", data=None
    )
    assert given["spec"].rollouts.warm_up == warm_up
    assert given["run_id"] == SPEC.run_id, "it is the same run"


def test_a_run_that_its_owner_ended_is_listed_no_more() -> None:
    traffic = SimpleNamespace(bytes_in=10, bytes_out=20)
    node: Any = SimpleNamespace(
        chosen=ChosenRun(SPEC, SPEC.run_id, creator=True),
        config=SimpleNamespace(unlisted=False),
        session=SimpleNamespace(place=SimpleNamespace(round=3), finished=trio.Event()),
        network=SimpleNamespace(traffic=lambda: traffic, addresses=()),
        trainer=None,
        parameters=lambda: 7,
        successors=SimpleNamespace(said=None),
        _began=0.0,
    )

    async def listing() -> ListedRun | None:
        return Node.listing(node)

    assert trio.run(listing) is not None
    node.successors.said = Succession("", 3, "it has converged")
    assert trio.run(listing) is None


@pytest.mark.parametrize("creator", [True, False])
def test_a_folder_that_only_a_strangers_run_names_is_not_read(
    creator: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = tmp_path / "model", dict[str, Any]()
    model.mkdir()
    (model / "config.json").touch()
    spec = SPEC.updated(rollouts={"policy": f"hf:{model}"})
    monkeypatch.setattr(assembly, "TrainerProcess", lambda spec, **options: given.update(options))
    make_trainer(ChosenRun(spec, spec.run_id, creator), NodeConfig(data_dir=str(tmp_path)), me="12D3", data=None)
    assert (str(model) in rules_of(given["settings"]).readable) == creator


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("/ip4/203.0.113.7/tcp/4077", "from another machine:\n  swarmnode join /ip4/203.0.113.7"),
        (
            "/ip4/127.0.0.1/tcp/4077",
            "from this machine (others cannot dial it: it listens here only):\n  swarmnode join",
        ),
        ("", "No other machine can dial this node yet"),
    ],
)
def test_nobody_is_told_to_join_by_an_address_that_does_not_reach(address: str, said: str) -> None:
    told = invitation(f"swarmnode join {address}" if address else "", (address,) if address else ())
    assert said in told and not told.endswith(("\n", " ")) and ("swarmnode id --join" in told) == (not address)


def test_the_invitation_is_said_again_once_others_can_dial_and_no_third_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    network, nat = SimpleNamespace(addresses=()), SimpleNamespace(how_reached="private")
    node: Any = SimpleNamespace(
        network=network,
        nat=nat,
        chosen=ChosenRun(SPEC, SPEC.run_id, creator=True),
        config=SimpleNamespace(log_format="text"),
        options=SimpleNamespace(json_events=False),
        join_line=lambda: "swarmnode join swarm1",
    )

    async def main() -> None:
        told = Daemon(node)
        async with trio.open_nursery() as nursery:
            await nursery.start(told._invite_again)
            told._invited_to = ""  # by the first invitation
            await trio.sleep(60)
            assert not capsys.readouterr().out
            network.addresses, nat.how_reached = ("/ip4/203.0.113.7/tcp/4077/p2p/R/p2p-circuit/p2p/P",), "relayed"
            await trio.sleep(60)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    again = "Others can dial this node now. To join this run from another machine:\n  swarmnode join swarm1\n"
    assert capsys.readouterr().out == again


def test_a_start_that_takes_long_says_what_it_is_at(caplog: pytest.LogCaptureFixture) -> None:
    node: Any = SimpleNamespace(
        config=NodeConfig(data_dir="/x"),
        choice=SimpleNamespace(awaited=False),
        stopping=trio.Event(),
        text_event={},
        doing=lambda: Node.doing(node),
        **dict.fromkeys(("session", "trainer", "chosen", "asks")),
    )

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(Daemon(node)._show_progress)
            await trio.sleep(25.5)
            nursery.cancel_scope.cancel()

    with caplog.at_level(logging.INFO):
        trio.run(main, clock=MockClock(autojump_threshold=0))
    assert caplog.messages == [f"reading the run and its text ({seconds} s so far)" for seconds in (10, 20)]


def test_the_rounds_that_are_said_to_be_saved_are_those_on_the_disk(tmp_path: Path) -> None:
    store = SimpleNamespace(folder=lambda run_id: tmp_path)
    node: Any = SimpleNamespace(forgetting=False, chosen=ChosenRun(SPEC, SPEC.run_id, creator=True), store=store)
    assert Daemon(node)._what_is_saved() == [f"run {SPEC.run_id[:12]}… has no checkpoint"]
    layout, zeros = Layout.of([("weight", (2,))]), np.zeros(2, np.float32)
    checkpoints = Checkpoints(tmp_path / "checkpoints", run_id=SPEC.run_id, layout=layout, keep=3)
    checkpoints.save(Saved(18, OuterState(zeros, zeros), zeros, ("a",)))
    said = f"the newest checkpoint of run {SPEC.run_id[:12]}… has 18 rounds in it"
    assert Daemon(node)._what_is_saved() == [said]


def test_a_seed_tells_what_to_give_to_others_and_nothing_of_runs() -> None:
    network, config = SimpleNamespace(addresses=("/ip4/203.0.113.7/tcp/4077",)), NodeConfig(role="relay", data_dir="/x")
    node: Any = SimpleNamespace(config=config, network=network, place=lambda: None)
    assert Node.join_line(node) == "swarmnode discover --bootstrap /ip4/203.0.113.7/tcp/4077", "there is no run to join"
    told = "\n".join(greeting(node))
    assert "relays for nodes that nobody can dial" in told and "swarmnode stop" in told
    assert not re.search("shards|checkpoints|train|pause|memory", told)
    assert "give others this option of swarmnode run, join and discover" in rendezvous(network.addresses)
    assert "\n  --bootstrap /ip4/203.0.113.7/tcp/4077\n" in rendezvous(network.addresses)


@pytest.mark.parametrize(
    ("task", "data", "seen", "shared"),
    [
        ("byte-lm", "shared", "how far your copy of the model moves", "shards of the run's text, at most 10 GB"),
        ("byte-lm", "local", "may be worked out", "none of its text leaves this machine"),
        ("digits-rl", "shared", "what your policy answers", "relays for members of its run"),
    ],
)
def test_who_takes_part_is_told_what_others_see(task: str, data: Any, seen: str, shared: str) -> None:
    spec = parse_runspec({"run": {"name": "r"}, "task": {"name": task}}, source="test")
    node: Any = SimpleNamespace(
        config=NodeConfig(data_dir="/x", data=data),
        network=SimpleNamespace(addresses=()),
        chosen=ChosenRun(spec, spec.run_id, creator=True),
        data=object() if spec.needs_data else None,
    )
    told = "\n".join(greeting(node))
    assert seen in told and shared in told and "swarmnode pause" in told
    assert ("copy of the model" in told) == spec.needs_data


def test_a_full_disk_under_standard_output_ends_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    node: Any = SimpleNamespace(
        config=SimpleNamespace(log_format="text"),
        options=SimpleNamespace(json_events=False),
        greeted=tmp_path / "no folder" / "greeted",
        events=SimpleNamespace(put=told.append),
    )
    monkeypatch.setattr(daemon, "greeting", lambda _: ["you"])
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with process.unhurried():
            Daemon(node)._greet("Run a run.")
            node.options.json_events = True
            Node.emit(node, {"event": "round", "round": 1})
    assert told == [{"event": "round", "round": 1}]


def test_a_policy_that_diverged_ends_no_node_that_tells_its_events(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[dict[str, Any]] = []
    node: Any = SimpleNamespace(options=SimpleNamespace(json_events=True), events=SimpleNamespace(put=told.append))
    Node.emit(node, {"event": "abandoned", "learned": {"loss": math.nan, "own": 3}})
    assert told == [{"event": "abandoned", "learned": {"loss": None, "own": 3}}]
    assert capsys.readouterr().out == '{"event": "abandoned", "learned": {"loss": null, "own": 3}}\n'


def test_caps_are_changed_and_kept_or_neither(tmp_path: Path) -> None:
    config, capped = NodeConfig(data_dir=str(tmp_path)), list[float]()
    node: Any = SimpleNamespace(
        config=config,
        uncapped=NodeConfig(data_dir=str(tmp_path), up=9.0),
        network=SimpleNamespace(cap_rates=lambda *, up, down: capped.append(up)),
        trainer=None,
        writing=trio.Lock(),
        _caps_changed=trio.Event(),
    )
    kept = tmp_path / "caps.toml"
    kept.write_text("down = 3.0\nup = ")
    with pytest.raises(SettingError, match="not valid TOML"):
        trio.run(Node.change_caps, node, {"up": 2.0})
    assert node.config == config and not capped
    kept.write_text("down = 3.0\n")
    trio.run(Node.change_caps, node, {"up": 2.0})
    assert node.config.up == 2.0 and capped == [2.0 * MEGABIT]
    assert tomllib.loads(kept.read_text()) == {"down": 3.0, "up": 2.0}
    trio.run(Node.change_caps, node, {"up": ""})
    assert node.config.up == 9.0 and tomllib.loads(kept.read_text()) == {"down": 3.0}


def test_caps_that_change_while_a_guest_looks_at_the_old_ones_count_at_once(tmp_path: Path) -> None:
    seen: list[float] = []

    def look(config: NodeConfig, now: float, *, own: float) -> list[Any]:
        seen.append(config.up)
        if len(seen) == 1:
            trio.from_thread.run(Node.change_caps, node, {"up": 2.0})
        return []

    node: Any = SimpleNamespace(
        config=NodeConfig(data_dir=str(tmp_path)),
        uncapped=NodeConfig(),
        network=SimpleNamespace(cap_rates=lambda **_: None),
        session=SimpleNamespace(holds={}),
        trainer=SimpleNamespace(cpu_seconds=0.0, cap_cpu=lambda _: None, change=lambda **_: None),
        guest=SimpleNamespace(look=look),
        writing=trio.Lock(),
        _make_room=lambda: None,
        _caps_changed=trio.Event(),
    )

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Node.be_guest, node)
            with trio.fail_after(assembly.LOOK_EVERY / 2):
                while 2.0 not in seen:  # noqa: ASYNC110 (a thread appends to it)
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()

    trio.run(main)
