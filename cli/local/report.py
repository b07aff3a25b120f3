"""The report of a local swarm: `loss.png`, and `index.html` with the same picture and the figures in one file.

`index.html` refers to nothing outside itself, so it can be mailed or archived. matplotlib is imported when a picture is
drawn; without it the report has the figures only.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from swarmnode.cli.local.summary import RoundReport, Summary, by_rollouts, hashes_by_round, loss_curve, reward_curve


@dataclass(frozen=True)
class NodeFacts:
    """One node as the report lists it."""

    label: str
    peer_id: str
    state: str  # at the end of the run
    reports: tuple[RoundReport, ...]


@dataclass(frozen=True)
class Results:
    """All that a report shows. `solo` are the rounds of the node alone, empty when there was none."""

    run: str  # name of the run
    run_id: str
    summary: Summary
    nodes: tuple[NodeFacts, ...]
    solo: tuple[RoundReport, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportFiles:
    """Where the report is. `picture` is None when matplotlib is not installed."""

    page: Path
    picture: Path | None


def write_report(folder: Path, results: Results) -> ReportFiles:
    """Write the report into `folder`, which is made when missing. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    picture: Path | None = folder / "loss.png"
    try:
        draw_losses(folder / "loss.png", results)
    except ImportError:
        picture = None
    page = folder / "index.html"
    page.write_text(_page(results, picture), encoding="utf-8")
    return ReportFiles(page, picture)


def draw_losses(file: Path, results: Results) -> None:
    """The loss curves, or reward curves, as a PNG. Raises ImportError without matplotlib."""
    # Figure without pyplot: no window system is looked for, and nothing global is changed.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    reports = [node.reports for node in results.nodes]
    rewarded = by_rollouts(reports)
    curve = reward_curve if rewarded else loss_curve
    curves = [(f"swarm of {results.summary.nodes}", curve(reports), "C0")]
    if results.solo:
        curves.append(("one node alone", curve([results.solo]), "C1"))
    if rewarded:
        curves = [(label, _smooth(points), colour) for label, points, colour in curves]
        for node in reports:
            points = _smooth(reward_curve([node]))
            axes.plot([x for x, _ in points], [y for _, y in points], color="C0", alpha=0.25, linewidth=0.8)
    for label, points, colour in curves:
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, color=colour, marker=".", markersize=4)
    axes.set_xlabel("round")
    axes.set_ylabel("reward of own answers (mean of ten rounds)" if rewarded else "held-out loss (bits per byte)")
    axes.set_title(results.run)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file)


def _smooth(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Each value as the mean of it and the nine before."""
    return tuple((x, fmean(y for _, y in points[max(0, i - 9) : i + 1])) for i, (x, _) in enumerate(points))


def _page(results: Results, picture: Path | None) -> str:
    rewarded = results.summary.hashes_agree is None
    drawn = "<p>No picture: matplotlib is not installed.</p>"
    if picture is not None:
        encoded = base64.b64encode(picture.read_bytes()).decode("ascii")
        drawn = (
            f'<img alt="{"Reward" if rewarded else "Held-out loss"} over rounds" src="data:image/png;base64,{encoded}">'
        )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in results.notes)
    return _TEMPLATE.format(
        title=html.escape(f"Local swarm: {results.run}"),
        verdict=html.escape(verdict(results.summary)),
        picture=drawn,
        summary=_table(("figure", "value"), figures(results.summary)),
        nodes=_table(
            ("node", "peer id", "at the end", "rounds", _measured(rewarded), "state hash", "received", "sent"),
            [_node_cells(node) for node in results.nodes],
        ),
        rounds=_table(
            ("round", "nodes", _measured(rewarded), "slowest", "outcomes", "state hash"),
            _round_cells([node.reports for node in results.nodes]),
        ),
        run_id=html.escape(results.run_id),
        notes=f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
    )


def _measured(rewarded: bool) -> str:
    return "reward" if rewarded else "loss"


def verdict(summary: Summary) -> str:
    """One sentence: what the swarm reached, and against what."""
    if summary.reward is not None:
        reached = f"{summary.nodes} nodes earn {summary.reward:.3f} on fresh questions after {summary.rounds} rounds"
        alone = "" if summary.solo_reward is None else f", one node alone {summary.solo_reward:.3f}"
        return f"{reached}{alone}."
    if summary.heldout_bits_per_byte is None:
        return f"{summary.nodes} nodes trained {summary.rounds} rounds; no held-out loss was measured."
    reached = f"{summary.nodes} nodes reached {summary.heldout_bits_per_byte:.3f} bits per byte on held-out text"
    if summary.gain is None or summary.solo_bits_per_byte is None:
        return f"{reached} in {summary.rounds} rounds."
    better = "below" if summary.gain >= 0 else "above"
    return f"{reached}, {abs(summary.gain):.3f} {better} the {summary.solo_bits_per_byte:.3f} of one node alone."


def figures(summary: Summary) -> list[tuple[str, str]]:
    """The summary as names and values for people."""

    def number(value: float | None, form: str, unit: str = "") -> str:
        return "not measured" if value is None else f"{value:{form}}{unit}"

    if summary.hashes_agree is None:
        return [
            ("reward of the swarm", number(summary.reward, ".3f", " on fresh questions, mean of the nodes")),
            *([("reward of one node alone", f"{summary.solo_reward:.3f}")] if summary.solo_reward is not None else []),
            *_common(summary),
        ]
    alone = [
        ("held-out loss of one node alone", number(summary.solo_bits_per_byte, ".4f", " bits per byte")),
        ("the swarm is better by", number(summary.gain, "+.4f", " bits per byte")),
    ]
    return [
        ("held-out loss of the swarm", number(summary.heldout_bits_per_byte, ".4f", " bits per byte")),
        *(alone if summary.solo_bits_per_byte is not None else []),
        ("state hashes", "equal in every round" if summary.hashes_agree else "NOT equal in every round"),
        ("sent per parameter and round", number(summary.bytes_per_parameter_round, ".2f", " bytes")),
        *_common(summary),
    ]


def _common(summary: Summary) -> list[tuple[str, str]]:
    share = summary.compute_share
    return [
        ("share of time spent computing", "not measured" if share is None else f"{share:.0%}"),
        ("parameters", f"{summary.parameters:,}"),
        ("nodes", str(summary.nodes)),
        ("rounds", str(summary.rounds)),
        ("time", f"{summary.seconds:.0f} s"),
    ]


def _node_cells(node: NodeFacts) -> tuple[str, ...]:
    last = node.reports[-1] if node.reports else None
    measured = None if last is None else last.loss if last.reward is None else last.reward
    return (
        node.label,
        node.peer_id,
        node.state,
        str(len(node.reports)),
        "–" if measured is None else f"{measured:.4f}",
        "–" if last is None or last.state_hash is None else last.state_hash[:16],
        f"{sum(report.bytes_in for report in node.reports) / 1e6:.2f} MB",
        f"{sum(report.bytes_out for report in node.reports) / 1e6:.2f} MB",
    )


def _round_cells(reports: Sequence[Sequence[RoundReport]]) -> list[tuple[str, ...]]:
    rewarded = by_rollouts(reports)
    hashes = {} if rewarded else hashes_by_round(reports)
    losses = dict(reward_curve(reports) if rewarded else loss_curve(reports))
    rows: list[tuple[str, ...]] = []
    for number in sorted({report.round for node in reports for report in node}):
        ended = [report for node in reports for report in node if report.round == number]
        outcomes = sorted({report.outcome for report in ended})
        rows.append(
            (
                str(number),
                str(len(ended)),
                f"{losses[number]:.4f}" if number in losses else "–",
                f"{max(report.seconds for report in ended):.1f} s",
                ", ".join(f"{sum(r.outcome == outcome for r in ended)} {outcome}" for outcome in outcomes),
                " ≠ ".join(sorted(state_hash[:16] for state_hash in hashes.get(number, ()))) or "–",
            )
        )
    return rows


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
img {{ max-width: 100%; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: 0.25rem 1rem 0.25rem 0; border-bottom: 1px solid #ddd; white-space: nowrap; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p><strong>{verdict}</strong></p>
{picture}
<h2>Summary</h2>
{summary}
<h2>Nodes</h2>
{nodes}
<h2>Rounds</h2>
<details><summary>Every round: how many nodes ended it, and with which state</summary>
{rounds}
</details>
{notes}
<p><small>Run {run_id}</small></p>
</body>
</html>
"""
