"""The report of a local swarm: one page that needs nothing else, with the figures of the summary."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from swarmnode.cli.local.report import Results, Summary, figures, verdict, write_report
from swarmnode.cli.local.swarm import NodeProcess, RoundReport


def _rounds(losses: list[float | None], state_hash: str = "aa") -> tuple[RoundReport, ...]:
    return tuple(
        RoundReport(r, loss, f"{state_hash}{r}" * 8, "Completed", 1.5, 10**6, 2 * 10**6, 1.0, 100, 2.0 * r)
        for r, loss in enumerate(losses)
    )


def _node(label: str, peer_id: str, state: str, reports: tuple[RoundReport, ...]) -> NodeProcess:
    node = NodeProcess(label, Path("nowhere"), Path("nowhere"))
    node.ready, node.reports, node.state_at_end = {"peer_id": peer_id}, list(reports), state
    return node


def _results(**changes: object) -> Results:
    values: dict[str, object] = {
        "run": "byte-lm <test>",
        "run_id": "ab" * 32,
        "summary": Summary(2, 3, 840_000, 2.40, 2.52, True, 2.25, 0.61, 93.4),
        "nodes": (
            _node("0", "12D3KooA", "finished", _rounds([4.0, 3.0, 2.4])),
            _node("1", "12D3KooB", "dead", _rounds([4.0, None])),
        ),
        "solo": _rounds([4.1, 3.2, 2.52], "bb"),
    }
    return Results(**{**values, **changes})  # type: ignore[arg-type]


def _page(folder: Path, results: Results) -> str:
    write_report(folder, results)
    return (folder / "index.html").read_text(encoding="utf-8")


def test_the_page_holds_its_picture_and_refers_to_nothing_outside(tmp_path):
    folder = tmp_path / "deep" / "report"
    assert write_report(folder, _results())
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert re.findall(r'(?:src|href)="([^"]{0,22})', page) == ["data:image/png;base64,"]
    assert "http" not in page and "<script" not in page


def test_the_page_has_summary_and_facts_of_every_node(tmp_path):
    page = _page(tmp_path, _results(notes=("node 1: disk is full",)))
    for text in (
        "0.120 below the 2.520 of one node alone",
        "2.4000 bits per byte",
        "+0.1200 bits per byte",
        "equal in every round",
        "2.25 bytes",
        "61%",
        "840,000",
        "12D3KooA",
        "12D3KooB",
        "dead",
        "6.00 MB",
        "2 Completed",
        "node 1: disk is full",
    ):
        assert text in page, text


def test_what_comes_from_elsewhere_is_escaped(tmp_path):
    nodes = (_node("0", "<b>peer</b>", "finished", _rounds([4.0])),)
    page = _page(tmp_path, _results(nodes=nodes))
    assert "byte-lm &lt;test&gt;" in page and "<b>peer" not in page and "<test>" not in page


def test_a_round_with_two_hashes_shows_both(tmp_path):
    nodes = (_node("0", "a", "finished", _rounds([4.0])), _node("1", "b", "finished", _rounds([4.0], "cc")))
    page = _page(tmp_path, _results(nodes=nodes))
    assert "aa0aa0aa0aa0aa0a ≠ cc0cc0cc0cc0cc0c" in page


def test_without_matplotlib_the_page_has_the_figures_only(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not write_report(tmp_path, _results())
    assert not (tmp_path / "loss.png").exists()
    assert "matplotlib is not installed" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_a_run_that_reached_nothing_still_gives_a_report(tmp_path):
    nothing = Summary(2, 0, 0, None, None, False, None, None, 3.0)
    page = _page(tmp_path, _results(summary=nothing, nodes=(_node("0", "", "dead", ()),), solo=()))
    assert "no held-out loss was measured" in page


@pytest.mark.parametrize(
    ("solo", "sentence"),
    [
        (None, "2 nodes reached 2.400 bits per byte on held-out text in 3 rounds."),
        (2.3, "2 nodes reached 2.400 bits per byte on held-out text, 0.100 above the 2.300 of one node alone."),
    ],
)
def test_the_verdict_says_against_what(solo, sentence):
    assert verdict(Summary(2, 3, 10, 2.4, solo, True, 1.0, 0.5, 1.0)) == sentence


def test_figures_say_when_hashes_differ():
    values = dict(figures(Summary(2, 3, 10, 2.4, None, False, None, None, 1.0)))
    assert values["state hashes"] == "NOT equal in every round"
    assert values["sent per parameter and round"] == "not measured"
    assert "held-out loss of one node alone" not in values  # nobody asked for it


def test_an_unwritable_folder_is_an_oserror(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        write_report(tmp_path / "file" / "report", _results())
