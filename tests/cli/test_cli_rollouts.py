"""Answers of strangers are shown as text and nothing else, and what was refused is explained."""

from __future__ import annotations

from typing import Any

import pytest

from swarmnode.cli import rollouts
from swarmnode.cli.rollouts import INDENT, LONG, MOST_LINES, WHY, _answers, _explained, _paragraphs


def test_a_strangers_text_is_broken_indented_and_freed_of_what_a_terminal_obeys() -> None:
    shown = _paragraphs("  first\x1b[2J\n\n" + 40 * "word ")
    assert shown[0] == f"{INDENT}first [2J"
    assert " ".join(shown[1:]).split() == 40 * ["word"] and len(shown) == 4, "blank lines are left out"
    assert all(line.startswith(INDENT) and len(line) <= 96 for line in shown)


@pytest.mark.parametrize("text, words", [("a" * LONG, LONG), ("a" * (LONG + 1), LONG)])
def test_of_a_very_long_text_the_beginning_is_shown(text: str, words: int) -> None:
    shown = "".join(_paragraphs(text))
    assert shown.count("a") == words and shown.endswith("…") == (len(text) > LONG)


def test_of_many_lines_the_first_are_shown() -> None:
    shown = _paragraphs("\n".join(map(str, range(2 * MOST_LINES))))
    assert [line.strip() for line in shown] == [str(number) for number in range(MOST_LINES)]


def test_short_answers_stand_in_a_table_and_long_ones_below_what_they_earned() -> None:
    def lines(text: str) -> list[str]:
        answers = [{"text": text, "reward": 1.0, "advantage": 0.5, "tokens": 3}]
        return _answers({"question": "a304=", "key": "40", "answers": answers})

    head, shown = lines("40")
    assert head.startswith("question  a304=") and "40" in shown and "+0.50" in shown
    assert lines("4\n0")[-3:] == ["answer 1: reward 1.00, advantage +0.50, 3 tokens", f"{INDENT}4", f"{INDENT}0"]


def test_each_reason_is_explained_once_and_one_that_is_not_known_is_left_out() -> None:
    assert _explained({"unlikely", "flood", "of-tomorrow"}) == [
        f"  {word}: {WHY[word]}" for word in ("flood", "unlikely")
    ]


def test_the_pool_explains_what_was_refused_of_any_author(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    counts = dict.fromkeys(("groups", "bytes", "came", "used", "learned", "version"), 0)
    authors = [
        {"author": f"12D3KooW{n}", "refused": {reason: 1}, **counts} for n, reason in enumerate(("old", "stale"))
    ]
    held = dict.fromkeys(("groups", "authors", "bytes", "unused", "own_groups", "own_bytes"), 0)
    monkeypatch.setattr(rollouts, "ask", lambda method: {"authors": authors, "pool": held})
    rollouts.pool()
    assert capsys.readouterr().out.splitlines()[-2:] == [f"  {word}: {WHY[word]}" for word in ("old", "stale")]
