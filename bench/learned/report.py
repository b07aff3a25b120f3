"""The tables and plot of `bench/learning.py`, written into docs/results.md between markers, and as SVG beside it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from learned.methods import Arm

Line = dict[str, Any]  # of results.jsonl

STEP_SECONDS = 0.1  # that a step is said to take in the wall clock of `menu`
LINKS = (100, 20)  # Mbit/s that a node sends at, there


def write_report(docs: Path, done: Mapping[str, Sequence[Line]]) -> None:
    """Write the tables of finished runs, by part, into docs/results.md, and the plot; what was not run stays there."""
    page = docs / "results.md"
    text = page.read_text(encoding="utf-8")
    baseline = {line["seed"]: line for line in done["methods"] if _is(line, "synchronous", "muon")}
    for name, table in (
        ("methods", methods_table(done["methods"])),
        ("seeds", seeds_table(done["methods"])),
        ("curves", curves_table(done["curves"])),
        ("daemons", daemons_table(done["daemons"], [*done["methods"]])),
        ("rates", rates_table(done["rates"])),
        ("menu", menu_table(done["menu"])),
        ("checkpoint", menu_table(done["checkpoint"])),
    ):
        if table:
            text = put(text, name, table)
    page.write_text(text, encoding="utf-8")
    if baseline and done["curves"]:
        draw(docs / "learning.svg", done["curves"])
    if done["menu"]:
        draw_menu(docs / "menu.svg", done["menu"], done["checkpoint"])


def put(text: str, name: str, table: str) -> str:
    """`text` with `table` between the markers called `name`. Raises ValueError where there are none."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"results.md has no {begin.strip()} … {end} to write the table between")
    return re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{table}\n\n{end}", text, flags=re.S)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def methods_table(lines: Sequence[Line]) -> str:
    """Each method beside the synchronous runs, and open beside diloco, of the same seeds: the mean, and the worst."""
    adamw, muon, diloco = (
        {line["seed"]: line for line in lines if _is(line, *which)}
        for which in (("synchronous", "adamw"), ("synchronous", "muon"), ("diloco", "muon"))
    )
    rows = []
    for seeds in _by_arm(lines):
        method, sync = seeds[0]["arm"]["method"], seeds[0]["arm"]["method"] == "synchronous"
        rows.append(
            (
                method,
                described(seeds[0]["arm"]),
                _worst([line["loss"] for line in seeds], "{:.4f}"),
                _worst(_above(seeds, adamw), "{:+.1f} %"),
                _worst(_above(seeds, muon), "{:+.1f} %"),
                _worst(_above(seeds, diloco), "{:+.1f} %") if method == "open" else "",
                _worst([100 * line["words"] for line in seeds], "{:.1f} %", least=True),
                "" if sync else f"{seeds[0]['rounds']}",
                "" if sync else _worst(_fewer(seeds, muon), "{:.0f} ×", least=True),
                f"{100 * mean(line['accepted'] for line in seeds):.0f} %" if method == "open" else "",
            )
        )
    head = (
        "method",
        "settings",
        "held-out loss",
        "above AdamW",
        "above Muon",
        "above diloco",
        "next word",
        "rounds",
        "fewer bytes",
        "accepted",
    )
    return markdown(head, rows) if rows else ""


def seeds_table(lines: Sequence[Line]) -> str:
    """The losses behind the means."""
    seeds = sorted({line["seed"] for line in lines})
    rows = []
    for found in _by_arm(lines):
        by_seed = {line["seed"]: f"{line['loss']:.4f}, {100 * line['words']:.1f} %" for line in found}
        arm = found[0]["arm"]
        name = f"synchronous {arm['optimizer']}" if arm["method"] == "synchronous" else arm["method"]
        rows.append((name, *(by_seed.get(seed, "") for seed in seeds)))
    return markdown(("method", *(f"seed {seed}" for seed in seeds)), rows) if seeds else ""


def curves_table(lines: Sequence[Line]) -> str:
    """Held-out loss over steps, and in brackets how far above the synchronous run of the same batch."""
    rows, steps = [], _steps(lines)
    for batch, of_batch in _by_batch(lines).items():
        baseline = next((line for line in of_batch if line["arm"]["method"] == "synchronous"), None)
        for line in of_batch:
            at = []
            for step in steps:
                loss = _at(line, step)
                above = "" if baseline in (None, line) else f" ({100 * (loss / _at(baseline, step) - 1):+.1f} %)"
                at.append(f"{loss:.3f}{above}")
            fewer = f"{_ratio(line, baseline):.0f} ×" if baseline is not None and line is not baseline else ""
            words = f"{100 * line['words']:.1f} %"
            rows.append((str(batch), interval_of(line["arm"]), *at, words, fewer))
    return markdown(("batch", "H", *(f"{step} steps" for step in steps), "words", "fewer bytes"), rows) if rows else ""


def daemons_table(lines: Sequence[Line], simulated: Sequence[Line]) -> str:
    """Real nodes beside the same run in one process."""
    rows = []
    for line in lines:
        same = (one for one in simulated if (one["seed"], one["arm"]) == (line["seed"], line["arm"]))
        beside = next(same, None)
        rows.append(
            (
                line["arm"]["method"],
                str(line["seed"]),
                f"{line['loss']:.4f}",
                f"{beside['loss']:.4f}" if beside else "",
                f"{100 * (line['loss'] / beside['loss'] - 1):+.1f} %" if beside else "",
                f"{line['steps']:.0f}",
                str(line["rounds"]),
                f"{line['bytes_per_node'] / 1e6:.0f} MB",
                "yes" if line["hashes_agree"] else "no",
                f"{line['seconds']:.0f} s",
            )
        )
    head = ("method", "seed", "by daemons", "in one process", "apart", "steps", "rounds")
    return markdown((*head, "sent by a node, all traffic", "hashes equal", "took"), rows) if rows else ""


def menu_table(lines: Sequence[Line]) -> str:
    """Each method beside diloco and the synchronous run of the same seeds: the mean, and the worst; what it sends.

    Of runs that go on from a checkpoint, the first row is the checkpoint itself. What is older, on other slices of the
    text, is marked.
    """
    sync, diloco = (  # of several arms by one method, the first
        {line["seed"]: line for line in reversed(lines) if line["arm"]["method"] == which}
        for which in ("synchronous", "diloco")
    )
    rows = []
    if any(line["arm"]["after"] for line in lines):
        found = [{**line, "loss": line["curve"][0][1]} for line in {line["seed"]: line for line in lines}.values()]
        losses = _worst([line["loss"] for line in found], "{:.4f}")
        above = (_worst(_above(found, baseline), "{:+.1f} %") for baseline in (diloco, sync))
        rows.append(("none", "no training", _counted(found), losses, *above, "0 MB", "0 MB", *("0 s" for _ in LINKS)))
    for seeds in _by_arm(lines):
        arm, first = seeds[0]["arm"], seeds[0]
        beside = diloco.get(first["seed"])
        peak = max(bytes for bytes, _, _ in first["wire"])
        share = "" if beside is None or not peak else f" ({peak / max(b for b, _, _ in beside['wire']):.3f})"
        rows.append(
            (
                arm["method"],
                described(arm),
                _counted(seeds),
                _worst([line["loss"] for line in seeds], "{:.4f}"),
                _worst(_above(seeds, diloco), "{:+.1f} %"),
                _worst(_above(seeds, sync), "{:+.1f} %"),
                _size(first["bytes_per_node"]),
                f"{_size(peak)}{share}",
                *(f"{simulated_seconds(first, rate):.0f} s" for rate in LINKS),
            )
        )
    head = ("method", "settings", "seeds", "held-out loss", "above diloco", "above synchronous", "sent by a node")
    return markdown((*head, "in one exchange", *(f"at {rate} Mbit/s" for rate in LINKS)), rows) if rows else ""


def simulated_seconds(line: Line, rate: float) -> float:
    """Wall clock of a run where a step takes STEP_SECONDS and a node sends `rate` Mbit/s, whatever else is sent.

    Of workers that are not equally fast, the slowest takes that long. An exchange takes its bytes over the rate, less
    what is hidden by the steps that are taken meanwhile.
    """
    waited = (times * max(0.0, 8e-6 * bytes / rate - overlap * STEP_SECONDS) for bytes, overlap, times in line["wire"])
    return float(line.get("clock", line["arm"]["steps"]) * STEP_SECONDS + sum(waited))


def rates_table(lines: Sequence[Line]) -> str:
    """Synchronous training at several rates."""
    rows = [
        (described(line["arm"]), f"{line['loss']:.4f}", f"{100 * line['words']:.1f} %")
        for line in lines
    ]  # fmt: skip
    return markdown(("synchronous", "held-out loss", "next word"), rows) if rows else ""


def described(arm: dict[str, Any]) -> str:
    """An arm's settings in words."""
    eps = f", eps {arm['eps']:g}" if arm["eps"] != Arm.eps else ""
    rates = {"adamw": f"AdamW {arm['lr']:g}{eps}", "muon": f"Muon {arm['muon_lr']:g}, AdamW {arm['lr']:g}{eps}"}
    rate = rates.get(arm["optimizer"], f"by signs {arm['lr']:g}")
    if arm["method"] in ("synchronous", "alone"):
        return rate
    if arm["method"] == "seed":
        return f"a record each {arm['interval']} steps, lr {arm['lr']:g}, clip {arm['clip']:g}"
    words = [f"`{arm['codec']}`", f"H {interval_of(arm)}", f"outer {arm['outer_lr']:g} / {arm['momentum']:g}", rate]
    if arm["method"] == "async":
        words[1] += f" of the fastest, tau {arm['tau']}, speeds {arm['speeds']}"
    if arm["method"] == "streaming":
        late = "eager" if arm["eager"] else f"alpha {arm['alpha']:g}"
        words[1:2] = [
            f"{arm['fragments']} fragments, each H {arm['fragments'] * arm['interval']}",
            f"tau {arm['tau']}, {late}",
        ]
    if arm["method"] == "lowrank":
        words[1:1] = [f"rank {arm['rank']}", f"tau {arm['tau']}"]
    return ", ".join(words)


def interval_of(arm: dict[str, Any]) -> str:
    """H, in words."""
    if arm["method"] == "synchronous":
        return "synchronous"
    return f"grows to {arm['interval']}" if arm["grows"] else str(arm["interval"])


def draw(file: Path, lines: Sequence[Line]) -> None:
    """Above the synchronous run over steps, in loss and in next-word accuracy; a row for each size of the batch."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    batches = _by_batch(lines)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "learning"}):
        figure = Figure(figsize=(10, 4 * len(batches)), layout="constrained")
        for axes, (batch, of_batch) in zip(
            figure.subplots(len(batches), 2, squeeze=False), batches.items(), strict=True
        ):
            for line in of_batch:
                steps, losses, words = zip(*line["curve"][1:], strict=True)
                black = {"color": "black"} if line["arm"]["method"] == "synchronous" else {}
                name = interval_of(line["arm"])
                axes[0].plot(steps, losses, label=name if black else f"H {name}", **black)
                axes[1].plot(steps, [100 * share for share in words], **black)
            axes[0].set(title=f"{batch} windows a worker and step", xlabel="steps", ylabel="held-out bits per byte")
            axes[1].set(title="next word", xlabel="steps", ylabel="%")
            axes[0].legend()
            for one in axes:
                one.grid(alpha=0.3)
        figure.savefig(file, metadata={"Date": None})


def draw_menu(file: Path, menu: Sequence[Line], continued: Sequence[Line]) -> None:
    """Held-out loss of each arm over steps, and at the end over the bytes that a node sends; below, continued.

    The mean of the seeds that all arms have.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    parts = []
    for name, lines in (("from scratch", menu), ("continued", continued)):
        arms = _by_arm(lines)
        common = set.intersection(*({line["seed"] for line in arm} for arm in arms)) if arms else set()
        if common:
            parts.append((name, [[line for line in arm if line["seed"] in common] for arm in arms]))
    if not parts:
        return
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "menu"}):
        figure = Figure(figsize=(11, 4.5 * len(parts)), layout="constrained")
        for (over_steps, over_bytes), (name, arms) in zip(
            figure.subplots(len(parts), 2, squeeze=False), parts, strict=True
        ):
            top, colors = None, {"synchronous": "black", "alone": "silver", "diloco": "dimgray"}
            for seeds in arms:
                arm = seeds[0]["arm"]
                steps = [step for step, *_ in seeds[0]["curve"][1:]]
                curve = [mean(_at(line, step) for line in seeds) for step in steps]
                more = (
                    " eager"
                    if arm["eager"]
                    else f" {arm['outer_lr']:g} / {arm['momentum']:g}"
                    if arm["momentum"]
                    else f" eps {arm['eps']:g}"
                    if arm["eps"] != Arm.eps
                    else f" {arm['codec']}"
                    if arm["method"] in ("async", "diloco")
                    else ""
                )
                marked = {"label": arm["method"] + more, "marker": "o", "markersize": 3}
                if arm["method"] == "alone":  # what learns less by far is left out of the plot over steps
                    top = 1.1 * max(curve)
                if color := colors.pop(arm["method"], ""):  # of the first by each of these
                    marked["color"] = color
                over_steps.plot(steps, curve, **marked)
                over_bytes.plot(
                    max(seeds[0]["bytes_per_node"], 1e3), curve[-1:], **marked | {"markersize": 7, "linestyle": ""}
                )
            over_steps.set_ylim(top=top)  # now that all is drawn: the other end is then where it should be
            over_steps.set(title=name, xlabel="steps", ylabel="held-out bits per byte")
            over_bytes.set(title="at the end", xlabel="bytes sent by a node, at least 1 kB", xscale="log")
            over_bytes.legend(fontsize="small")
            for one in (over_steps, over_bytes):
                one.grid(alpha=0.3)
        figure.savefig(file, metadata={"Date": None})


def _is(line: Line, method: str, optimizer: str) -> bool:
    return (line["arm"]["method"], line["arm"]["optimizer"]) == (method, optimizer)


def _counted(lines: Sequence[Line]) -> str:
    """How many seeds, and whether on older slices of the text."""
    return f"{len(lines)} †" if any(line["older"] for line in lines) else str(len(lines))


def _by_arm(lines: Iterable[Line]) -> list[list[Line]]:
    """Lines of equal arms together, in the order in which arms first come."""
    found: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        found[tuple(line["arm"].values())].append(line)
    return list(found.values())


def _by_batch(lines: Iterable[Line]) -> dict[int, list[Line]]:
    found: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        found[line["size"]["batch"]].append(line)
    return found


def _steps(lines: Sequence[Line]) -> list[int]:
    """Where the first, a synchronous run, was measured."""
    return [step for step, *_ in lines[0]["curve"][1:]] if lines else []


def _at(line: Line, step: int) -> float:
    """The loss at a step, or after the round that it was in."""
    return next(float(loss) for at, loss, _ in line["curve"] if at >= step)


def _above(lines: Iterable[Line], baseline: Mapping[int, Line]) -> list[float]:
    """By how many percent losses lie above those of the same seed in `baseline`, where that is another run."""
    pairs = [(line, baseline[line["seed"]]) for line in lines if line["seed"] in baseline]
    return [100 * (line["loss"] / other["loss"] - 1) for line, other in pairs if line is not other]


def _fewer(lines: Iterable[Line], baseline: Mapping[int, Line]) -> list[float]:
    return [_ratio(line, baseline[line["seed"]]) for line in lines if line["seed"] in baseline]


def _ratio(line: Line, other: Line) -> float:
    return float(other["bytes_per_node"] / line["bytes_per_node"])


def _size(bytes: float) -> str:
    """Of what is sent, in kB where that is little."""
    return f"{bytes / 1e3:.1f} kB" if 0 < bytes < 1e5 else f"{bytes / 1e6:.2f} MB"


def _worst(values: Sequence[float], form: str, *, least: bool = False) -> str:
    """The mean, and the worst: the greatest, or the `least`."""
    if not values:
        return ""
    worst = min(values) if least else max(values)
    return form.format(mean(values)) + (f", worst {form.format(worst)}" if len(values) > 1 else "")
