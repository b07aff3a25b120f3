"""docs/troubleshooting.md has a line for every error message: what errors say when they happen, and what the code has.

The page is made by docs/errors.py. Nothing here uses that: the words are looked up in the source a second way, which
is coarser and so misses less.
"""

from __future__ import annotations

import ast
import errno
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmnode.cli.main import main
from swarmnode.node.config import load_config
from swarmnode.node.control.client import NotRunning
from swarmnode.node.storage.datadir import DataDirBusy, explain, unusable
from swarmnode.training.options import SettingError, describe
from swarmnode.training.runspec import SECTIONS, parse_runspec

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("cli", "crdt", "node", "package", "protocols", "training")
ROOTS = {"ExpectedError", "SettingError", "CorpusError", "TaskError", "KeyInUse", "GoldenMismatch"}
TOLD_BY_COMMANDS = {"StateError", "ShardError", "InvalidRecord"}  # where the daemon refuses what a command asks


@functools.cache
def lines_of_page() -> list[str]:
    return (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8").splitlines()


def simple(text: str) -> str:
    return re.sub("…+", "…", " ".join(text.replace("`", "'").split()))


def has_line(text: str, *names: str) -> bool:
    """Whether an entry of the page is this message, with … for each of the `names` in it."""
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, "…")
    return any(line.startswith(f"- {simple(text)} (`") for line in lines_of_page())


def told_of(section: str, key: str) -> tuple[str, str]:
    """What a message takes over from the description of a key of a run file."""
    described = describe(SECTIONS[section])[key][1]
    return described.help, described.allowed()


# -- errors that happen


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_what_is_said_of_a_disk_is_on_the_page(number: int, tmp_path: Path) -> None:
    error = OSError(number, "because of the moon")
    assert has_line(str(explain(error, tmp_path)), str(tmp_path), "because of the moon")
    assert has_line(str(unusable(error, tmp_path, "cannot be written")), str(tmp_path), "because of the moon")


def test_what_a_class_says_by_itself_is_on_the_page(tmp_path: Path) -> None:
    assert has_line(str(NotRunning(tmp_path)), str(tmp_path))
    assert has_line(str(NotRunning(tmp_path, "its socket is left over from one that crashed")), str(tmp_path))
    assert has_line(str(DataDirBusy(tmp_path, 0)), str(tmp_path))
    assert has_line(str(DataDirBusy(tmp_path, 4711)), str(tmp_path), "process 4711")


@pytest.mark.parametrize(
    ("tables", "names"),
    [
        ({"inside": {}}, ["run.toml", "inside", ", ".join(SECTIONS)]),
        ({"model": 3}, ["run.toml", "model", "3"]),
        ({"run": {"name": "r", "nam": "r"}}, ["run.toml [run]", "'nam'", "'name'"]),
        ({"run": {"name": "r", "xyz": 1}}, ["run.toml [run]", "'xyz'", ", ".join(describe(SECTIONS["run"]))]),
        ({"run": {}}, ["run.toml [run]", "'name'", *told_of("run", "name")]),
        ({"inner": {"lr": "much"}}, ["run.toml [inner]", "lr", "'much'", *told_of("inner", "lr")]),
        ({"inner": {"rounds": 5}}, ["run.toml", "'constant'", "5"]),
    ],
)
def test_a_mistake_in_a_run_file_is_on_the_page(tables: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(SettingError) as caught:
        parse_runspec({"run": {"name": "r"}, **tables}, source="run.toml")
    assert has_line(str(caught.value), *names), caught.value


def test_a_mistake_in_the_settings_of_a_node_is_on_the_page(tmp_path: Path) -> None:
    with pytest.raises(SettingError) as caught:
        load_config(None, {"SWARMNODE_DATA_DIR": str(tmp_path)}, {"listen": "here"})
    assert has_line(str(caught.value), "flag --listen", "listen", "'here'"), caught.value


def test_what_a_command_refuses_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["local", "--solo", "--attack", "noise"]) == 2
    assert has_line(capsys.readouterr().err.removeprefix("swarmnode: "))


# -- errors in the source


@functools.cache
def trees() -> dict[str, ast.Module]:
    files = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def last_name(expression: ast.expr) -> str:
    return ast.unparse(expression).rpartition(".")[2]


@functools.cache
def family() -> frozenset[str]:
    """The names of all classes of errors that are told to a person."""
    classes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found: set[str] = set()
    more = ROOTS | TOLD_BY_COMMANDS
    while more:
        found |= more
        more = {each.name for each in classes if found & set(map(last_name, each.bases))} - found
    return frozenset(found)


def literals(expression: ast.AST) -> Iterator[str]:
    """The texts of several words in an expression."""
    texts = (node.value for node in ast.walk(expression) if isinstance(node, ast.Constant))
    return (simple(each) for each in texts if isinstance(each, str) and re.search(r"[A-Za-z]\S* +\S*[A-Za-z]", each))


def texts_of_errors(tree: ast.Module) -> Iterator[ast.AST]:
    """The expressions that errors for a person are made of, wherever one is made; rather too many than too few."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {node for function in functions for node in ast.walk(function) if node is not function}
    own = {node for each in ast.walk(tree) if is_error(each) for node in ast.walk(each)}
    for function in [each for each in functions if each not in inner]:
        inside = list(ast.walk(function))
        calls = [node for node in inside if isinstance(node, ast.Call)]
        made = [each for each in calls if last_name(each.func) in family()]
        made += [each for each in calls if each in own and ast.unparse(each.func) == "super().__init__"]
        said = [argument for call in made for argument in call.args]
        names = {node.id for each in said for node in ast.walk(each) if isinstance(node, ast.Name)}
        yield from said
        for call in calls:
            if ast.unparse(call.func) in {f"{name}.append" for name in names}:
                yield from call.args
        for node in inside:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", function)]
            if isinstance(node, ast.Assign | ast.NamedExpr) and names & {ast.unparse(each) for each in targets}:
                yield node.value


def is_error(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and node.name in family()


def test_all_words_of_all_errors_are_on_the_page() -> None:
    page = simple("\n".join(lines_of_page()))
    found = {(place, each) for place, tree in trees().items() for of in texts_of_errors(tree) for each in literals(of)}
    assert len(found) > 400
    assert not sorted(each for each in found if each[1] not in page), "regenerate the page, or mend docs/errors.py"


@pytest.mark.parametrize("place", ["training/runspec.py", "training/trial.py"])
def test_all_mistakes_that_are_listed_in_one_error_are_on_the_page(place: str) -> None:
    page = simple("\n".join(lines_of_page()))
    yielded = [node.value for node in ast.walk(trees()[place]) if isinstance(node, ast.Yield) and node.value]
    found = [each for value in yielded for each in literals(value)]
    assert len(found) > 20 and not [each for each in found if each not in page]


def test_no_class_of_an_error_is_called_by_another_name() -> None:
    """Else what is said by it is found neither here nor for the page."""
    for place, tree in trees().items():
        for node in ast.walk(tree):
            values = [node.value] if isinstance(node, ast.Assign | ast.NamedExpr) else []
            values += [value.body for value in values if isinstance(value, ast.IfExp)]
            assert not family() & {ast.unparse(each) for each in values}, f"{place}:{node.lineno}"


def test_the_entries_are_in_the_order_of_their_first_words() -> None:
    for section in "\n".join(lines_of_page()).split("\n## Exit code ")[1:]:
        entries = [line.rpartition(" (`")[0].lower() for line in section.splitlines() if line.startswith("- ")]
        first = [re.sub("^[^a-z0-9]+", "", each) for each in entries]
        assert first and first == sorted(first)
