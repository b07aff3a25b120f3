"""What a local swarm reached: the figures of its summary, and the report in two files, `index.html` and `loss.png`.

The figures are arithmetic over `RoundReport`s, one for each round that one node ended. `index.html` holds the same
picture and refers to nothing outside itself, so it can be mailed or archived. matplotlib is imported when a picture is
drawn; without it the report has the figures only.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from swarmnode.cli.local.swarm import NodeProcess, RoundReport
from swarmnode.training.runspec import BYTES_UNIT


@dataclass(frozen=True)
class Summary:
    """The last line of `swarmnode local --json`, field by field."""

    nodes: int
    rounds: int  # rounds that at least one node ended
    parameters: int
    heldout_bits_per_byte: float | None
    solo_bits_per_byte: float | None
    hashes_agree: bool | None  # in each round that anybody ended; None where each node has a policy of its own
    bytes_per_parameter_round: float | None  # sent at the sockets, all traffic; mean over nodes
    compute_share: float | None  # 0 to 1; mean over the nodes that ended the last round
    seconds: float  # from the start of the first process to the end of the last, the solo run included
    reward: float | None = None  # on fresh questions, 0 to 1; mean over nodes; of a run by rollouts
    solo_reward: float | None = None
    loss_unit: str = BYTES_UNIT  # of both losses, whatever they are called

    def event(self) -> dict[str, Any]:
        """The JSON object; rewards are in those of runs by rollouts only."""
        told = {"event": "summary", **dataclasses.asdict(self)}
        if self.hashes_agree is not None:
            del told["reward"], told["solo_reward"]
        return told

    @property
    def gain(self) -> float | None:
        """Bits per byte by which the swarm is better than the node alone; negative when it is worse."""
        if self.heldout_bits_per_byte is None or self.solo_bits_per_byte is None:
            return None
        return self.solo_bits_per_byte - self.heldout_bits_per_byte


def summarize(
    reports: Sequence[Sequence[RoundReport]],
    *,
    parameters: int,
    heldout: float | None,
    solo: float | None,
    seconds: float,
    by_rollouts: bool = False,
    loss_unit: str = BYTES_UNIT,
) -> Summary:
    """The figures of one swarm; `reports` holds each node's rounds in the order in which they ended.

    `heldout` and `solo` are losses, or rewards in a run `by_rollouts`.
    """
    hashes = hashes_by_round(reports).values()
    last = max((report.round for node in reports for report in node), default=None)
    finishers = [node for node in reports if node and node[-1].round == last]
    return Summary(
        nodes=len(reports),
        rounds=len({report.round for node in reports for report in node}),
        parameters=parameters,
        heldout_bits_per_byte=None if by_rollouts else heldout,
        solo_bits_per_byte=None if by_rollouts else solo,
        hashes_agree=None if by_rollouts else bool(hashes) and all(len(said) == 1 for said in hashes),
        bytes_per_parameter_round=_mean(_bytes_per_parameter_round(node, parameters) for node in reports if node),
        compute_share=_mean(_compute_share(node) for node in finishers),
        seconds=round(seconds, 3),
        reward=heldout if by_rollouts else None,
        solo_reward=solo if by_rollouts else None,
        loss_unit=loss_unit,
    )


def hashes_by_round(reports: Sequence[Sequence[RoundReport]]) -> dict[int, set[str]]:
    """The different state hashes reported for each round."""
    found: dict[int, set[str]] = defaultdict(set)
    for node in reports:
        for report in node:
            if report.state_hash is not None:
                found[report.round].add(report.state_hash)
    return dict(found)


def curve(reports: Sequence[Sequence[RoundReport]]) -> tuple[tuple[int, float], ...]:
    """(round, measured), mean over the nodes that measured: held-out bits per byte, which are equal where parameters
    are; or the reward of own answers, in a run by rollouts, where each has a policy of its own.
    """
    measured: defaultdict[int, list[float]] = defaultdict(list)
    for node in reports:
        for report in node:
            if report.measured is not None:
                measured[report.round].append(report.measured)
    return tuple((number, fmean(measured[number])) for number in sorted(measured))


def by_rollouts(reports: Sequence[Sequence[RoundReport]]) -> bool:
    """Whether these are rounds of a run by rollouts."""
    return any(report.reward is not None for node in reports for report in node)


def _bytes_per_parameter_round(node: Sequence[RoundReport], parameters: int) -> float | None:
    return sum(report.bytes_out for report in node) / (parameters * len(node)) if parameters else None


def _compute_share(node: Sequence[RoundReport]) -> float | None:
    """Share of the time from the start of the node's first round to the end of its last spent in inner steps."""
    wall = node[-1].ended_at - (node[0].ended_at - node[0].seconds)
    return sum(report.compute_seconds for report in node) / wall if wall > 0 else None


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def strict_json(value: Any) -> Any:
    """`value` with null in place of NaN and infinities, which strict JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    return value


# -- the report


@dataclass(frozen=True)
class Results:
    """All that a report shows. `solo` are the rounds of the node alone, empty when there was none."""

    run: str  # name of the run
    run_id: str
    summary: Summary
    nodes: Sequence[NodeProcess]
    solo: Sequence[RoundReport] = ()
    notes: Sequence[str] = ()


def write_report(folder: Path, results: Results) -> bool:
    """Write the report into `folder`, which is made when missing; whether it has a picture. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    picture: Path | None = folder / "loss.png"
    try:
        draw_losses(folder / "loss.png", results)
    except ImportError:
        picture = None
    (folder / "index.html").write_text(_page(results, picture), encoding="utf-8")
    return picture is not None


def draw_losses(file: Path, results: Results) -> None:
    """The loss curves, or reward curves, as a PNG. Raises ImportError without matplotlib."""
    # Figure without pyplot: no window system is looked for, and nothing global is changed.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    reports = [node.reports for node in results.nodes]
    rewarded = by_rollouts(reports)
    curves = [(f"swarm of {results.summary.nodes}", curve(reports), "C0")]
    if results.solo:
        curves.append(("one node alone", curve([results.solo]), "C1"))
    if rewarded:
        curves = [(label, _smooth(points), colour) for label, points, colour in curves]
        for node in reports:
            points = _smooth(curve([node]))
            axes.plot([x for x, _ in points], [y for _, y in points], color="C0", alpha=0.25, linewidth=0.8)
    for label, points, colour in curves:
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, color=colour, marker=".", markersize=4)
    axes.set_xlabel("round")
    loss = f"held-out loss ({results.summary.loss_unit})"
    axes.set_ylabel("reward of own answers (mean of ten rounds)" if rewarded else loss)
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
    measured = "reward" if rewarded else "loss"
    drawn = "<p>No picture: matplotlib is not installed.</p>"
    if picture is not None:
        encoded = base64.b64encode(picture.read_bytes()).decode("ascii")
        what = "Reward" if rewarded else "Held-out loss"
        drawn = f'<img alt="{what} over rounds" src="data:image/png;base64,{encoded}">'
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in results.notes)
    return _TEMPLATE.format(
        title=html.escape(f"Local swarm: {results.run}"),
        verdict=html.escape(verdict(results.summary)),
        picture=drawn,
        summary=_table(("figure", "value"), figures(results.summary)),
        nodes=_table(
            ("node", "peer id", "at the end", "rounds", measured, "state hash", "received", "sent"),
            [_node_cells(node) for node in results.nodes],
        ),
        rounds=_table(
            ("round", "nodes", measured, "slowest", "outcomes", "state hash"),
            _round_cells([node.reports for node in results.nodes]),
        ),
        run_id=html.escape(results.run_id),
        notes=f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
    )


def verdict(summary: Summary) -> str:
    """One sentence: what the swarm reached, and against what."""
    if summary.reward is not None:
        reached = f"{summary.nodes} nodes earn {summary.reward:.3f} on fresh questions after {summary.rounds} rounds"
        alone = "" if summary.solo_reward is None else f", one node alone {summary.solo_reward:.3f}"
        return f"{reached}{alone}."
    if summary.heldout_bits_per_byte is None:
        return f"{summary.nodes} nodes trained {summary.rounds} rounds; no held-out loss was measured."
    held = "text" if summary.loss_unit == BYTES_UNIT else "samples"
    reached = (
        f"{summary.nodes} nodes reached {summary.heldout_bits_per_byte:.3f} {summary.loss_unit} on held-out {held}"
    )
    if summary.gain is None or summary.solo_bits_per_byte is None:
        return f"{reached} in {summary.rounds} rounds."
    better = "below" if summary.gain >= 0 else "above"
    return f"{reached}, {abs(summary.gain):.3f} {better} the {summary.solo_bits_per_byte:.3f} of one node alone."


def figures(summary: Summary) -> list[tuple[str, str]]:
    """The summary as names and values for people."""

    def number(value: float | None, form: str, unit: str = "") -> str:
        return "not measured" if value is None else f"{value:{form}}{unit}"

    common = [
        ("share of time spent computing", number(summary.compute_share, ".0%")),
        ("parameters", f"{summary.parameters:,}"),
        ("nodes", str(summary.nodes)),
        ("rounds", str(summary.rounds)),
        ("time", f"{summary.seconds:.0f} s"),
    ]
    if summary.hashes_agree is None:
        return [
            ("reward of the swarm", number(summary.reward, ".3f", " on fresh questions, mean of the nodes")),
            *([("reward of one node alone", f"{summary.solo_reward:.3f}")] if summary.solo_reward is not None else []),
            *common,
        ]
    unit = f" {summary.loss_unit}"
    alone = [
        ("held-out loss of one node alone", number(summary.solo_bits_per_byte, ".4f", unit)),
        ("the swarm is better by", number(summary.gain, "+.4f", unit)),
    ]
    return [
        ("held-out loss of the swarm", number(summary.heldout_bits_per_byte, ".4f", unit)),
        *(alone if summary.solo_bits_per_byte is not None else []),
        ("state hashes", "equal in every round" if summary.hashes_agree else "NOT equal in every round"),
        ("sent per parameter and round", number(summary.bytes_per_parameter_round, ".2f", " bytes")),
        *common,
    ]


def _node_cells(node: NodeProcess) -> tuple[str, ...]:
    last = node.last
    return (
        node.label,
        node.peer_id,
        node.state,
        str(len(node.reports)),
        "–" if last is None or last.measured is None else f"{last.measured:.4f}",
        "–" if last is None or last.state_hash is None else last.state_hash[:16],
        f"{sum(report.bytes_in for report in node.reports) / 1e6:.2f} MB",
        f"{sum(report.bytes_out for report in node.reports) / 1e6:.2f} MB",
    )


def _round_cells(reports: Sequence[Sequence[RoundReport]]) -> list[tuple[str, ...]]:
    hashes = {} if by_rollouts(reports) else hashes_by_round(reports)
    losses = dict(curve(reports))
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
