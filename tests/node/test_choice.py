"""A run that is chosen while the node waits: what can be chosen, what is refused, and that a mistake is no end."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from swarmnode.node.choice import Choice, Wanted, wanted_by
from swarmnode.node.dashboard import server
from swarmnode.node.exitcodes import ExpectedError, UsageMistake
from swarmnode.node.invite import invite
from swarmnode.node.runfinder import NoRun, RunFinder, kept_runs
from swarmnode.node.storage.datadir import ChosenRun, DataDir, RunStore, RunUnavailable
from swarmnode.training.options import SettingError
from swarmnode.training.runspec import BUILT_IN_RUNS, load_runspec, parse_runspec

PEER = "12D3KooWGMFsBbEU1JPeUKXFPsVbcFrAH9SoaVFFBTk8GNGaeiV4"
ADDRESS = f"/ip4/192.0.2.7/tcp/4077/p2p/{PEER}"
RUN = "ab" * 32


def test_a_link_the_whole_line_or_an_address_may_be_pasted() -> None:
    link = invite((ADDRESS,), RUN, "")
    spaced = f"{link[:20]} {link[20:40]}\n{link[40:]}"
    options = (" --cpu 50", "\n--cpu 50", " \\\n  --cpu 50", "\t-h", "  # my run")
    lines = (f"swarmnode join {link}{more}" for more in ("", *options))
    for pasted in (link, f"  {link.upper()}\n", spaced, *lines):
        wanted = wanted_by({"where": pasted})
        assert wanted.run_id == RUN[:32] and len(wanted.join) == 1 and wanted.join[0].startswith("/ip4/192.0.2.7/")
    assert wanted_by({"where": f"swarmnode join {ADDRESS}"}) == Wanted(join=(ADDRESS,))
    long = Wanted(run_id=RUN, join=(ADDRESS,), roster=f"7:{'cd' * 32}")
    assert wanted_by({"where": f"swarmnode join {ADDRESS} --run {RUN} --roster 7:{'cd' * 32}"}) == long


def test_a_run_that_is_here_or_was_found_is_named_by_its_id() -> None:
    assert wanted_by({"run_id": RUN}) == Wanted(run_id=RUN)
    assert wanted_by({"run_id": RUN, "addresses": [ADDRESS]}) == Wanted(run_id=RUN, join=(ADDRESS,))
    assert len(wanted_by({"run_id": RUN, "addresses": [ADDRESS] * 1000}).join) == 8


def test_a_built_in_run_is_not_listed_unless_it_is_open_to_all() -> None:
    mine, all_of_us = (wanted_by({"task": "byte-lm", "name": "mine", "open": open}).spec for open in (False, True))
    assert mine is not None and all_of_us is not None
    assert (mine.run.name, mine.run.trust, mine.run.unlisted) == ("mine", "known", True)
    assert (all_of_us.run.trust, all_of_us.run.unlisted, all_of_us.exchange.method) == ("open", False, "open")
    digits = wanted_by({"task": "digits-rl"}).spec
    assert digits is not None and digits.run.nonce == "00", "the swarm that all who name the task are in"
    own = wanted_by({"task": "digits-rl", "name": "ours"}).spec
    assert own is not None and (own.run.name, own.run.nonce) == ("ours", "")


def test_the_page_offers_every_built_in_run() -> None:
    script = Path(server.__file__).with_name("page") / "app.js"
    [offered] = re.findall(r"^const BEGUN = \{(.*?)^\};", script.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert set(re.findall(r'^ +"?([\w-]+)"?:', offered, re.MULTILINE)) == {*BUILT_IN_RUNS, "file"}


def test_the_text_of_a_run_file_means_what_the_file_means(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[run]\nname = "a"\n[model]\nlayers = 2\n')
    assert wanted_by({"file": (tmp_path / "a.toml").read_text()}).spec == load_runspec(tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("params", "kind", "says"),
    [
        ({}, UsageMistake, "byte-lm, digits-rl"),
        ({"task": "../../etc/passwd"}, UsageMistake, "byte-lm, digits-rl"),
        ({"task": "byte-lm", "name": "../x"}, SettingError, "name = '../x'"),
        ({"where": "swarm1zzz"}, ExpectedError, "cut off"),
        ({"where": "my friend's run"}, UsageMistake, "neither a link"),
        ({"where": f"{ADDRESS} --run {RUN} --roster 7:cdcd"}, UsageMistake, "--roster '7:cdcd' is not ROUND:ID"),
        ({"where": f"{ADDRESS} --run abab"}, UsageMistake, "--run 'abab' is not a run id"),
        ({"run_id": "../../x"}, UsageMistake, "64 hex digits"),
        ({"run_id": RUN, "addresses": "x"}, UsageMistake, "64 hex digits"),
        ({"file": "/etc/passwd"}, SettingError, "not valid TOML"),
        ({"file": '[run]\nname = "x"\nsed = 1'}, SettingError, "the run file"),
    ],
)
def test_what_is_no_choice_is_refused_in_words(params: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        wanted_by(params)


def test_one_choice_is_followed_at_a_time() -> None:
    choice, followed = Choice(), list[Wanted]()

    async def main() -> None:
        with pytest.raises(UsageMistake, match="has its run"):
            choice.make(Wanted(run_id=RUN))
        async with trio.open_nursery() as nursery:

            async def follow() -> None:
                followed.append(await choice.made())

            nursery.start_soon(follow)
            await trio.testing.wait_all_tasks_blocked()
            choice.make(Wanted(run_id=RUN))
            with pytest.raises(UsageMistake):
                choice.make(Wanted(run_id="cd" * 32))

    trio.run(main)
    assert followed == [Wanted(run_id=RUN)] and not choice.awaited


def chooser(found: Callable[[Wanted], ChosenRun], choices: list[Wanted]) -> tuple[RunFinder, Any]:
    """A finder whose node's owner makes these choices, one after another."""
    made = iter(choices)
    wanted = list[Wanted]()

    async def next_one() -> Wanted:
        return next(made)

    node = SimpleNamespace(
        store=None,
        network=None,
        dashboard="http://127.0.0.1:1/",
        options=SimpleNamespace(choose=True),
        choice=SimpleNamespace(made=next_one, refused=""),
        want=wanted.append,
    )
    finder = RunFinder(cast(Any, node))

    async def look() -> ChosenRun:
        return found(wanted[-1])

    finder._found = look  # type: ignore[method-assign]
    return finder, node


def test_a_choice_that_comes_to_nothing_is_told_and_another_one_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    spec = parse_runspec({"run": {"name": "there"}}, source="a test")

    def found(wanted: Wanted) -> ChosenRun:
        if wanted.join:
            raise RunUnavailable("nobody answered")
        return ChosenRun(spec, spec.run_id, creator=True)

    finder, node = chooser(found, [Wanted(join=(ADDRESS,)), Wanted(spec=spec)])
    assert trio.run(finder.choose).spec == spec
    assert node.choice.refused == "nobody answered" and "nobody answered" in caplog.text


def test_a_bug_is_no_refusal() -> None:
    def found(wanted: Wanted) -> ChosenRun:
        raise ZeroDivisionError

    finder, _ = chooser(found, [Wanted()])
    with pytest.raises(ZeroDivisionError):
        trio.run(finder.choose)


def test_without_a_page_there_is_nothing_to_choose_on() -> None:
    finder, node = chooser(lambda wanted: pytest.fail(), [])
    node.dashboard = ""
    with pytest.raises(NoRun, match="--dashboard"):
        trio.run(finder.choose)


def test_the_runs_that_are_here_are_told_newest_first_damaged_ones_too(tmp_path: Path) -> None:
    store = RunStore(DataDir(tmp_path))
    spec = parse_runspec({"run": {"name": "here"}}, source="a test")
    store.keep(spec)
    damaged = store.folder("cd" * 32)
    damaged.mkdir()
    (damaged / "run.spec").write_bytes(b"no spec")
    told = kept_runs(store, store.known())
    assert {run["run_id"]: run["name"] for run in told} == {spec.run_id: "here", "cd" * 32: ""}
    assert [run["rounds"] for run in told] == [None, None] and told[0]["saved"] >= told[1]["saved"]
