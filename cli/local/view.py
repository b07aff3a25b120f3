"""How a local swarm looks while it trains: a live table on a terminal, one line a round where there is none.

`LocalSwarm` knows the nodes; `snapshot` makes immutable rows of them, and a view shows the rows. The live view redraws
from a thread of its own, so that the clock and the bar move while the main thread waits for something.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from swarmnode.cli.local.attack import ACCEPTED, Onlooker, WorkTally
from swarmnode.cli.local.report import hashes_by_round
from swarmnode.cli.local.swarm import LocalSwarm, RoundReport
from swarmnode.cli.terminal import duration, size

RECENT = 5  # rounds that the time left is estimated from
REWARDED = 10  # rounds of whose answers the reward is the mean: those of one round are few
_STATE_STYLES = {"training": "green", "finished": "bold green", "frozen": "cyan", "dead": "red", "starting": "dim"}


@dataclass(frozen=True)
class Row:
    """One node at one moment."""

    label: str
    state: str
    last: RoundReport | None
    done: int  # rounds since the first that any node reported
    bytes_in: int  # since the start
    bytes_out: int
    hash_style: str  # green where all agree on the node's last round
    reward: float | None = None  # mean of the node's last rounds, in a run by rollouts
    lie: str = ""  # of a node that attacks; what this command alone knows
    tally: WorkTally | None = None  # what became of its work, in a swarm that is attacked


@dataclass(frozen=True)
class Board:
    """All nodes at one moment. `rounds` is the goal, `round_seconds` the usual length of a round lately."""

    rows: tuple[Row, ...]
    rounds: int
    round_seconds: float | None

    @property
    def done(self) -> int:
        return max((row.done for row in self.rows), default=0)

    @property
    def seconds_left(self) -> float | None:
        return None if self.round_seconds is None else self.round_seconds * max(0, self.rounds - self.done)


def snapshot(swarm: LocalSwarm, onlooker: Onlooker | None = None) -> Board:
    """The swarm as it is now; with what an onlooker of an attack has seen."""
    seen = [None] * len(swarm.nodes) if onlooker is None else [replace(t) for t in onlooker.tallies]
    hashes = hashes_by_round(swarm.reports)
    first = min((report.round for node in swarm.reports for report in node), default=0)
    rows = []
    for node, tally in zip(swarm.nodes, seen, strict=True):
        last = node.reports[-1] if node.reports else None
        rows.append(
            Row(
                label=node.label,
                state=node.state,
                last=last,
                done=0 if last is None else last.round - first + 1,
                bytes_in=sum(report.bytes_in for report in node.reports),
                bytes_out=sum(report.bytes_out for report in node.reports),
                hash_style=_hash_style(last, hashes),
                reward=_recent_reward(node.reports),
                lie=node.lie,
                tally=tally,
            )
        )
    lengths = [report.seconds for node in swarm.reports for report in node[-RECENT:]]
    return Board(tuple(rows), swarm.settings.rounds, median(lengths) if lengths else None)


def _recent_reward(reports: Sequence[RoundReport]) -> float | None:
    rewards = [report.reward for report in reports[-REWARDED:] if report.reward is not None]
    return fmean(rewards) if rewards else None


def _hash_style(last: RoundReport | None, hashes: dict[int, set[str]]) -> str:
    """Equal hashes of a round look equal: green for agreement, else a colour for each hash, in the hashes' order."""
    if last is None or last.state_hash is None:
        return "dim"
    reported = sorted(hashes[last.round])
    if len(reported) == 1:
        return "green" if last.round == max(hashes) else "dim green"
    return ("red", "yellow", "magenta", "blue")[reported.index(last.state_hash) % 4]


def table(board: Board) -> Table:
    """The nodes, one a line, within 80 columns. In an attacked swarm: who lies, and what honest nodes make of it."""
    attacked = any(row.tally is not None for row in board.rows)
    rewarded = any(row.reward is not None for row in board.rows)
    measured = "reward" if rewarded else "loss"
    left, right = ("node", "who" if attacked else "state"), ("round", measured)
    if attacked:
        heads = [*left, *right, "accepted", "refused", "score", "state hash", "the last"]
    else:
        heads = [*left, *right, "tokens/s", "in", "out", "learned from" if rewarded else "state hash"]
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in heads:
        words = head in (*left, "state hash", "learned from", "the last")
        shown.add_column(head, justify="left" if words else "right", no_wrap=True)
    for row in board.rows:
        value = bits(row.reward if rewarded else None if row.last is None else row.last.loss)
        state_hash = Text(short_hash(row.last), style=row.hash_style)
        cells = (
            _attacked_cells(row, board.rounds, value, state_hash)
            if attacked
            else (
                Text(row.state, style=_STATE_STYLES.get(row.state, "")),
                f"{row.done}/{board.rounds}",
                value,
                tokens_per_second(row.last),
                size(row.bytes_in),
                size(row.bytes_out),
                peers_of(row.last) if rewarded else state_hash,
            )
        )
        shown.add_row(row.label, *cells)
    return shown


def _attacked_cells(row: Row, rounds: int, value: str, state_hash: Text) -> tuple[str | Text, ...]:
    tally = row.tally or WorkTally()
    return (
        Text(row.lie or "honest", style="bold red" if row.lie else "green"),
        f"{row.done}/{rounds}" if row.state in ("training", "finished") else row.state,
        value,
        str(tally.accepted),
        str(tally.refused.total()),
        "–" if tally.score is None else f"{tally.score:.2f}",
        state_hash,
        Text(tally.last, style="" if tally.last in ("", ACCEPTED) else "yellow"),
    )


def bits(value: float | None) -> str:
    """A loss in bits per byte, or a reward."""
    return "–" if value is None else f"{value:.3f}"


def short_hash(report: RoundReport | None) -> str:
    """The first digits of a state hash; enough to see a difference."""
    return "–" if report is None or report.state_hash is None else report.state_hash[:8]


def peers_of(report: RoundReport | None) -> str:
    """How many peers' answers were learned from in the round."""
    if report is None:
        return "–"
    return f"{report.learned_from} peer{'' if report.learned_from == 1 else 's'}" if report.learned_from else "itself"


def tokens_per_second(report: RoundReport | None) -> str:
    """Tokens of the round over its whole length, the exchange included."""
    return "–" if report is None or report.seconds <= 0 else f"{report.tokens / report.seconds:,.0f}"


def view_for(console: Console) -> Lines:
    """The live table where there is a terminal to draw it on, else lines."""
    return LiveTable(console) if console.is_terminal else Lines(console)


class Lines:
    """What shows the progress, a context manager. For pipes and log files: one line when a phase begins, when a node
    changes its state and when a round ends.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._states: dict[str, str] = {}
        self._announced: dict[str, int] = {}  # rounds announced, by the labels of the swarm that ended them

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def phase(self, text: str) -> None:
        """Say what is being done from now on, such as "starting 4 nodes"."""
        self.note(text)

    def note(self, text: str) -> None:
        """Say something that the person should know and that stays on the screen."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, board: Board) -> None:
        """The nodes as they are now."""
        for row in board.rows:
            before = self._states.get(row.label)
            if before not in (None, row.state) and (row.state in ("dead", "frozen") or before == "frozen"):
                self.note(f"node {row.label} is {'back' if before == 'frozen' else row.state}")
            self._states[row.label] = row.state
        swarm = " ".join(row.label for row in board.rows)
        at_work = [row for row in board.rows if row.state in ("training", "finished")]
        done = min((row.done for row in at_work), default=0)
        if done > self._announced.get(swarm, 0):
            self._announced[swarm] = done
            self.note(_round_line(board, at_work, done))

    def settle(self) -> None:
        """The nodes shown last stay as they are; others may follow."""
        self._states.clear()


class LiveTable(Lines):
    """One table that is redrawn in place, with the phase, a bar and the time left below it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._board: Board | None = None
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

    def show(self, board: Board) -> None:
        self._board = board

    def settle(self) -> None:
        board, self._board = self._board, None
        if board is not None:
            self._console.print(table(board))

    def _draw(self) -> RenderableType:
        """Called from the redrawing thread; reads references that the main thread replaces whole."""
        board = self._board
        parts: list[RenderableType] = []
        if board is not None:
            parts.append(table(board))
        if self._phase:
            self._spinner.update(text=f"{self._phase} · {duration(time.monotonic() - self._phase_began)}")
            parts.append(self._spinner)
            if board is not None:
                parts.append(_bar(board))
        return Group(*parts)


def _bar(board: Board) -> Table:
    line = Table.grid(padding=(0, 1))
    left = board.seconds_left
    line.add_row(
        ProgressBar(total=board.rounds, completed=board.done, width=40),
        f"round {board.done} of {board.rounds}",
        "" if left is None or not left else f"about {duration(left)} left",
    )
    return line


def _lies(board: Board) -> str:
    """How the liars fare."""
    told = [row.tally for row in board.rows if row.lie and row.tally is not None]
    if not told:
        return ""
    return f"lies: {sum(t.accepted for t in told)} accepted, {sum(t.refused.total() for t in told)} refused"


def _round_line(board: Board, at_work: Sequence[Row], done: int) -> str:
    reports = [row.last for row in at_work if row.last is not None]
    left = board.seconds_left
    agreeing = sum(row.hash_style in ("green", "dim green") for row in at_work)
    rewards = [row.reward for row in at_work if row.reward is not None]
    loss = next((report.loss for report in reports if report.loss is not None), None)
    parts = [
        f"round {done} of {board.rounds}",
        f"reward {fmean(rewards):.3f}" if rewards else f"loss {bits(loss)} bits per byte",
        f"{median(report.seconds for report in reports):.1f} s",
        f"{agreeing} of {len(board.rows)} agree" if len(board.rows) > 1 and not rewards else "",
        _lies(board),
        f"about {duration(left)} left" if left else "",
    ]
    return ", ".join(part for part in parts if part)
