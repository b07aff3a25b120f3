"""The tables and plots of `bench/learning.py`, written into docs/results.md between markers, and as SVG beside it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Line = dict[str, Any]  # of results.jsonl

COLOURS = {"synchronous": "black", "diloco": "tab:blue", "open": "tab:orange", "sign3": "tab:green"}
USUAL_RATE = 1e-3  # of the inner optimizer; others are named
STYLES = ("-", "--", ":", "-.")


def write_report(docs: Path, large: Sequence[Line], small: Sequence[Line]) -> None:
    """Write the tables of finished runs with the large and the small model into docs/results.md, and the plots."""
    continued, small_continued = _only(large, "continued"), _only(small, "continued")
    scratch = [*_only(small, "checkpoint")[:1], *_only(small, "scratch")]
    page = docs / "results.md"
    text = page.read_text(encoding="utf-8")
    for name, table in (
        ("continued", continued_table(continued)),
        ("seeds", seeds_table(small_continued)),
        ("continued-small", continued_table(small_continued)),
        ("scratch", scratch_table(scratch)),
        ("trials", trials_table(_only(small, "trials"))),
    ):
        text = put(text, name, table or "Not run yet.")
    page.write_text(text, encoding="utf-8")
    panels = [(f"{lines[0]['parameters'] / 1e6:.2f} M", lines) for lines in (continued, small_continued) if lines]
    if panels:
        draw_continued(docs / "learning-continued.svg", panels)
    if len(scratch) > 1:
        draw_scratch(docs / "learning-scratch.svg", scratch[0], scratch[1:])


def put(text: str, name: str, table: str) -> str:
    """`text` with `table` between the markers called `name`. Raises ValueError where there are none."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"results.md has no {begin.strip()} … {end} to write the table between")
    return re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{table}\n\n{end}", text, flags=re.S)


def continued_table(lines: Sequence[Line]) -> str:
    """Each method against the synchronous run of the same seed: mean and sample deviation over seeds."""
    baseline = {line["seed"]: line for line in lines if method_of(line) == "synchronous"}
    rows = []
    for (method, *_), seeds in _by_arm(lines).items():
        paired = [line for line in seeds if line["seed"] in baseline]
        gaps = [100 * (line["loss"] / baseline[line["seed"]]["loss"] - 1) for line in paired]
        fewer = [baseline[line["seed"]]["bytes_per_node"] / line["bytes_per_node"] for line in paired]
        arm = seeds[0]["arm"]
        ours = method != "synchronous"
        rows.append(
            (
                method,
                described(arm),
                _spread([line["loss"] for line in seeds], "{:.4f}"),
                _spread(gaps, "{:+.2f}", " %") if ours else "",
                f"{mean(line['bytes_per_node'] for line in seeds) / seeds[0]['parameters']:.2f}",
                f"{mean(fewer):.0f} ×" if ours and fewer else "",
                f"{100 * mean(line['accepted'] for line in seeds):.1f} %" if method == "open" else "",
                str(len(seeds)),
            )
        )
    head = (
        "method",
        "settings",
        "held-out loss",
        "gap to synchronous",
        "bytes a parameter",
        "fewer bytes",
        "accepted",
        "seeds",
    )
    return _markdown(head, rows) if rows else ""


def seeds_table(lines: Sequence[Line]) -> str:
    """The losses behind the means."""
    seeds = sorted({line["seed"] for line in lines})
    rows = [
        (method, *(f"{line['loss']:.4f}" if (line := _of(found, seed)) else "" for seed in seeds))
        for (method, *_), found in _by_arm(lines).items()
    ]
    start = {line["seed"]: line["curve"][0][1] for line in lines}
    rows.insert(0, ("at the checkpoint", *(f"{start[seed]:.4f}" for seed in seeds)))
    return _markdown(("method", *(f"seed {seed}" for seed in seeds)), rows) if seeds else ""


def scratch_table(lines: Sequence[Line]) -> str:
    """Held-out loss over steps, and in brackets how far above the synchronous run."""
    if len(lines) < 2:
        return ""
    baseline = curve_of(lines[0])
    steps = [step for step in baseline if step > 0]
    rows = [("synchronous", "", "", *(f"{baseline[step]:.3f}" for step in steps))]
    for line in lines[1:]:
        curve, gaps = curve_of(line), gap(curve_of(line), baseline)
        at = [f"{curve[step]:.3f} ({gaps[step]:+.1f} %)" if step in gaps else "" for step in steps]
        rows.append((method_of(line), f"`{line['arm']['codec']}`", str(line["arm"]["interval"]), *at))
    return _markdown(("method", "codec", "H", *(f"{step} steps" for step in steps)), rows)


def trials_table(lines: Sequence[Line]) -> str:
    """What was tried, in the order of trying."""
    baseline = next((line for line in lines if method_of(line) == "synchronous"), None)
    rows = []
    for line in lines:
        ours = baseline is not None and line is not baseline
        rows.append(
            (
                method_of(line),
                described(line["arm"]),
                f"{line['loss']:.4f}",
                f"{100 * (line['loss'] / baseline['loss'] - 1):+.2f} %" if ours and baseline else "",
                f"{baseline['bytes_per_node'] / line['bytes_per_node']:.0f} ×" if ours and baseline else "",
                f"{100 * line['accepted']:.1f} %" if method_of(line) == "open" else "",
            )
        )
    head = ("method", "settings", "held-out loss", "gap to synchronous", "fewer bytes", "accepted")
    return _markdown(head, rows) if rows else ""


def described(arm: dict[str, Any]) -> str:
    """An arm's settings in words."""
    if arm["method"] == "synchronous":
        return ", ".join(["fp32, each step"] + [f"inner rate {arm['lr']:g}"] * (arm["lr"] != USUAL_RATE))
    words = [f"`{arm['codec']}`", f"H = {arm['interval']}", f"outer {arm['outer_lr']:g} / {arm['momentum']:g}"]
    words += [f"inner rate {arm['lr']:g}"] * (arm["lr"] != USUAL_RATE)
    words += [f"decay {arm['decay']:g}"] * (arm["decay"] < 1)
    return ", ".join(words)


def draw_continued(file: Path, panels: Sequence[tuple[str, Sequence[Line]]]) -> None:
    """Loss and gap over steps after the checkpoint, mean and range of the seeds; a row for each size of the model."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "learning"}):
        figure = Figure(figsize=(10, 4 * len(panels)), layout="constrained")
        rows = figure.subplots(len(panels), 2, squeeze=False)
        for (loss_axes, gap_axes), (size, lines) in zip(rows, panels, strict=True):
            baseline = {line["seed"]: curve_of(line) for line in lines if method_of(line) == "synchronous"}
            for (method, *_), seeds in _by_arm(lines).items():
                colour, label = COLOURS[method], _label(seeds[0]["arm"])
                _band(loss_axes, [curve_of(line) for line in seeds], colour, label)
                if method != "synchronous":
                    paired = [line for line in seeds if line["seed"] in baseline]
                    _band(gap_axes, [gap(curve_of(line), baseline[line["seed"]]) for line in paired], colour, label)
            loss_axes.set(title=f"{size} parameters, after the checkpoint", xlabel="steps", ylabel="bits per byte")
            gap_axes.axhline(0, color="black", lw=0.8)
            gap_axes.axhline(1, color="grey", lw=0.8, ls="--")
            gap_axes.set(title="Gap to the synchronous run", xlabel="steps", ylabel="%")
        _finish(figure, file, *rows.flat)


def draw_scratch(file: Path, synchronous: Line, lines: Sequence[Line]) -> None:
    """Loss from scratch over steps, and the gap over steps, one line for each method and H."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "learning"}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        loss_axes, gap_axes = figure.subplots(1, 2)
        baseline = curve_of(synchronous)
        loss_axes.plot(list(baseline)[1:], list(baseline.values())[1:], color="black", label="synchronous")
        intervals = sorted({line["arm"]["interval"] for line in lines})
        for line in lines:
            steps, losses = zip(*line["curve"][1:], strict=True)
            style = STYLES[intervals.index(line["arm"]["interval"]) % len(STYLES)]
            drawn = {
                "color": COLOURS.get(line["arm"]["codec"], COLOURS[method_of(line)]),
                "ls": style,
                "label": _label(line["arm"]),
            }
            loss_axes.plot(steps, losses, **drawn)
            gaps = gap(curve_of(line), baseline)
            gap_axes.plot(list(gaps)[1:], list(gaps.values())[1:], **drawn)
        loss_axes.set(title="From scratch", xlabel="steps", ylabel="held-out bits per byte")
        gap_axes.set(title="Gap to the synchronous run", xlabel="steps", ylabel="%")
        _finish(figure, file, loss_axes, gap_axes)


def _band(axes: Any, curves: Sequence[dict[int, float]], colour: str, label: str) -> None:
    if not curves:
        return
    steps = [step for step in curves[0] if all(step in curve for curve in curves)]
    at = [[curve[step] for curve in curves] for step in steps]
    axes.plot(steps, [mean(values) for values in at], "o-", ms=3, color=colour, label=label)
    axes.fill_between(steps, [min(values) for values in at], [max(values) for values in at], color=colour, alpha=0.2)


def _finish(figure: Any, file: Path, *axes: Any) -> None:
    for one in axes:
        one.grid(alpha=0.3)
        if one.get_legend_handles_labels()[0]:
            one.legend()
    figure.savefig(file, metadata={"Date": None})


def _label(arm: dict[str, Any]) -> str:
    return arm["method"] if arm["method"] == "synchronous" else f"{arm['method']}, H = {arm['interval']}"


def _by_arm(lines: Iterable[Line]) -> dict[tuple[Any, ...], list[Line]]:
    """Lines of equal arms together, in the order in which arms first come; the key begins with the method."""
    found: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        found[tuple(line["arm"].values())].append(line)
    return found


def curve_of(line: Line) -> dict[int, float]:
    """Held-out loss by steps done."""
    return {step: loss for step, loss in line["curve"]}


def gap(curve: dict[int, float], baseline: dict[int, float]) -> dict[int, float]:
    """By how many percent `curve` lies above `baseline`, where both were measured."""
    return {step: 100 * (loss / baseline[step] - 1) for step, loss in curve.items() if step in baseline}


def method_of(line: Line) -> str:
    method: str = line["arm"]["method"]
    return method


def _of(lines: Iterable[Line], seed: int) -> Line | None:
    return next((line for line in lines if line["seed"] == seed), None)


def _only(lines: Iterable[Line], table: str) -> list[Line]:
    return [line for line in lines if line["table"] == table]


def _spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """Mean ± sample standard deviation of `values`."""
    if not values:
        return ""
    deviation = f" ± {form.replace('+', '').format(stdev(values))}" if len(values) > 1 else ""
    return form.format(mean(values)) + deviation + unit


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)
