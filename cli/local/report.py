"""What a local swarm reached: the figures of its summary, and the report, one file `index.html`.

The figures are arithmetic over `RoundReport`s, one for each round that one node ended. The report is the dashboard's
page with all that it shows inside. It refers to nothing outside itself, so it can be mailed or archived.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import platform
import re
import time
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from swarmnode import __version__
from swarmnode.cli.local.swarm import NodeProcess, RoundReport
from swarmnode.node.logs import strict_json
from swarmnode.training.runspec import BYTES_UNIT, RunSpec, to_toml

PAGE = resources.files("swarmnode.node.dashboard") / "page"
MODULES = ("text", "feed", "charts", "app")  # of the page, each after those that it imports


@dataclass(frozen=True)
class Summary:
    """The last line of `swarmnode local --json`, field by field."""

    nodes: int
    rounds: int  # rounds that at least one node ended
    parameters: int
    heldout_bits_per_byte: float | None
    solo_bits_per_byte: float | None
    hashes_agree: bool | None  # in each round that anybody ended; None where each node has parameters of its own
    bytes_per_parameter_round: float | None  # sent at the sockets, all traffic; mean over nodes
    compute_share: float | None  # 0 to 1; mean over the nodes that ended the last round
    seconds: float  # from the start of the first process to the end of the last, the solo run included
    reward: float | None = None  # on fresh questions, 0 to 1; mean over nodes; of a run by rollouts
    solo_reward: float | None = None
    loss_unit: str = BYTES_UNIT  # of both losses, whatever they are called
    apart: float | None = None  # how far nodes with parameters of their own were apart in the end, by their norm
    in_the_end: bool = False  # `hashes_agree` is of the last round: in those before records were under way

    def event(self) -> dict[str, Any]:
        """The JSON object; rewards are in those of runs by rollouts only, `apart` in those in pairs,
        `in_the_end` in those by seeds."""
        unsaid = {"apart": self.apart is None, "in_the_end": not self.in_the_end}
        fields = dataclasses.asdict(self).items()
        told = {"event": "summary", **{key: value for key, value in fields if not unsaid.get(key)}}
        if self.hashes_agree is not None or self.apart is not None:
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
    spec: RunSpec,
    *,
    parameters: int,
    heldout: float | None,
    solo: float | None,
    seconds: float,
) -> Summary:
    """The figures of one swarm; `reports` holds each node's rounds in the order in which they ended.

    `heldout` and `solo` are losses, or rewards in a run by rollouts.
    """
    rewarded, in_the_end = not spec.needs_data, spec.exchange.method == "seed"
    hashes = hashes_by_round(reports)
    last = max((report.round for node in reports for report in node), default=None)
    compared = [hashes.get(last, set())] if in_the_end and last is not None else list(hashes.values())
    agree = bool(compared) and all(len(found) == 1 for found in compared)
    finishers = [node for node in reports if node and node[-1].round == last]
    return Summary(
        nodes=len(reports),
        rounds=len({report.round for node in reports for report in node}),
        parameters=parameters,
        heldout_bits_per_byte=None if rewarded else heldout,
        solo_bits_per_byte=None if rewarded else solo,
        hashes_agree=None if rewarded or in_pairs(reports) else agree,
        bytes_per_parameter_round=_mean(
            sum(each.bytes_out for each in node) / (parameters * len(node)) for node in reports if node and parameters
        ),
        compute_share=_mean(_compute_share(node) for node in finishers),
        seconds=round(seconds, 3),
        reward=heldout if rewarded else None,
        solo_reward=solo if rewarded else None,
        loss_unit=spec.loss_unit,
        apart=_mean(node[-1].apart for node in finishers) if in_pairs(reports) else None,
        in_the_end=in_the_end,
    )


def hashes_by_round(reports: Sequence[Sequence[RoundReport]]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = defaultdict(set)
    for node in reports:
        for report in node:
            if report.state_hash is not None:
                found[report.round].add(report.state_hash)
    return dict(found)


def latest(reports: Sequence[Sequence[RoundReport]]) -> float | None:
    """Mean over the nodes that measured in the last round in which any did: held-out bits per byte, which are equal
    where parameters are; or the reward of own answers, in a run by rollouts, where each has a policy of its own.
    """
    measured = [report for node in reports for report in node if report.measured is not None]
    last = max((report.round for report in measured), default=None)
    return _mean(report.measured for report in measured if report.round == last)


def by_rollouts(reports: Sequence[Sequence[RoundReport]]) -> bool:
    return any(report.reward is not None for node in reports for report in node)


def in_pairs(reports: Sequence[Sequence[RoundReport]]) -> bool:
    """Whether nodes of this run meet in pairs, each with parameters of its own: then no two hashes need be equal."""
    return any(report.apart is not None for node in reports for report in node)


def _compute_share(node: Sequence[RoundReport]) -> float | None:
    """Share of the time from the start of the node's first round to the end of its last spent in inner steps."""
    wall = node[-1].ended_at - (node[0].ended_at - node[0].seconds)
    return sum(report.compute_seconds for report in node) / wall if wall > 0 else None


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


# -- the report


@dataclass(frozen=True)
class Results:
    """All that a report shows. `solo` is the node alone, None when there was none."""

    spec: RunSpec
    summary: Summary
    nodes: Sequence[NodeProcess]
    solo: NodeProcess | None = None
    notes: Sequence[str] = ()
    attack: Mapping[str, Any] | None = None  # what came of it, with `words` for people

    def told(self) -> dict[str, Any]:
        """What the page finds inside itself, in the words of the control API where that has them."""
        return {
            "made": time.time(),
            "verdict": verdict(self.summary),
            "figures": figures(self.summary),
            "notes": self.notes,
            "settings": tomllib.loads(to_toml(self.spec)),
            "versions": {
                "swarmnode": __version__,
                "torch": metadata.version("torch"),
                "python": platform.python_version(),
                "machine": f"{platform.platform()}, {os.cpu_count()} cores",
            },
            "nodes": [_told(node) for node in self.nodes],
            "solo": {"rounds": self.solo.rounds} if self.solo is not None and self.solo.rounds else None,
            "attack": self.attack,
        }


def _told(node: NodeProcess) -> dict[str, Any]:
    known = node.told.get("history", {}).get("rounds", ())  # these know why somebody was late
    about = {"name": f"node {node.label}", "peer_id": node.peer_id, "state": node.state}
    return {**node.told, **about, "history": {"rounds": [*node.rounds, *known]}}


def write_report(folder: Path, results: Results) -> Path:
    """Write the report into `folder`, which is made when missing; its page. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "index.html"
    page.write_text(_page(results.told()), encoding="utf-8")
    return page


def _page(told: Mapping[str, Any]) -> str:
    """The dashboard's page with the report, its style and its script inside; the browser lets it load nothing else."""
    style, icon = ((PAGE / name).read_text(encoding="utf-8") for name in ("style.css", "icon.svg"))
    modules = "\n".join((PAGE / f"{name}.js").read_text(encoding="utf-8") for name in MODULES)
    script = re.sub(r"^import .*\n|^export ", "", modules, flags=re.MULTILINE)
    charset = '<meta charset="utf-8">'
    inert = json.dumps(strict_json(told), allow_nan=False).replace("<", "\\u003c")  # ends no element, whoever speaks
    rules = f"default-src 'none'; img-src data:; script-src {_hash(script)}; style-src {_hash(style)}"
    inlined = {
        '<link rel="icon" href="icon.svg">': f'<link rel="icon" href="data:image/svg+xml,{quote(icon)}">',
        '<link rel="stylesheet" href="style.css">': f"<style>{style}</style>",
        '<script src="app.js" type="module"></script>': f'<script type="module">{script}</script>',
        charset: f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{rules}">',
        "</body>": f'<script type="application/json" id="report">{inert}</script>\n</body>',
    }
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    for there, here in inlined.items():
        assert there in page, there
        page = page.replace(there, here)
    return page


def _hash(text: str) -> str:
    """How a policy names the one script or style that it permits."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def verdict(summary: Summary) -> str:
    """One sentence: what the swarm reached, and against what."""
    if summary.reward is not None:
        reached = f"{summary.nodes} nodes earn {summary.reward:.3f} on fresh questions after {summary.rounds} rounds"
        alone = "" if summary.solo_reward is None else f", one node alone {summary.solo_reward:.3f}"
        return f"{reached}{alone}."
    if summary.heldout_bits_per_byte is None:
        return f"{summary.nodes} nodes trained {summary.rounds} rounds; no held-out loss was measured."
    held = "a large held-out text" if summary.loss_unit == BYTES_UNIT else "many held-out samples"
    reached = f"{summary.nodes} nodes reached {summary.heldout_bits_per_byte:.3f} {summary.loss_unit} on {held}"
    if summary.gain is None or summary.solo_bits_per_byte is None:
        return f"{reached} in {summary.rounds} rounds."
    better = "below" if summary.gain >= 0 else "above"
    return f"{reached}, {abs(summary.gain):.3f} {better} the {summary.solo_bits_per_byte:.3f} of one node alone."


def _agreement(summary: Summary) -> str:
    if summary.apart is not None:
        return f"each node has its own, as meant; in the end they were {summary.apart:.2%} apart"
    when = "in the end" if summary.in_the_end else "in every round"
    if not summary.rounds:
        return "not compared, as no round has ended"
    return f"equal {when}" if summary.hashes_agree else f"NOT equal {when}"


def figures(summary: Summary) -> list[tuple[str, str]]:
    def number(value: float | None, form: str, unit: str = "") -> str:
        return "not measured" if value is None else f"{value:{form}}{unit}"

    common = [
        ("share of time spent computing", number(summary.compute_share, ".0%")),
        ("parameters", f"{summary.parameters:,}"),
        ("nodes", str(summary.nodes)),
        ("rounds", str(summary.rounds)),
        ("time", f"{summary.seconds:.0f} s"),
    ]
    if summary.hashes_agree is None and summary.apart is None:
        return [
            ("reward of the swarm", number(summary.reward, ".3f", " on fresh questions, mean of the nodes")),
            *([("reward of one node alone", f"{summary.solo_reward:.3f}")] if summary.solo_reward is not None else []),
            *common,
        ]
    unit, better = f" {summary.loss_unit}", "worse" if (summary.gain or 0.0) < 0 else "better"
    alone = [
        ("held-out loss of one node alone", number(summary.solo_bits_per_byte, ".4f", unit)),
        (f"the swarm is {better} by", number(summary.gain and abs(summary.gain), ".4f", unit)),
    ]
    return [
        ("held-out loss of the swarm", number(summary.heldout_bits_per_byte, ".4f", unit)),
        *(alone if summary.solo_bits_per_byte is not None else []),
        ("state hashes", _agreement(summary)),
        ("sent per parameter and round", number(summary.bytes_per_parameter_round, ".2f", " bytes")),
        *common,
    ]
