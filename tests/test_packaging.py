"""What an installation promises: the wheel holds every room and runs anywhere, and `make` creates what it needs.

The folders at the root are mapped to `swarmnode.*` by a list in pyproject.toml; a folder that is missing from the list
works in a checkout and is absent from a wheel, so the list is compared with the folders and the wheel is run from an
empty directory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("cli", "crdt", "node", "protocols", "testing", "training")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def source_files() -> dict[str, Path]:
    """Every file of the rooms and of `package/`, by its path inside an installation."""
    files: dict[str, Path] = {}
    for room, prefix in [("package", "swarmnode"), *((room, f"swarmnode/{room}") for room in ROOMS)]:
        for path in (ROOT / room).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                files[f"{prefix}/{path.relative_to(ROOT / room).as_posix()}"] = path
    return files


def bare(name: str) -> str:
    """A distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~;\[ ]", name.strip(), maxsplit=1)[0]).lower()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that nothing stale in build/ gets into it."""
    copy = tmp_path_factory.mktemp("source")
    for room in ("package", *ROOMS):
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def built_wheel(source: Path, dist: Path) -> Path:
    """The wheel of a folder with sources, or of an sdist."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run([*build, "--wheel-dir", dist, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = dist.glob("swarmnode-*.whl")
    return wheel


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory, sources: Path) -> Path:
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(built_wheel(sources, tmp_path_factory.mktemp("dist"))).extractall(site)
    return site


def run_installed(site: Path, empty: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in an empty directory, with the unpacked wheel before everything else that is installed."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(site), "HOME": str(empty)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_listed_packages_are_the_folders_with_an_init() -> None:
    found = {"swarmnode"}
    for room in ROOMS:
        for init in (ROOT / room).rglob("__init__.py"):
            found.add(".".join(("swarmnode", *init.parent.relative_to(ROOT).parts)))
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(found)
    assert len(listed) == len(set(listed))


def test_no_folder_of_code_is_a_namespace_without_init() -> None:
    bare_folders = {
        path.parent.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert not bare_folders, "add an __init__.py, or the folder is missing from wheels and from mypy"


def test_no_root_folder_shadows_the_installed_package() -> None:
    assert not (ROOT / "swarmnode").exists()


def test_wheel_holds_every_source_and_data_file(unpacked_wheel: Path) -> None:
    held = {p.relative_to(unpacked_wheel).as_posix() for p in unpacked_wheel.rglob("*") if p.is_file()}
    code = {path for path in held if path.startswith("swarmnode/")}
    assert code == set(source_files())
    assert "swarmnode/py.typed" in code
    assert any(path.endswith("/licenses/LICENSE") for path in held)


def test_the_sdist_has_all_that_its_wheel_needs_and_the_wheel_installs_as_tools_do_it(
    sources: Path, unpacked_wheel: Path, tmp_path: Path
) -> None:
    """`uv tool install` and `pipx` make an environment for the wheel alone, and link the program that it names."""
    make = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    done = subprocess.run([sys.executable, "-c", make], cwd=sources, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [sdist] = (sources / "dist").glob("swarmnode-*.tar.gz")
    wheel = built_wheel(sdist, tmp_path / "dist")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("swarmnode/")}
    assert held == set(source_files())
    home = tmp_path / "tool"
    venv.create(home, with_pip=False)
    # The dependencies are those of this environment: a test downloads nothing.
    [library] = home.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (library / "dependencies.pth").write_text("\n".join(ours))
    install = [sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "--quiet", "--no-deps"]
    done = subprocess.run([*install, "--no-index", wheel], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    empty = tmp_path / "empty"
    empty.mkdir()
    where = "import swarmnode; print(swarmnode.__file__)"
    for command in ([home / "bin" / "swarmnode", "--version"], [home / "bin" / "python", "-I", "-c", where]):
        told = subprocess.run(command, cwd=empty, env={"PATH": "", "HOME": str(empty)}, capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
    assert str(home) in told.stdout


def test_wheel_runs_from_an_empty_directory(unpacked_wheel: Path, tmp_path: Path) -> None:
    where = run_installed(unpacked_wheel, tmp_path, "-c", "import swarmnode; print(swarmnode.__file__)")
    assert where.stdout.strip() == str(unpacked_wheel / "swarmnode" / "__init__.py"), where.stderr
    version = run_installed(unpacked_wheel, tmp_path, "-m", "swarmnode", "version")
    assert version.returncode == 0, version.stderr
    assert run_installed(
        unpacked_wheel, tmp_path, "-c", "import swarmnode; print(swarmnode.__version__)"
    ).stdout.strip() in (version.stdout)


def test_public_names_resolve_and_cost_nothing_until_used(unpacked_wheel: Path, tmp_path: Path) -> None:
    program = (
        "import sys, swarmnode\n"
        "loaded = [m for m in sys.modules if m.startswith('swarmnode.')]\n"
        "assert not loaded, loaded\n"
        "for name in swarmnode.__all__: assert getattr(swarmnode, name) is not None, name\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = run_installed(unpacked_wheel, tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr


def test_console_script_leads_to_a_callable() -> None:
    module, _, name = PROJECT["project"]["scripts"]["swarmnode"].partition(":")
    program = f"import {module} as m; assert callable(m.{name})"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_constraints_pin_every_direct_dependency_exactly() -> None:
    pins = dict(line.split("==") for line in CONSTRAINTS if line and not line.startswith("#"))
    pinned = {bare(name) for name in pins}
    extras = PROJECT["project"]["optional-dependencies"]
    direct = {bare(d) for d in (*PROJECT["project"]["dependencies"], *(d for name in extras for d in extras[name]))}
    assert direct - {"swarmnode"} <= pinned
    assert pins["torch"] == "2.13.0"
    assert int(pins["protobuf"].split(".")[0]) < 7, "hivemind and libp2p share no protobuf from 7 on"
    assert not any(line.startswith(("-e", "/")) or "@" in line for line in CONSTRAINTS)


def test_promised_extras_and_python_versions_are_declared() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"bench", "data", "dev", "gguf", "hf", "image", "rl"} <= extras.keys()
    assert "swarmnode[data,docs,gguf,hf,image,rl]" in extras["dev"], (
        "no test is skipped for want of a package that can be installed here"
    )
    assert PROJECT["project"]["requires-python"] == ">=3.11,<3.14"


@pytest.fixture
def project_copy(tmp_path: Path) -> Path:
    """What `make` looks at before it installs anything."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON")}
    return subprocess.run(
        ["make", "-C", str(folder), *arguments], env=environment, capture_output=True, text=True, timeout=60
    )


def test_make_names_the_python_it_needs_when_given_another(project_copy: Path) -> None:
    old = project_copy / "python2.7"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && { echo "Python 2.7.18"; exit 0; }\nexit 1\n')
    old.chmod(0o755)
    done = make(project_copy, "swarm", f"PYTHON={old}")
    assert done.returncode != 0
    assert "3.11, 3.12 or 3.13" in done.stderr
    assert "Python 2.7.18" in done.stderr
    assert "make PYTHON=" in done.stderr
    assert not (project_copy / ".venv").exists()


def test_make_installs_again_only_when_what_is_wanted_has_changed(project_copy: Path) -> None:
    stamp = project_copy / ".venv" / ".installed"
    stamp.parent.mkdir()
    assert make(project_copy, "-q", "venv").returncode == 1
    stamp.touch()
    assert make(project_copy, "-q", "venv").returncode == 0
    for name in ("pyproject.toml", "constraints.txt"):
        later = stamp.stat().st_mtime + 10
        os.utime(project_copy / name, (later, later))
        assert make(project_copy, "-q", "venv").returncode == 1
        os.utime(stamp, (later, later))


@pytest.mark.parametrize("target", ["swarm", "test", "test-all", "lint", "clean", "ci"])
def test_promised_make_targets_exist(project_copy: Path, target: str) -> None:
    done = make(project_copy, "-n", target)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", ["test", "test-all"])
def test_make_test_runs_linter_formatter_types_and_tests_in_this_order(project_copy: Path, target: str) -> None:
    (project_copy / ".venv").mkdir()
    (project_copy / ".venv" / ".installed").touch()
    plan = make(project_copy, "-n", target).stdout
    steps = [plan.index(step) for step in ("ruff check", "ruff format --check", "bin/mypy", "-m pytest")]
    assert steps == sorted(steps)
    fast = '-m "not slow and not thorough"' in plan
    assert fast == (target == "test"), "what a person runs before each commit is the fast tests"


def test_ci_entry_is_executable_and_runs_all_tests_and_a_swarm() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    assert "make --no-print-directory test-all" in text
    assert "swarmnode local --nodes 3 --rounds 4 --json" in text
    assert subprocess.run(["bash", "-n", script]).returncode == 0
