"""The size and shape of the product, which may only shrink, and the seams between its parts, which nobody may widen for
themselves.

Each ceiling below is what the code had when it was last lowered. Whoever gets below one lowers it in the same commit;
whoever is above one looks for the concept that can go, before the ceiling does.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("cli", "crdt", "node", "package", "protocols", "training")  # what volunteers run; testing/ is not
MANY = 8  # parameters of a function, `self` left out
SMALL = 60  # lines: a file of fewer is half of an idea
LARGE = 600  # lines: a file of more holds two

CEILINGS = {
    "lines": 63_660,
    "files": 285,
    "small files": 3,
    "parameters that are callbacks": 34,
    "class names in several files": 0,
    "functions with many parameters": 0,
    "circles of imports": 0,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Every source file of the product, by its path from the root."""
    files = (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def lines_of(path: Path) -> int:
    return (ROOT / path).read_text(encoding="utf-8").count("\n")


def functions() -> Iterator[tuple[Path, Function]]:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield path, node


def parameters(function: Function) -> list[ast.arg]:
    arguments = function.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return [each for each in every if each.arg not in ("self", "cls")]


def is_command(function: Function) -> bool:
    """Whether typer makes a command of it: its parameters are the options that a person may type."""
    return any("typer." in ast.unparse(each.annotation) for each in parameters(function) if each.annotation)


def class_names_in_several_files() -> list[str]:
    files: defaultdict[str, set[Path]] = defaultdict(set)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].add(path)
    return sorted(f"{name}: {', '.join(map(str, sorted(where)))}" for name, where in files.items() if len(where) > 1)


def functions_with_many_parameters() -> list[str]:
    return [
        f"{path}:{each.lineno} {each.name} has {len(parameters(each))}"
        for path, each in functions()
        if len(parameters(each)) > MANY and not is_command(each)
    ]


def callbacks() -> list[str]:
    return [
        f"{path}:{each.lineno} {each.name}({argument.arg})"
        for path, each in functions()
        for argument in parameters(each)
        if argument.annotation is not None and "Callable" in ast.unparse(argument.annotation)
    ]


def file_of(module: str) -> Path | None:
    first, *rest = module.split(".")
    if first != "swarmnode":
        return None
    place = Path(*rest) if rest else Path("package")
    return next((found for found in (place.with_suffix(".py"), place / "__init__.py") if found in trees()), None)


def imports(path: Path) -> set[Path]:
    found: set[Path | None] = set()
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(file_of(node.module))
            found.update(file_of(f"{node.module}.{alias.name}") for alias in node.names)
    return {each for each in found if each is not None and each != path}


def circles() -> list[list[str]]:
    """Groups of files that import one another, in whatever number of steps."""
    reached: dict[Path, set[Path]] = {}
    for path in trees():
        seen: set[Path] = set()
        ahead = [path]
        while ahead:
            new = imported()[ahead.pop()] - seen
            seen |= new
            ahead.extend(new)
        reached[path] = seen
    groups = {frozenset(other for other in seen if path in reached[other]) for path, seen in reached.items()}
    return sorted(sorted(map(str, group)) for group in groups if len(group) > 1)


@functools.cache
def imported() -> dict[Path, set[Path]]:
    return {path: imports(path) for path in trees()}


@functools.cache
def figures() -> dict[str, tuple[int, list[str]]]:
    """Each figure, with the places that make it up where a list of them helps."""
    small = [str(path) for path in trees() if path.name != "__init__.py" and lines_of(path) < SMALL]
    listed = {
        "small files": small,
        "parameters that are callbacks": callbacks(),
        "class names in several files": class_names_in_several_files(),
        "functions with many parameters": functions_with_many_parameters(),
        "circles of imports": [", ".join(circle) for circle in circles()],
    }
    counted = {"lines": sum(map(lines_of, trees())), "files": len(trees())}
    return {name: (count, []) for name, count in counted.items()} | {k: (len(v), v) for k, v in listed.items()}


@pytest.mark.parametrize("figure", CEILINGS)
def test_the_house_grows_no_larger(figure: str) -> None:
    count, places = figures()[figure]
    assert count <= CEILINGS[figure], "\n".join([f"{figure}: {count}, at most {CEILINGS[figure]}", *places])


def test_no_file_holds_two_ideas() -> None:
    assert not [f"{path} has {lines_of(path)} lines" for path in trees() if lines_of(path) > LARGE]


# The seams, by file and class: what stands on each is there because a part of the product calls it.
SEAMS = (
    ("protocols/network.py", "Network"),
    ("protocols/state/backend.py", "StateBackend"),
    ("protocols/calls/rpc.py", "Rpc"),
    ("protocols/transfer/bulk.py", "Bulk"),
    ("protocols/transfer/shards.py", "Shards"),
    ("protocols/transfer/shard_wire.py", "Store"),
)


def public_methods(path: str, name: str) -> set[str]:
    found = [n for n in trees()[Path(path)].body if isinstance(n, ast.ClassDef) and n.name == name]
    assert found, f"{path} has no class {name}"
    return {each.name for each in found[0].body if isinstance(each, Function) and not each.name.startswith("_")}


@pytest.mark.parametrize(("path", "name"), SEAMS)
def test_every_method_of_a_seam_has_a_caller_in_the_product(path: str, name: str) -> None:
    used: Counter[str] = Counter()
    for other, tree in trees().items():
        if other != Path(path):
            used.update(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    assert not sorted(public_methods(path, name) - used.keys())
