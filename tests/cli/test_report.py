"""The report of a local swarm: one page that needs nothing else, with the figures of the summary."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, needs_chromium

from swarmnode.cli.local.report import Results, Summary, figures, verdict, write_report
from swarmnode.cli.local.swarm import NodeProcess, RoundReport
from swarmnode.training.runspec import parse_runspec


def _rounds(losses: list[float | None], state_hash: str = "aa") -> tuple[RoundReport, ...]:
    return tuple(
        RoundReport(r, loss, f"{state_hash}{r}" * 8, 1.5, 10**6, 2 * 10**6, 1.0, 100, 2.0 * r)
        for r, loss in enumerate(losses)
    )


def _node(label: str, peer_id: str, state: str, reports: tuple[RoundReport, ...]) -> NodeProcess:
    node = NodeProcess(label, Path("nowhere"))
    node.ready, node.reports, node.state_at_end = {"peer_id": peer_id}, list(reports), state
    told = ("round", "loss", "bytes_in", "bytes_out")
    node.rounds = [{"event": "round", "time": 1.0, **{name: getattr(one, name) for name in told}} for one in reports]
    return node


def _results(**changes: object) -> Results:
    solo = _node("solo", "12D3KooC", "finished", _rounds([4.1, 3.2, 2.52], "bb"))
    values: dict[str, object] = {
        "spec": parse_runspec({"run": {"name": "byte-lm-test", "seed": 1}}, source="a test"),
        "summary": Summary(2, 3, 840_000, 2.40, 2.52, True, 2.25, 0.61, 93.4),
        "nodes": (
            _node("0", "12D3KooA", "finished", _rounds([4.0, 3.0, 2.4])),
            _node("1", "12D3KooB", "dead", _rounds([4.0, None])),
        ),
        "solo": solo,
        "notes": ("node 1: disk is full",),
    }
    return Results(**{**values, **changes})  # type: ignore[arg-type]


def _told(page: str) -> dict[str, Any]:
    """What the page holds."""
    return dict(json.loads(page.split('id="report">')[1].partition("</script>")[0]))


def test_the_page_is_one_file_and_its_browser_may_load_nothing_else(tmp_path):
    file = write_report(tmp_path / "deep" / "report", _results())
    assert [path.name for path in file.parent.iterdir()] == ["index.html"]
    page = file.read_text(encoding="utf-8")
    assert [found[:5] for found in re.findall(r'(?:src|href)="([^"]*)', page)] == ["data:"]
    assert page.count("://") == page.count("http://www.w3.org")  # the name of SVG, which nobody fetches
    assert "content=\"default-src 'none'; img-src data:; script-src 'sha256-" in page


def test_the_page_holds_summary_rounds_settings_and_versions(tmp_path):
    told = _told(write_report(tmp_path, _results(attack={"words": ["1 of 2 nodes lied"]})).read_text(encoding="utf-8"))
    assert told["verdict"].endswith("0.120 below the 2.520 of one node alone.")
    assert dict(told["figures"])["parameters"] == "840,000"
    assert [(node["peer_id"], node["state"]) for node in told["nodes"]] == [
        ("12D3KooA", "finished"),
        ("12D3KooB", "dead"),
    ]
    assert [[line["loss"] for line in node["history"]["rounds"]] for node in told["nodes"]] == [[4, 3, 2.4], [4, None]]
    assert [line["loss"] for line in told["solo"]["rounds"]] == [4.1, 3.2, 2.52]
    assert told["settings"]["run"]["name"] == "byte-lm-test" and told["versions"]["torch"]
    assert told["notes"] == ["node 1: disk is full"] and told["attack"]["words"] == ["1 of 2 nodes lied"]


def test_what_a_peer_is_called_cannot_end_the_element_that_holds_it(tmp_path):
    nodes = (_node("0", "</script><b>peer</b>", "finished", _rounds([4.0])),)
    page = write_report(tmp_path, _results(nodes=nodes)).read_text(encoding="utf-8")
    assert _told(page)["nodes"][0]["peer_id"] == "</script><b>peer</b>" and "<b>peer" not in page


def test_a_run_that_reached_nothing_still_gives_a_report(tmp_path):
    nothing = Summary(2, 0, 0, None, None, False, None, None, 3.0)
    nodes = (_node("0", "", "dead", ()),)
    told = _told(write_report(tmp_path, _results(summary=nothing, nodes=nodes, solo=None)).read_text(encoding="utf-8"))
    assert "no held-out loss was measured" in told["verdict"] and told["solo"] is None


@needs_chromium
@pytest.mark.slow
def test_a_browser_shows_the_report_and_compares_it_with_another(tmp_path):
    liar = {"node": "1", "lie": "nan", "accepted": 0, "refused": {"malformed": 3}, "score": 0.0}
    attack = {"words": ["1 of 2 nodes lied"], "nodes": [liar]}
    here = write_report(tmp_path / "here", _results(attack=attack))
    spec = parse_runspec({"run": {"name": "byte-lm-test", "seed": 2}}, source="a test")
    there = write_report(tmp_path / "there", _results(spec=spec))
    (tmp_path / "none.html").write_text("<p>hello</p>")
    with Browser() as browser:
        page = browser.open(here.as_uri(), width=390)
        page.wait("document.querySelector('#link').innerText.startsWith('report of')")
        assert "2 nodes reached 2.400" in page.text("#alerts") and "disk is full" in page.text("#alerts")
        assert "one node alone 2.520" in " ".join(page.text("#curve .detail").split())
        assert "dead" in page.text("#work")
        assert "1 of 2 nodes lied" in page.text("#attack") and "3 × malformed" in page.text("#attack")
        versions = page.js("document.querySelector('#settings details').textContent")
        assert "torch" in versions and "byte-lm-test" in versions
        page.js("[...document.querySelectorAll('#measures button')].find((one) => one.innerText === 'Traffic').click()")
        page.wait("document.querySelector('#curve .detail').innerText.startsWith('traffic, mean of the 2 nodes 3')")
        page.js("document.querySelector('#measures button').click()")
        assert not page.js("document.querySelector('#pause').offsetParent")
        assert page.js("document.documentElement.scrollWidth") <= 390
        page.choose("#compare input", tmp_path / "none.html")
        page.wait("document.querySelector('#compare').innerText.includes('no report')")
        page.choose("#compare input", there)
        page.wait("document.querySelector('#compare').innerText.includes('run.seed')")
        page.wait("document.querySelector('#curve').innerText.includes('the other report')")
        assert page.requests == [here.as_uri()] and not page.errors


@pytest.mark.parametrize(
    ("solo", "sentence"),
    [
        (None, "2 nodes reached 2.400 bits per byte on a large held-out text in 3 rounds."),
        (2.3, "2 nodes reached 2.400 bits per byte on a large held-out text, 0.100 above the 2.300 of one node alone."),
    ],
)
def test_the_verdict_says_against_what(solo, sentence):
    assert verdict(Summary(2, 3, 10, 2.4, solo, True, 1.0, 0.5, 1.0)) == sentence


def test_figures_say_when_hashes_differ():
    values = dict(figures(Summary(2, 3, 10, 2.4, None, False, None, None, 1.0)))
    assert values["state hashes"] == "NOT equal in every round"
    stopped = dict(figures(Summary(2, 0, 10, None, None, False, None, None, 1.0)))
    assert stopped["state hashes"] == "not compared, as no round has ended"
    assert values["sent per parameter and round"] == "not measured"
    assert "held-out loss of one node alone" not in values  # nobody asked for it


def test_an_unwritable_folder_is_an_oserror(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        write_report(tmp_path / "file" / "report", _results())
