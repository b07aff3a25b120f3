"""How a local swarm looks while it trains: a live table on a terminal, one line a round where there is none.

The live view redraws from a thread of its own, so that the clock and the bar move while the main thread waits for
something; what it draws of the nodes, the main thread has made before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from statistics import fmean, median

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from swarmnode.cli.local.attack import ACCEPTED
from swarmnode.cli.local.report import by_rollouts, hashes_by_round
from swarmnode.cli.local.swarm import LocalSwarm, NodeProcess, RoundReport
from swarmnode.cli.terminal import duration, number_of, size

REWARDED = 10  # rounds of whose answers the reward is the mean: those of one round are few
_STATE_STYLES = {"training": "green", "finished": "bold green", "frozen": "cyan", "dead": "red", "starting": "dim"}


def table(swarm: LocalSwarm) -> Table:
    """The nodes, one a line, within 80 columns. In an attacked swarm: who lies, and what honest nodes make of it."""
    attacked, rewarded = swarm.options.attack is not None, by_rollouts(swarm.reports)
    left, right = ("node", "who" if attacked else "state"), ("round", "reward" if rewarded else "loss")
    if attacked:
        heads = [*left, *right, "accepted", "refused", "score", "state hash", "the last"]
    else:
        heads = [*left, *right, "tokens/s", "in", "out", "learned from" if rewarded else "state hash"]
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in heads:
        words = head in (*left, "state hash", "learned from", "the last")
        shown.add_column(head, justify="left" if words else "right", no_wrap=True)
    hashes = hashes_by_round(swarm.reports)
    for node in swarm.nodes:
        told = node.last.state_hash if node.last is not None else None
        state_hash = Text("–" if told is None else told[:8], style=_hash_style(node.last, hashes))
        if attacked:
            shown.add_row(*_attacked_cells(swarm, node, state_hash))
        else:
            shown.add_row(*_cells(swarm, node, peers_of(node.last) if rewarded else state_hash))
    return shown


def _cells(swarm: LocalSwarm, node: NodeProcess, result: str | Text) -> tuple[str | Text, ...]:
    return (
        node.label,
        Text(node.state, style=_STATE_STYLES.get(node.state, "")),
        f"{swarm.done_by(node)}/{swarm.options.rounds}",
        bits(_measured(node)),
        tokens_per_second(node.last),
        size(sum(report.bytes_in for report in node.reports)),
        size(sum(report.bytes_out for report in node.reports)),
        result,
    )


def _attacked_cells(swarm: LocalSwarm, node: NodeProcess, state_hash: Text) -> tuple[str | Text, ...]:
    tally = node.tally
    at_work = node.state in ("training", "finished")
    return (
        node.label,
        Text(node.lie or "honest", style="bold red" if node.lie else "green"),
        f"{swarm.done_by(node)}/{swarm.options.rounds}" if at_work else node.state,
        bits(_measured(node)),
        str(tally.accepted),
        str(tally.refused.total()),
        "–" if tally.score is None else f"{tally.score:.2f}",
        state_hash,
        Text(tally.last, style="" if tally.last in ("", ACCEPTED) else "yellow"),
    )


def _measured(node: NodeProcess) -> float | None:
    """The loss that the node measured last, or the mean reward of its last few rounds."""
    rewards = [report.reward for report in node.reports[-REWARDED:] if report.reward is not None]
    if rewards:
        return fmean(rewards)
    return next((report.loss for report in reversed(node.reports) if report.loss is not None), None)


def _hash_style(last: RoundReport | None, hashes: dict[int, set[str]]) -> str:
    """Equal hashes of a round look equal: green for agreement, else a colour for each hash, in the hashes' order."""
    if last is None or last.state_hash is None or last.apart is not None:
        return "dim"
    reported = sorted(hashes[last.round])
    if len(reported) == 1:
        return "green" if last.round == max(hashes) else "dim green"
    return ("red", "yellow", "magenta", "blue")[reported.index(last.state_hash) % 4]


def bits(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def peers_of(report: RoundReport | None) -> str:
    if report is None:
        return "–"
    return number_of(report.learned_from, "peer") if report.learned_from else "itself"


def tokens_per_second(report: RoundReport | None) -> str:
    """Tokens of the round over its whole length, the exchange included."""
    return "–" if report is None or report.seconds <= 0 else f"{report.tokens / report.seconds:,.0f}"


class Lines(AbstractContextManager["Lines"]):
    """What shows the progress, a context manager. For pipes and log files: one line when a phase begins, when a node
    changes its state and when a round ends.
    """

    def __init__(self, console: Console) -> None:
        self.remarks: list[str] = []  # for the report as well
        self._console = console
        self._states: dict[str, str] = {}
        self._announced = 0  # rounds

    def __exit__(self, *_: object) -> None:
        pass

    def phase(self, text: str) -> None:
        """Say what is being done from now on, such as "starting 4 nodes"."""
        self.note(text)

    def note(self, text: str) -> None:
        """Say something that the person should know and that stays on the screen."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def remark(self, text: str) -> None:
        """Say it now and in the report."""
        self.remarks.append(text)
        self.note(text)

    def show(self, swarm: LocalSwarm) -> None:
        for node in swarm.nodes:
            before, state = self._states.get(node.label), node.state
            if before == "starting" and state == "training":
                self.note(f"node {node.label} is ready")
            elif before not in (None, state) and (state in ("dead", "frozen") or before == "frozen"):
                self.note(f"node {node.label} is {'back' if before == 'frozen' else state}")
            self._states[node.label] = state
        at_work = [node for node in swarm.nodes if node.state in ("training", "finished")]
        done = min(map(swarm.done_by, at_work), default=0)
        if done > self._announced:
            self._announced = done
            self.note(_round_line(swarm, at_work, done))

    def settle(self) -> None:
        """The nodes shown last stay as they are; others may follow."""
        self._states.clear()
        self._announced = 0


class LiveTable(Lines):
    """One table that is redrawn in place, with the phase, a bar and the time left below it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._nodes: Table | None = None
        self._progress: Table | None = None
        self._spinner = Spinner("dots")
        self._phase = ""
        self._phase_began = time.monotonic()
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4)  # draws once, here

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._phase = ""
        self._live.stop()

    def phase(self, text: str) -> None:
        self._phase, self._phase_began = text, time.monotonic()
        self._live.refresh()

    def show(self, swarm: LocalSwarm) -> None:
        self._nodes, self._progress = table(swarm), _bar(swarm)

    def settle(self) -> None:
        nodes, self._nodes, self._progress = self._nodes, None, None
        if nodes is not None:
            self._console.print(nodes)

    def _draw(self) -> RenderableType:
        """Called from the redrawing thread; reads references that the main thread replaces whole."""
        phase = None
        if self._phase:
            phase = self._spinner
            phase.update(text=f"{self._phase} · {duration(time.monotonic() - self._phase_began)}")
        parts = (self._nodes, phase, self._progress if self._phase else None)
        return Group(*(part for part in parts if part is not None))


def _bar(swarm: LocalSwarm) -> Table:
    line = Table.grid(padding=(0, 1))
    left = swarm.seconds_left
    line.add_row(
        ProgressBar(total=swarm.options.rounds, completed=swarm.done, width=40),
        f"round {swarm.done} of {swarm.options.rounds}",
        f"about {duration(left)} left" if left else "",
    )
    return line


def _agreement(swarm: LocalSwarm, reports: Sequence[RoundReport]) -> str:
    """How many nodes have one state; or, where each has its own, how far they are apart."""
    apart = [report.apart for report in reports if report.apart is not None]
    if apart:
        return f"{fmean(apart):.1%} apart"
    hashes = hashes_by_round(swarm.reports)
    return f"{sum(len(hashes.get(report.round, ())) == 1 for report in reports)} of {len(swarm.nodes)} agree"


def _round_line(swarm: LocalSwarm, at_work: Sequence[NodeProcess], done: int) -> str:
    reports = [node.last for node in at_work if node.last is not None]
    rewarded = by_rollouts(swarm.reports)
    values = [value for node in at_work if (value := _measured(node)) is not None]
    lies, options = [node.tally for node in swarm.nodes if node.lie], swarm.options
    left = swarm.seconds_left
    parts = [
        f"round {done} of {options.rounds}",
        f"reward {fmean(values):.3f}" if rewarded else f"loss {bits(next(iter(values), None))} {options.loss_unit}",
        f"{median(report.seconds for report in reports):.1f} s",
        _agreement(swarm, reports) if len(swarm.nodes) > 1 and not rewarded else "",
        f"lies: {sum(t.accepted for t in lies)} accepted, {sum(t.refused.total() for t in lies)} refused"
        if lies
        else "",
        f"about {duration(left)} left" if left else "",
    ]
    return ", ".join(part for part in parts if part)
