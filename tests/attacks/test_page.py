"""docs/attacks.md keeps what it says of other groups, and of swarms of another size, when one is run again."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
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
    assert [line for line in page.splitlines() if line.startswith("| DHT")] == ["| DHT | b | 3 | 4 | FAILS: broken |"]
    assert "| round | c | 1 | 2 | passes |" in page


def test_swarms_of_another_size_have_a_table_of_their_own(program: ModuleType) -> None:
    program.write_page([Outcome("round", "c", "first", "2")])
    program.write_page([Outcome("round", "c", "second", "2")], 16)
    program.write_page([Outcome("round", "c", "third", "2")])
    first, others = program.PAGE.read_text().split("## 16 nodes")
    assert "| third |" in first and "| second |" not in first
    assert "| second |" in others and "| third |" not in others
