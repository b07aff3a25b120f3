"""The arrows between rooms run one way: cli -> node -> protocols -> crdt, training.

Read from the sources with `ast`, so that an import inside a function counts as well; and seen in a fresh interpreter,
so that what a library drags in counts too: the daemon never holds torch, and what a person types starts without trio
and libp2p.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("cli", "crdt", "node", "protocols", "training")

# What a room may import of ours, by prefix. `swarmnode` itself stands for the version.
ALLOWED: dict[str, tuple[str, ...]] = {
    "crdt": ("swarmnode.crdt",),
    "training": ("swarmnode.training",),
    "protocols": (
        "swarmnode.crdt",
        "swarmnode.protocols",
        "swarmnode.training.btard",
        "swarmnode.training.codecs",
        "swarmnode.training.demo",
        "swarmnode.training.gossip",
        "swarmnode.training.lowrank",
        "swarmnode.training.mapped",
        "swarmnode.training.open_step",
        "swarmnode.training.options",
        "swarmnode.training.outer",
        "swarmnode.training.rl.groups",
        "swarmnode.training.rl.patches",
        "swarmnode.training.rl.section",
        "swarmnode.training.rl.tasks",
        "swarmnode.training.runspec",
        "swarmnode.training.sections",
        "swarmnode.training.seed",
        "swarmnode.training.streaming",
        "swarmnode.training.verify",
    ),
    "node": ("swarmnode", "swarmnode.crdt", "swarmnode.node", "swarmnode.protocols", "swarmnode.training"),
    "cli": (
        "swarmnode",
        "swarmnode.cli",
        "swarmnode.node.config",
        "swarmnode.node.control.client",
        "swarmnode.node.storage.datadir",
        "swarmnode.node.storage.history",
        "swarmnode.node.exitcodes",
        "swarmnode.node.identity",
        "swarmnode.node.invite",
        "swarmnode.node.logs",
        "swarmnode.training.options",
        "swarmnode.training.rl.section",
        "swarmnode.training.runspec",
        "swarmnode.training.sections",
    ),
}
# `swarmnode run` becomes the daemon in its own process; nothing else of the command line may touch it. A model and its
# record are exported and verified without a daemon, perhaps long after the run; a plan is made before there is one; one
# page shows all the nodes of a local swarm, whichever of them die.
ALLOWED_INSIDE_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "cli": (
        "swarmnode.node.daemon",
        "swarmnode.node.dashboard.server",
        "swarmnode.node.doctor",
        "swarmnode.node.plan",
        "swarmnode.node.provenance",
        "swarmnode.node.runfinder",
    )
}

# Libraries that a room must not even mention.
FORBIDDEN: dict[str, frozenset[str]] = {
    "crdt": frozenset({"libp2p", "multiaddr", "socket", "sqlite3", "torch", "trio"}),
    "training": frozenset({"libp2p", "multiaddr", "trio"}),
    "training/codecs": frozenset({"libp2p", "multiaddr", "socket", "sqlite3", "torch", "trio"}),
    "training/verify": frozenset({"libp2p", "multiaddr", "socket", "sqlite3", "torch", "trio"}),
    "protocols": frozenset({"libp2p", "multiaddr", "socket", "torch"}),
    "node": frozenset({"torch"}),
    "cli": frozenset({"libp2p", "torch"}),
}
HEAVY_FOR_CLI = ("libp2p", "numpy", "torch", "trio")


@dataclass(frozen=True)
class Import:
    """One imported module: where it stands, and whether a function delays it."""

    file: str
    line: int
    module: str
    inside_function: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def imports_of(path: Path) -> Iterator[Import]:
    file = path.relative_to(ROOT).as_posix()
    package = ["swarmnode", *path.relative_to(ROOT).parent.parts]

    def visit(node: ast.AST, inside: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(file, child.lineno, alias.name, inside)
            elif isinstance(child, ast.ImportFrom):
                base = ".".join(package[: len(package) - child.level + 1]) if child.level else ""
                module = ".".join(part for part in (base, child.module) if part)
                # `from swarmnode import node` and `from swarmnode.node import daemon` import what they name.
                for alias in child.names:
                    named = f"{module}.{alias.name}"
                    yield Import(file, child.lineno, named if is_module(named) else module, inside)
            else:
                deeper = inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from visit(child, deeper)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), False)


def is_module(name: str) -> bool:
    first, *rest = name.split(".")
    place = ROOT.joinpath(*rest)
    return first == "swarmnode" and bool(rest) and (place.is_dir() or place.with_suffix(".py").is_file())


def all_imports(folder: str) -> Iterator[Import]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield from imports_of(path)


def permitted(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == p or (p != "swarmnode" and module.startswith(p + ".")) for p in prefixes)


def modules_of(*rooms: str) -> list[str]:
    return [
        ".".join(("swarmnode", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for room in rooms
        for path in sorted((ROOT / room).rglob("*.py"))
        if path.name != "__main__.py"
    ]


def loaded_after_importing(modules: list[str]) -> set[str]:
    """Top-level modules present in a fresh interpreter that imported `modules` and nothing else."""
    program = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd="/", capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return {name for name in done.stdout.split() if "." not in name}  # else what stands in for a part of a package


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_between_rooms_run_one_way(room: str) -> None:
    wrong = [
        str(found)
        for found in all_imports(room)
        if found.module.split(".")[0] == "swarmnode"
        and not permitted(found.module, ALLOWED[room])
        and not (found.inside_function and permitted(found.module, ALLOWED_INSIDE_FUNCTIONS.get(room, ())))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", sorted(FORBIDDEN))
def test_rooms_mention_no_library_that_is_not_theirs(folder: str) -> None:
    wrong = [str(found) for found in all_imports(folder) if found.module.split(".")[0] in FORBIDDEN[folder]]
    assert not wrong, "\n".join(wrong)


def test_daemon_side_loads_no_torch() -> None:
    loaded = loaded_after_importing(modules_of("cli", "crdt", "protocols", "node"))
    assert "torch" not in loaded
    assert "matplotlib" not in loaded


def test_command_line_loads_neither_torch_nor_trio_nor_libp2p_nor_numpy() -> None:
    loaded = loaded_after_importing(modules_of("cli"))
    assert not loaded & set(HEAVY_FOR_CLI)


def test_imports_inside_functions_and_of_names_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("node/daemon.py", "node/config.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    module = tmp_path / "cli" / "main.py"
    module.parent.mkdir()
    module.write_text(
        "from swarmnode.node import config\n"
        "from . import table\n"
        "def run():\n"
        "    from swarmnode.node import daemon\n"
        "    import torch\n"
    )
    assert [(found.module, found.inside_function) for found in imports_of(module)] == [
        ("swarmnode.node.config", False),
        ("swarmnode.cli", False),
        ("swarmnode.node.daemon", True),
        ("torch", True),
    ]
