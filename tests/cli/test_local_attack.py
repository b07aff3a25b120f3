"""`swarmnode local --attack`: what it takes, what it refuses, and what it counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarmnode.cli.local import run as local_run
from swarmnode.cli.local.attack import (
    LIES,
    OF_TRAINERS,
    Onlooker,
    make_identities,
    parse_attack,
    under_attack,
)
from swarmnode.cli.local.swarm import Attack, NodeProcess
from swarmnode.cli.main import app, main
from swarmnode.node import exitcodes
from swarmnode.node.config import load_config
from swarmnode.node.exitcodes import UsageMistake
from swarmnode.node.session import METHODS
from swarmnode.testing.adversary.__main__ import main as adversary
from swarmnode.testing.adversary.__main__ import stay_here
from swarmnode.testing.adversary.disguise import methods_with, task_with
from swarmnode.training.runspec import RunSpec, load_runspec, parse_runspec
from swarmnode.training.tasks import load_task

HERE = "/ip4/127.0.0.1/tcp/4077/p2p/12D3KooWG45TKiahNhiYdeSysBg4uAde6sWQTDALm2FxgqJB7q4s"


def spec(**tables: dict[str, object]) -> RunSpec:
    return parse_runspec({"run": {"name": "tiny", "trust": "open"}, **tables}, source="a test")


@pytest.mark.parametrize(
    ("text", "attack"),
    [("sign-flip", Attack("sign-flip", 1)), ("copy:2", Attack("copy", 2)), ("nan:7", Attack("nan", 7))],
)
def test_an_attack_is_a_name_and_a_number_of_liars(text: str, attack: Attack) -> None:
    assert parse_attack(text, nodes=8) == attack


@pytest.mark.parametrize("text", ["sign-flip:", "sign-flip:two", "sign-flip:-1", "nan:0", "nan:8", "nan:2:2"])
def test_numbers_of_liars_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(UsageMistake):
        parse_attack(text, nodes=8)


@pytest.mark.parametrize("name", ["", "signflip", "sign_flip:2"])
def test_an_unknown_attack_lists_all(name: str) -> None:
    with pytest.raises(UsageMistake) as told:
        parse_attack(name, nodes=8)
    assert all(lie in str(told.value) for lie in LIES)
    assert told.value.exit_code == exitcodes.USAGE


def test_help_lists_all_attacks() -> None:
    shown = CliRunner().invoke(app, ["local", "--attack", "help"])
    assert shown.exit_code == exitcodes.OK
    assert all(f"{name} " in shown.stdout and lie.told in shown.stdout for name, lie in LIES.items())
    assert not any(lie.told.startswith("the same") for lie in LIES.values()), "as which?"


def test_nobody_attacks_a_node_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["local", "--attack", "nan", "--solo"]) == exitcodes.USAGE
    assert "--solo" in capsys.readouterr().err


def test_a_lie_without_meaning_in_the_run_is_refused() -> None:
    rollouts = parse_runspec({"run": {"name": "r"}, "task": {"name": "digits-rl"}}, source="a test")
    with pytest.raises(UsageMistake, match="sapo"):
        under_attack(rollouts, Attack("sign-flip", 1))
    with pytest.raises(UsageMistake, match="open"):
        under_attack(spec(), Attack("forged-reward", 1))
    with pytest.raises(UsageMistake, match="byte-lm"):
        under_attack(spec(task={"name": "mine"}), Attack("label-flip", 1))


def test_an_attack_that_is_refused_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    asked = ["local", "--attack", "forged-reward", "--report", str(tmp_path / "report")]
    assert main(asked) == exitcodes.USAGE and not [*tmp_path.iterdir()]


def test_an_attacked_run_is_nobody_elses() -> None:
    usual = spec()
    one, other = (under_attack(usual, Attack("nan", 1)) for _ in range(2))
    assert len({usual.run_id, one.run_id, other.run_id}) == 3


def test_in_an_attacked_run_that_names_no_validators_all_nodes_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts(*_: object, **__: object) -> None:
        raise exitcodes.ExpectedError("far enough")

    monkeypatch.setattr(local_run, "LocalSwarm", starts)
    places = ["--data-dir", str(tmp_path / "nodes"), "--report", str(tmp_path / "report")]
    assert main(["local", "--nodes", "2", "--attack", "nan", *places]) == exitcodes.ERROR
    validators = load_runspec(tmp_path / "nodes" / "run.toml").trust.validators
    assert validators == make_identities(tmp_path / "nodes", 2)


def test_identities_are_those_of_the_nodes_to_come(tmp_path: Path) -> None:
    assert make_identities(tmp_path, 2) == make_identities(tmp_path, 2)
    assert (tmp_path / "node-1" / "identity.key").exists()


# --- what an adversary refuses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        HERE.replace("127.0.0.1", "203.0.113.7"),
        HERE.replace("127.0.0.1", "192.168.1.2"),
        HERE.replace("ip4/127.0.0.1", "dns4/localhost"),
        f"{HERE}/p2p-circuit/p2p/12D3KooWBzHKPFNxhKvV8RBYHb3epemWjkghamekAbj3kLedSqEP",
    ],
)
def test_an_adversary_joins_nothing_but_loopback(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--run", "ab" * 32, "--data-dir", str(tmp_path / "node"), "--rounds", "1"]
    assert adversary(["sign-flip", "run", "--join", address, *more]) == exitcodes.USAGE
    assert "loopback" in capsys.readouterr().err
    assert not (tmp_path / "node").exists()


def test_an_adversary_listens_on_loopback_only_and_begins_no_run(tmp_path: Path) -> None:
    def config(**flags: object) -> None:
        given = {"data_dir": str(tmp_path), "mdns": False, "upnp": False, "listen": "127.0.0.1", "join": (HERE,)}
        stay_here(load_config(None, {}, {**given, **flags}).config)

    config()
    for wrong in ({"listen": "0.0.0.0"}, {"join": ()}, {"mdns": True}, {"announce": ("/ip4/203.0.113.7/tcp/1",)}):
        with pytest.raises(UsageMistake):
            config(**wrong)


def test_an_adversary_takes_part_in_no_run_that_is_not_thrown_away() -> None:
    class Context:
        spec = spec()

    with pytest.raises(UsageMistake, match="not made to be attacked"):
        methods_with("sign-flip", METHODS)["open"](Context())  # type: ignore[arg-type]


def test_a_trainer_that_lies_finds_its_task() -> None:
    assert {name: load_task("byte-lm", task_with(name)).__name__ for name in OF_TRAINERS} == OF_TRAINERS


def test_volunteers_have_no_flag_that_lies() -> None:
    shown = CliRunner().invoke(app, ["run", "--help"], terminal_width=200)
    assert "attack" not in shown.stdout and "adversary" not in shown.stdout


# --- what is counted -------------------------------------------------------------------------------------------------


def swarm(liars: int = 1, nodes: int = 3) -> list[NodeProcess]:
    made = [NodeProcess(str(i), Path("/nowhere"), "nan" if i >= nodes - liars else "") for i in range(nodes)]
    for node in made:
        node.ready = {"peer_id": f"peer-{node.label}"}
    return made


def test_each_round_counts_once_and_only_by_an_honest_nodes_word() -> None:
    nodes = swarm()
    onlooker = Onlooker(Attack("nan", 1), nodes)
    event = {
        "event": "round",
        "round": 0,
        "verdicts": {"peer-0": "accepted", "peer-2": "malformed"},
        "counted": ["peer-0"],
    }
    onlooker.saw(nodes[2], {**event, "verdicts": {"peer-2": "accepted"}})
    onlooker.saw(nodes[0], event)
    onlooker.saw(nodes[1], event)
    told = onlooker.summary()
    assert (told["lies_accepted"], told["lies_refused"], told["honest_accepted"]) == (0, 1, 1)
    assert told["nodes"][2] | {"refused": {"malformed": 1}, "lie": "nan"} == told["nodes"][2]
    assert told["last_round_with_a_lie"] is None


def test_where_nobody_judges_what_counted_was_accepted() -> None:
    nodes = swarm()
    onlooker = Onlooker(Attack("nan", 1), nodes)
    onlooker.saw(nodes[0], {"event": "round", "round": 3, "counted": ["peer-0", "peer-1", "peer-2"]})
    assert (onlooker.summary()["lies_accepted"], onlooker.summary()["last_round_with_a_lie"]) == (1, 3)
