"""What the documents tell a reader to type exists: commands, options, make targets, files, settings."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarmnode.cli.main import app
from swarmnode.node.config import NodeConfig, default_data_dir
from swarmnode.training.options import describe

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
GROUPED = ("config", "dht", "log", "peers", "provenance", "runs", "shards", "state", "successor", "task")
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@functools.cache
def help_of(*command: str) -> str:
    shown = CliRunner().invoke(app, [*command, "--help"], terminal_width=200)
    assert shown.exit_code == 0, f"swarmnode {' '.join(command)} --help: {shown.output}"
    return shown.output


@functools.cache
def commands() -> frozenset[str]:
    """The names under Commands in `swarmnode --help`."""
    listed = help_of().partition("Commands")[2]
    return frozenset(re.findall(r"^[\s│]*([a-z]+) {2,}\S", listed, re.MULTILINE))


def lines_to_type(text: str) -> list[str]:
    """Command lines of ours, in code blocks and between backticks, without comments."""
    blocks, without = [line for _, body in FENCE.findall(text) for line in body.splitlines()], FENCE.sub("", text)
    spans = re.findall(r"`([^`\n]+)`", without) + re.findall(r"^ {4}(.*)$", without, re.MULTILINE)
    return [
        line.split("#")[0].strip().removeprefix(".venv/bin/")
        for line in [*blocks, *spans]
        if re.match(r"(\.venv/bin/)?(swarmnode|make) \S", line.strip())
    ]


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_options_in_documents_exist(name: str) -> None:
    for line in lines_to_type(text_of(name)):
        program, *words = shlex.split(line.replace("[", "").replace("]", ""))
        if program != "swarmnode" or words[0].startswith("-") or words[0] == "COMMAND":
            continue
        assert words[0] in commands(), f"{name}: {line}"
        grouped = words[0] in GROUPED and len(words) > 1
        command = tuple(words[:2]) if grouped else (words[0],)
        helped = help_of(*command)
        for word in words:
            if word.startswith("--"):
                assert re.search(rf"{re.escape(word)}\b", helped), f"{name}: {line}: no {word}"


@pytest.mark.parametrize("page", ["configuration", "memory", "messages", "metrics", "troubleshooting"])
def test_pages_that_follow_from_the_code_are_up_to_date(page: str) -> None:
    done = subprocess.run([sys.executable, "docs/generate.py", page], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == text_of(f"docs/{page}.md"), f"run: python docs/generate.py {page} > docs/{page}.md"


def test_the_site_has_every_page_and_is_built_without_a_warning(tmp_path: Path) -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert set(re.findall(r": ([\w-]+\.md)$", text_of("mkdocs.yml"), re.MULTILINE)) == pages
    (tmp_path / "mkdocs.yml").write_text(text_of("mkdocs.yml"))
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    build = [Path(sys.executable).with_name("zensical"), "build", "--strict"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "No issues found" in done.stderr, done.stdout + done.stderr
    assert (tmp_path / "build" / "site" / "index.html").is_file()


@pytest.mark.parametrize("name", NAMES)
def test_make_targets_in_documents_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    for line in lines_to_type(text_of(name)):
        program, target, *_ = shlex.split(line)
        assert program != "make" or target in targets, f"{name}: {line}"


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text_of(name)):
        if not target.startswith(("http:", "https:")):
            assert ((ROOT / name).parent / target).exists(), f"{name}: {target}"


@pytest.mark.parametrize("name", NAMES)
def test_files_named_in_documents_exist(name: str) -> None:
    folders = r"\.ci|bench|cli|crdt|deploy|docs|examples|node|package|protocols|tests|training"
    for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", text_of(name)):
        assert (ROOT / path).exists(), f"{name}: {path}"


@pytest.mark.parametrize("name", NAMES)
def test_tests_named_in_documents_exist(name: str) -> None:
    for path, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text_of(name)):
        assert re.search(rf"^(async )?def {test}\(", text_of(path), re.MULTILINE), f"{name}: {path}::{test}"


def test_every_promise_to_volunteers_names_its_test() -> None:
    promised = text_of("docs/volunteers.md").split("## What is promised")[1].split("\n## ")[0]
    rows = [row for row in promised.splitlines() if row.startswith("| ")][1:]
    assert len(rows) >= 10 and not [row for row in rows if "::test_" not in row.rsplit("|", 2)[1]]


def test_readme_begins_with_the_two_commands() -> None:
    first = FENCE.search(text_of("README.md"))
    assert first is not None
    typed = [line.split("#")[0].split() for line in first.group(2).splitlines()]
    assert typed == [["make", "swarm"], ["make", "test"]]
    assert first.start() < 100


def test_readme_names_every_command() -> None:
    table = text_of("README.md").partition("| to | commands |\n")[2].partition("\n\n")[0]
    assert sorted(re.findall("`([a-z]+)`", table)) == sorted(commands())


def test_readme_states_the_real_defaults() -> None:
    text = text_of("README.md")
    assert f"TCP port {describe(NodeConfig)['port'][0].default} " in text
    home = Path("~").expanduser()
    assert f"`~/{default_data_dir({}).relative_to(home).as_posix()}`" in text
    assert "Python 3.11, 3.12 or 3.13" in text


def test_changelog_tells_about_this_version() -> None:
    from swarmnode import __version__

    assert re.search(rf"^## {re.escape(__version__)}\b", text_of("CHANGELOG.md"), re.MULTILINE)
