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


def rows(page: str, heading: str) -> list[str]:
    """Of the table below a heading."""
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


def test_a_group_takes_the_place_of_its_own_lines_only(program: ModuleType) -> None:
    program.write_outcomes([Outcome("DHT", "a", "1", "2"), Outcome("DHT", "b", "1", "2")])
    program.write_outcomes([Outcome("round", "c", "1", "2")])
    program.write_outcomes([Outcome("DHT", "b", "3", "4", ("broken",))])
    page = program.PAGE.read_text()
    assert rows(page, "DHT") == ["| b | 3 | 4 | MISSED: broken |"] and rows(page, "Round") == ["| c | 1 | 2 | passes |"]
    assert "| [DHT](#dht) | 1 | 1 |" in page and "| [Round](#round) | 1 | 0 |" in page, "counted at the top"


def test_swarms_of_another_size_have_a_table_of_their_own(program: ModuleType) -> None:
    program.write_outcomes([Outcome("round", "c", "first", "2")])
    program.write_outcomes([Outcome("round", "c", "second", "2")], 16)
    program.write_outcomes([Outcome("round", "c", "third", "2")])
    page = program.PAGE.read_text()
    assert rows(page, "Round") == ["| c | third | 2 | passes |"]
    assert rows(page, "Round with 16 nodes") == ["| c | second | 2 | passes |"]


def line(attack: str, accuracy: float, *, rounds: int = 40, setting: Setting = SETTINGS[0]) -> Line:
    one = Damage(setting, rounds, 3, 0.8, accuracy, 0.4, 0.8, 0.02, 0.1, 0.3, 0.33, 0.05, 0, 0, None)
    return Line(attack, (one,))


def test_a_line_of_the_gradient_group_takes_the_place_of_its_own_and_stays_when_others_are_written(
    program: ModuleType,
) -> None:
    program.write_outcomes([Outcome("DHT", "a", "1", "2")])
    for one in (line("flip", 0.8), line("other", 0.8), line("flip", 0.8, rounds=160), line("flip", 0.69)):
        program.write_line(one)
    program.write_outcomes([Outcome("round", "c", "1", "2")], 16)
    page = program.PAGE.read_text()
    found = [row.split(" | ") for row in rows(page, "Gradient")]
    assert [(row[0], row[2]) for row in found] == [("| flip", "40"), ("| other", "40"), ("| flip", "160")]
    assert "MISSED: IID 5/16, seed 3: 86.2% of clean, 95% promised" in found[0][-1]
    assert found[1][-1].startswith("holds") and "| [Gradient](#gradient) | 3 | 1 |" in page
    assert rows(page, "DHT") and rows(page, "Round with 16 nodes")


def test_lines_of_byte_lm_have_a_table_of_their_own(program: ModuleType) -> None:
    byte_lm = bytelm.SETTINGS[0]
    for one in (line("flip", 0.8), line("flip", 0.79, setting=byte_lm), line("other", 0.8)):
        program.write_line(one)
    program.write_outcomes([Outcome("round", "c", "1", "2")], 16)
    program.write_line(line("flip", 0.8, setting=byte_lm))
    page = program.PAGE.read_text()
    assert [row.split(" | ")[1] for row in rows(page, "Gradient")] == ["658 parameters"] * 2
    assert [row.split(" | ")[6] for row in rows(page, bytelm.HEADING)] == ["100"]
