"""The tables and plots of `bench/sapo.py`, written into docs/results.md between markers, and as SVG beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from learned.report import markdown, put

from sapo_swarm.specialists import ASKED
from sapo_swarm.swarm import NODES, UNEQUAL

Line = dict[str, Any]  # of results.jsonl

BASELINE = "8/0"
OVERSAMPLED = "8/0 oversampled"
NETWORKS = {"simnet": "simulated", "processes": "daemons"}
COLOURS = {
    "8/0": "black",
    "6/2": "tab:green",
    "4/4": "tab:blue",
    "2/6": "tab:red",
    "adaptive": "tab:orange",
    "4/4 unfiltered": "tab:purple",
    "8/0 oversampled": "grey",
    "4/4 tapered": "tab:cyan",
    "6/2 tapered": "tab:olive",
    "2/6 tapered": "tab:pink",
    "adaptive tapered": "tab:brown",
    "adaptive choosing": "magenta",
    "4/4 decoupled": "navy",
    "adaptive decoupled": "gold",
}


def write_report(docs: Path, lines: Sequence[Line]) -> None:
    """Write the tables of finished runs into docs/results.md, and the plots; what was not run stays as it is."""
    split, unequal = (_only(lines, table) for table in ("split", "unequal"))
    page = docs / "results.md"
    text = page.read_text(encoding="utf-8")
    for name, table in (
        ("sapo-split", split_table(split)),
        ("sapo-unequal", unequal_table(unequal)),
        ("sapo-gym", gym_table(_only(lines, "gym"))),
        ("sapo-gym-daemons", gym_table(_only(lines, "gym-processes"), _only(lines, "gym"))),
        ("sapo-specialists", specialists_table(_only(lines, "specialists"))),
        ("sapo-networks", networks_table([line for line in lines if line["table"] in NETWORKS])),
    ):
        text = put(text, name, table) if table else text
    page.write_text(text, encoding="utf-8")
    if split:
        draw_split(docs / "sapo-split.svg", split)


def split_table(lines: Sequence[Line]) -> str:
    """Cumulative reward by arm, and against training alone with the same seed."""
    alone = {line["seed"]: line["reward"] for line in lines if line["arm"]["name"] == BASELINE}
    rows = []
    for name, seeds in _by(lines, lambda line: line["arm"]["name"]).items():
        ratios = [
            100 * (line["reward"] / of_alone - 1) for line in seeds if (of_alone := alone.get(line["seed"], 0.0)) > 0
        ]
        rows.append(
            (
                name,
                _spread([line["reward"] for line in seeds], "{:.0f}"),
                _spread(ratios, "{:+.0f}", " %") if name != BASELINE else "",
                _spread([100 * line["heldout"] for line in seeds], "{:.1f}", " %"),
                f"{mean(line['informative'] + line['taken'] for line in seeds):.1f}",
                f"{mean(line['external'] for line in seeds):.1f}",
                f"{mean(line['curve'][-1][2] for line in seeds) / 1000:.0f} k",
                str(len(seeds)),
            )
        )
    head = (
        "own/external",
        "reward",
        f"against {BASELINE}",
        "right at the end",
        "informative groups",
        "J",
        "tokens",
        "seeds",
    )
    return markdown(head, rows) if rows else ""


def gym_table(lines: Sequence[Line], oversampled: Sequence[Line] = ()) -> str:
    """Reward by seed on reasoning-gym; against training alone and against oversampling, the worst seed.

    `oversampled`: lines among which that arm is, where it is not in `lines`.
    """
    against = {BASELINE: lines, OVERSAMPLED: oversampled or lines}
    of = {arm: {line["seed"]: line for line in _only_arm(found, arm)} for arm, found in against.items()}
    rows = []
    for name, seeds in _by(lines, lambda line: line["arm"]["name"]).items():
        worst = {
            arm: min(
                (line["reward"] / each[line["seed"]]["reward"] for line in seeds if line["seed"] in each), default=0
            )
            for arm, each in of.items()
        }
        tokens = [line["curve"][-1][2] for line in seeds]
        rows.append(
            (
                name,
                ", ".join(f"{line['reward']:.0f}" for line in seeds),
                f"{worst[BASELINE]:.2f} ×",
                f"{worst[OVERSAMPLED]:.2f} ×",
                f"{100 * min(line['heldout'] for line in seeds):.1f} %",
                f"{mean(line['informative'] for line in seeds):.1f} + {mean(line['taken'] for line in seeds):.1f}",
                f"{mean(tokens) / 1000:.1f} k",
                _by_task(seeds),
            )
        )
    head = (
        "own/external",
        "reward by seed",
        f"against {BASELINE}, worst",
        f"against {OVERSAMPLED}, worst",
        "right at the end, worst",
        "own groups that teach + others'",
        "tokens",
        "right by task, in the first and the last fifth of the rounds",
    )
    return markdown(head, rows) if rows else ""


def _by_task(seeds: Sequence[Line]) -> str:
    """Mean over seeds of the reward in the beginning and at the end, by task."""
    told = []
    for task in seeds[0]["by_task"]:
        first, last = (100 * mean(line["by_task"][task][at] for line in seeds) for at in (0, 1))
        told.append(f"{task.rpartition('/')[2]} {first:.0f} → {last:.0f} %")
    return ", ".join(told)


def specialists_table(lines: Sequence[Line]) -> str:
    """How often the generalist is right by task, in the beginning and at the end, by seed."""
    rows = []
    for name, seeds in _by(lines, lambda line: line["arm"]["name"]).items():
        if not rows:
            rows.append(("in the beginning", *_right_of(seeds, "beginning")))
        rows.append((name, *_right_of(seeds, "right")))
    return markdown(("", *(f"`{task.partition('/')[2]}`" for task in ASKED.values())), rows) if rows else ""


def _right_of(seeds: Sequence[Line], when: str) -> list[str]:
    return [", ".join(f"{100 * line[when][task]:.0f}" for line in seeds) + " %" for task in ASKED.values()]


def networks_table(lines: Sequence[Line]) -> str:
    """The split over the product's protocol: by network and number of rounds, with what it cost where that was seen."""
    rows = []
    for (table, rounds), of_network in _by(lines, lambda line: (line["table"], line["arm"]["rounds"])).items():
        alone = {line["seed"]: line["reward"] for line in of_network if line["arm"]["name"] == BASELINE}
        for name, seeds in _by(of_network, lambda line: line["arm"]["name"]).items():
            ratios = [100 * (line["reward"] / alone[line["seed"]] - 1) for line in seeds if alone.get(line["seed"])]
            costs = [line for line in seeds if "sharing_share" in line]
            rows.append(
                (
                    NETWORKS[table],
                    str(rounds),
                    name,
                    _spread([line["reward"] for line in seeds], "{:.0f}"),
                    _spread(ratios, "{:+.0f}", " %") if name != BASELINE else "",
                    f"{mean(line['informative'] + line['taken'] for line in seeds):.1f}",
                    f"{mean(line['curve'][-1][2] for line in seeds) / 1000:.0f} k",
                    _spread([100 * line["sharing_share"] for line in costs], "{:.2f}", " %"),
                    str(len(seeds)),
                )
            )
    head = (
        "nodes",
        "rounds",
        "own/external",
        "reward",
        f"against {BASELINE}",
        "informative groups",
        "tokens",
        "sharing, of the time",
        "seeds",
    )
    return markdown(head, rows) if rows else ""


def unequal_table(lines: Sequence[Line]) -> str:
    """Reward of each kind of policy, alone and together, summed over its two nodes."""
    alone: dict[tuple[int, str], float] = {}
    for line in lines:
        if line["arm"]["name"] == BASELINE:
            alone |= {(line["seed"], kind): reward for kind, reward in _kinds(line).items()}
    rows = []
    for name, seeds in _by(lines, lambda line: line["arm"]["name"]).items():
        cells = []
        for kind in UNEQUAL:
            rewards = [_kinds(line)[kind] for line in seeds]
            gains = [
                100 * (_kinds(line)[kind] / of_alone - 1)
                for line in seeds
                if (of_alone := alone.get((line["seed"], kind), 0.0)) > 0
            ]
            gain = f" ({_spread(gains, '{:+.0f}', ' %')})" if name != BASELINE and gains else ""
            cells.append(_spread(rewards, "{:.1f}") + gain)
        rows.append((name, *cells, str(len(seeds))))
    return markdown(("own/external", *UNEQUAL, "seeds"), rows) if rows else ""


def draw_split(file: Path, lines: Sequence[Line]) -> None:
    """Reward of fresh answers against rounds and against generated tokens, mean and range of seeds."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "sapo"}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        by_round, by_token = figure.subplots(1, 2)
        for name, seeds in _by(lines, lambda line: line["arm"]["name"]).items():
            rounds = [point[0] for point in seeds[0]["curve"]]
            rewards = [[point[1] for point in line["curve"]] for line in seeds]
            tokens = [mean(line["curve"][at][2] for line in seeds) for at in range(len(rounds))]
            middle = [mean(of_point) for of_point in zip(*rewards, strict=True)]
            for axes, places in ((by_round, rounds), (by_token, tokens)):
                axes.plot(places, middle, color=COLOURS.get(name), label=name)
                if len(seeds) > 1:
                    low, high = ([f(of_point) for of_point in zip(*rewards, strict=True)] for f in (min, max))
                    axes.fill_between(places, low, high, color=COLOURS.get(name), alpha=0.15)
        by_round.set(xlabel="rounds", ylabel="reward of a fresh answer")
        by_token.set(xlabel="tokens generated by a node", xscale="log")
        for axes in (by_round, by_token):
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
        figure.savefig(file, metadata={"Date": None})


def _kinds(line: Line) -> dict[str, float]:
    """Reward by kind of policy; nodes stand in the order of kinds, equally many of each."""
    each = NODES // len(UNEQUAL)
    return {kind: sum(line["per_node"][each * at : each * (at + 1)]) for at, kind in enumerate(UNEQUAL)}


def _by(lines: Iterable[Line], key: Callable[[Line], Any]) -> dict[Any, list[Line]]:
    """Lines of one key together, in the order in which keys first come."""
    found: dict[Any, list[Line]] = defaultdict(list)
    for line in lines:
        found[key(line)].append(line)
    return found


def _only_arm(lines: Iterable[Line], name: str) -> list[Line]:
    return [line for line in lines if line["arm"]["name"] == name]


def _only(lines: Iterable[Line], table: str) -> list[Line]:
    return [line for line in lines if line["table"] == table]


def _spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """Mean ± sample standard deviation of `values`."""
    if not values:
        return ""
    deviation = f" ± {form.replace('+', '').format(stdev(values))}" if len(values) > 1 else ""
    return form.format(mean(values)) + deviation + unit
