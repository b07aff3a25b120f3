"""docs/attacks.md keeps what it says of other groups, and of swarms of another size, when one is run again."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import bytelm
import pytest
from gradient import SETTINGS, Damage, Line, Setting
from harness import Outcome


@pytest.fixture
def program(tmp_path: Path) -> ModuleType:
    spec = spec_from_file_location("attacks_program", Path(__file__).with_name("__main__.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PAGE = tmp_path / "attacks.md"  # type: ignore[attr-defined]
    return module


def test_a_group_takes_the_place_of_its_own_lines_only(program: ModuleType) -> None:
    program.write_page([Outcome("DHT", "a", "1", "2"), Outcome("DHT", "b", "1", "2")])
    program.write_page([Outcome("round", "c", "1", "2")])
    program.write_page([Outcome("DHT", "b", "3", "4", ("broken",))])
    page = program.PAGE.read_text()
    assert [line for line in page.splitlines() if line.startswith("| DHT")] == ["| DHT | b | 3 | 4 | MISSED: broken |"]
    assert "| round | c | 1 | 2 | passes |" in page


def test_swarms_of_another_size_have_a_table_of_their_own(program: ModuleType) -> None:
    program.write_page([Outcome("round", "c", "first", "2")])
    program.write_page([Outcome("round", "c", "second", "2")], 16)
    program.write_page([Outcome("round", "c", "third", "2")])
    first, others = program.PAGE.read_text().split("## 16 nodes")
    assert "| third |" in first and "| second |" not in first
    assert "| second |" in others and "| third |" not in others


def line(attack: str, accuracy: float, *, rounds: int = 40, setting: Setting = SETTINGS[0]) -> Line:
    one = Damage(setting, rounds, 3, 0.8, accuracy, 0.4, 0.8, 0.02, 0.1, 0.3, 0.33, 0.05, 0, 0, None)
    return Line(attack, (one,))


def test_a_line_of_the_gradient_group_takes_the_place_of_its_own_and_stays_when_others_are_written(
    program: ModuleType,
) -> None:
    program.write_page([Outcome("DHT", "a", "1", "2")])
    for one in (line("flip", 0.8), line("other", 0.8), line("flip", 0.8, rounds=160), line("flip", 0.69)):
        program.write_line(one)
    program.write_page([Outcome("round", "c", "1", "2")], 16)
    page = program.PAGE.read_text()
    _, after = page.split(program.MEASURED)
    rows = [row.split(" | ") for row in after.splitlines() if row.startswith("| ")][1:]
    assert [(row[0], row[2]) for row in rows] == [("| flip", "40"), ("| other", "40"), ("| flip", "160")]
    assert "MISSED: IID 5/16, seed 3: 86.2% of clean, 95% promised" in rows[0][-1]
    assert rows[1][-1].startswith("holds")
    assert "| DHT | a | 1 | 2 | passes |" in page and "## 16 nodes" in page


def test_lines_of_byte_lm_have_a_table_of_their_own(program: ModuleType) -> None:
    byte_lm = bytelm.SETTINGS[0]
    for one in (line("flip", 0.8), line("flip", 0.79, setting=byte_lm), line("other", 0.8)):
        program.write_line(one)
    program.write_page([Outcome("round", "c", "1", "2")], 16)
    program.write_line(line("flip", 0.8, setting=byte_lm))
    first, theirs = program.PAGE.read_text().split(f"## {bytelm.HEADING}")
    assert [row.split(" | ")[1] for row in first.splitlines() if " fp32 | " in row] == ["658 parameters"] * 2
    assert [row.split(" | ")[6] for row in theirs.splitlines() if " topk | " in row] == ["100"]
