"""What the commands share: their options, asking the daemon, and words, numbers and lines for a terminal.

Colours are off where the output is no terminal, where NO_COLOR is set (no-color.org), and for a dumb terminal. Text
that came from peers passes through `plain`, so that nobody's escape sequences reach the terminal.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import wraps
from itertools import pairwise
from pathlib import Path
from select import select
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnode.node.config import Loaded, default_data_dir, load_config
from swarmnode.node.control.client import ControlClient, ControlError, NotRunning
from swarmnode.node.exitcodes import ExpectedError
from swarmnode.node.exitcodes import UsageMistake as UsageMistake  # for the commands
from swarmnode.node.identity import read_passphrase
from swarmnode.node.invite import is_link
from swarmnode.node.logs import strict_json
from swarmnode.node.storage.datadir import DataDir, RunStore
from swarmnode.training.options import SettingError
from swarmnode.training.options import number_of as number_of  # for the commands
from swarmnode.training.runspec import RunSpec

if TYPE_CHECKING:
    from rich.status import Status

DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        show_default=False,
        help="The node's data directory. [default: SWARMNODE_DATA_DIR, else ~/.local/share/swarmnode]",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output. [default: text]")]
PassphraseOption = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file", metavar="FILE", help="File with the key's passphrase. [default: SWARMNODE_PASSPHRASE]"
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Configuration file. [default: config.toml in the data directory]"),
]
IntervalOption = Annotated[float, typer.Option(min=0.2, max=3600, metavar="SECONDS", help="Time between refreshes.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. [default: ask]")]

LABEL = 11  # characters of a label
LEARNS_BY = 40  # rounds until policies of digits-rl earn more than who guesses, by enough to be seen


_DATA_DIR = ContextVar[Path | None]("_DATA_DIR", default=None)  # what the command that runs was given
_AS_JSON = ContextVar[bool]("_AS_JSON", default=False)


class CommandGroup(typer.Typer):
    """Gives its commands --data-dir and --json, unless it has them itself, for `directory`, `ask` and `show`."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        def add(function: Any) -> Any:
            super(CommandGroup, self).command(name, **settings)(_with_common_options(function))
            return function

        return add


def _with_common_options(function: Any) -> Any:
    own = inspect.signature(function, eval_str=True).parameters
    if "data_dir" in own:
        return function

    @wraps(function)
    def command(data_dir: Any, json_output: bool, **given: Any) -> None:
        heed(data_dir, json_output)
        function(**given)

    options = [("data_dir", None, DataDirOption), ("json_output", False, JsonOption)]
    only = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, only, default=value, annotation=kind) for name, value, kind in options]
    return declare(command, [*own.values(), *added])


def declare(command: Any, parameters: Sequence[inspect.Parameter]) -> Any:
    """`command`, which typer takes for one with these parameters."""
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def heed(data_dir: str | Path | None, json_output: bool) -> None:
    """From now on answer for this node, and in this form."""
    _DATA_DIR.set(None if data_dir is None else Path(data_dir))
    _AS_JSON.set(json_output)


def as_json() -> bool:
    return _AS_JSON.get()


def loaded() -> Loaded:
    """The configuration that a command without settings of its own works with."""
    return load_config(None, os.environ, flags())


def flags() -> dict[str, str]:
    """What the command was given of the node's settings, by key."""
    return {} if (data_dir := _DATA_DIR.get()) is None else {"data_dir": str(data_dir)}


def directory() -> Path:
    """The data directory that --data-dir, the environment or the default names; its files are not read."""
    named = _DATA_DIR.get() or os.environ.get("SWARMNODE_DATA_DIR") or default_data_dir(os.environ)
    return Path(named).expanduser().absolute()


def group(help: str) -> CommandGroup:
    """A command that has commands of its own, such as `swarmnode shards`."""
    return CommandGroup(
        help=help, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
    )


def ask(method: str, *, timeout: float = 30.0, **params: Any) -> Any:
    """What the running daemon answers. Raises NotRunning; ControlError where it fails or takes over `timeout` s.

    A person who waits for longer than a second sees a sign that turns.
    """
    answered = Event()

    def turn() -> None:
        if not answered.wait(1.0):
            with _turning("the node is at it"):
                answered.wait()

    sign = Thread(target=turn, daemon=True)
    if sys.stderr.isatty() and not as_json():
        sign.start()
    try:
        return ControlClient(directory()).call(method, timeout=timeout, **params)
    finally:
        answered.set()
        if sign.ident is not None:
            sign.join()


def show(answer: Any, text: str | Iterable[str]) -> None:
    """A result: as text for a person, whole or in parts of which the empty ones are left out; or as JSON."""
    if as_json():
        print_json(answer)
    else:
        print(text if isinstance(text, str) else "\n".join(filter(None, text)), flush=True)


def absolute(path: Path) -> str:
    """A path as the daemon, which runs in another directory, understands it."""
    return str(path.expanduser().absolute())


def own_home(passphrase_file: Path | None) -> tuple[DataDir, bytes | None]:
    """The node's data directory, and the passphrase of its key. Raises what reading the configuration raises."""
    config = loaded().config
    named = config.passphrase_file if passphrase_file is None else str(passphrase_file)
    return DataDir(config.directory), read_passphrase(named, os.environ)


def current_run(home: Path) -> str | None:
    """The run that the daemon is in; None where none is running, or it is in none."""
    try:
        run = ControlClient(home).call("status", timeout=10.0)["run"]
    except (NotRunning, ControlError):  # or it does not answer
        return None
    return str(run["run_id"]) if run is not None else None


def spec_of(home: DataDir, run_id: str) -> RunSpec | None:
    """The specification of a run on this machine; None where it is missing or damaged."""
    try:
        return RunStore(home).load(run_id)
    except SettingError:
        return None


def one_run(known: Sequence[str], wanted: str | None, home: Path, option: str = "") -> str:
    """The full id of the run that begins with `wanted` or is called so, or of the only one; it is named after `option`.

    Raises UsageMistake.
    """
    if wanted is not None and is_link(wanted):
        raise UsageMistake(f"that is a link to a run; join it with: swarmnode join {wanted}")
    matching = [run for run in known if run.startswith(wanted or "")]
    if len(matching) == 1:
        return matching[0]
    specs = {run: spec_of(DataDir(home), run) for run in known}
    names = {run: spec.run.name for run, spec in specs.items() if spec is not None}
    matching = [run for run in known if names.get(run) == wanted] if wanted and not matching else matching
    if len(matching) == 1:
        return matching[0]
    what = "there is more than one run"
    if wanted is not None:
        what = f"{'more than one run' if matching else 'no run'} here is called {wanted!r}, or has an id that begins so"
    listed = "\n".join(f"  {option}{run}  {plain(names.get(run, ''))}".rstrip() for run in matching or known)
    raise UsageMistake(f"{home}: {what}; say which one:\n{listed}")


def run_meant(home: DataDir, wanted: str | None, option: str = "") -> str:
    """The full id of the run that is named as in `one_run`; without a name, of several, the one that the node is in.

    Raises ExpectedError or UsageMistake.
    """
    known = home.known_runs()
    if not known:
        raise ExpectedError(f"{home.path}: no run is known here; swarmnode run begins or joins one")
    if wanted is None and len(known) > 1 and (current := current_run(home.path)) is not None:
        return current
    return one_run(known, wanted, home.path, option)


def print_json(value: Any) -> None:
    """One JSON value on one line, at once, so that a program that reads a pipe gets it when it happens."""
    print(json.dumps(strict_json(value), allow_nan=False, ensure_ascii=False), flush=True)


def say(text: str) -> None:
    """A remark that is no result: on standard error, to people. A program that wants JSON reads errors there alone."""
    if not as_json():
        print(text, file=sys.stderr)


@contextmanager
def waits(text: str) -> Iterator[None]:
    """Say what a person waits for in the block, beside a sign that turns."""
    say(text)
    with nullcontext() if as_json() else _turning():
        yield


def _turning(text: str = "") -> Status:
    """A sign that turns on standard error for as long as it is entered."""
    from rich.console import Console

    return Console(stderr=True).status(text)


def be_sure(question: str, act: str, yes: bool) -> None:
    """Ask before what cannot be taken back, unless it is `yes`. Raises UsageMistake where nobody can be asked."""
    if yes:
        return
    if as_json() or not sys.stdin.isatty():
        raise UsageMistake(f"{question} Nobody can be asked here; say --yes if this is what you want.")
    say(question)
    typer.confirm(act, abort=True, err=True)


_BARS = "▁▂▃▄▅▆▇█"
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille character: left, right, from the top
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def style(text: str, *names: str, on: bool) -> str:
    """`text` in bold, dim, red, green, yellow or cyan; unchanged where colours are off."""
    if not on or not text:
        return text
    return f"\x1b[{';'.join(_STYLES[name] for name in names)}m{text}\x1b[0m"


def plain(text: str, limit: int = 0) -> str:
    """`text` on one line without control characters, at most `limit` characters long where one is given."""
    printable = "".join(" " if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") else c for c in text)
    return printable if not limit or len(printable) <= limit else printable[: limit - 1] + "…"


def size(count: float) -> str:
    """Bytes in the unit that reads best: `18.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Two units at the most: `0.42 s`, `42 s`, `3 min 05 s`, `2 h 10 min`, `5 d 3 h`."""
    if seconds < 9.5:
        return f"{max(0.0, round(seconds, 3)):.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def count(number: float) -> str:
    """A large number with a letter: `0.84 M`, `12.3 k`."""
    if number >= 1e9:
        return f"{number / 1e9:.2f} G"
    if number >= 1e5:
        return f"{number / 1e6:.2f} M"
    return f"{number / 1e3:.1f} k" if number >= 1e4 else f"{number:.0f}"


def why_held(hold: dict[str, Any]) -> str:
    until = hold["until"]
    when = f"; it goes on {time.strftime('%a %H:%M', time.localtime(until))}" if until is not None else ""
    return f"{plain(hold['why'])}{when}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of `values` in at most `width` characters, the newest at the right; averaged where there are more."""
    finite = [v for v in values if abs(v) < float("inf")]  # false for NaN as well
    if not finite:
        return ""
    if len(finite) > width:
        edges = [round(i * len(finite) / width) for i in range(width + 1)]
        finite = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(finite), max(finite)
    if high == low:
        return _BARS[0] * len(finite)
    return "".join(_BARS[round((v - low) / (high - low) * (len(_BARS) - 1))] for v in finite)


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """`height` lines with a curve of braille dots, `width` characters wide, behind a scale of 10 characters."""
    finite = [v for v in values if abs(v) < float("inf")]
    if not finite:
        return []
    low, high = min(finite), max(finite)
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]
    before = None
    for x in range(columns):
        value = finite[round(x * (len(finite) - 1) / (columns - 1))]
        y = round((high - value) / (high - low) * (rows - 1)) if high > low else rows // 2
        for dot in range(min(y, before + 1), max(y, before - 1) + 1) if before is not None else (y,):
            cells[dot // 4][x // 2] |= _DOTS[x % 2][dot % 4]
        before = y
    scale = {0: high, height // 2: (high + low) / 2, height - 1: low} if high > low else {height // 2: high}
    lines = ["".join(chr(0x2800 + dots) for dots in line) for line in cells]
    return [(f"{scale[y]:9.4g}" if y in scale else "").rjust(9) + " " + line for y, line in enumerate(lines)]


def live(screens: Iterator[tuple[Any, str]], interval: float) -> None:
    """Show one screen after the other, `interval` s apart, until q or Ctrl-C; in a pipe or as JSON, all of them."""
    with suppress(KeyboardInterrupt):
        if as_json() or not sys.stdout.isatty():
            for answer, text in screens:
                show(answer, text + "\n")
                time.sleep(interval)
            return
        from rich.live import Live
        from rich.text import Text

        with _keyboard() as keys, Live(screen=True, auto_refresh=False) as shown:
            for _, text in screens:
                lines = Text.from_ansi(text)
                lines.no_wrap, lines.overflow = True, "crop"
                shown.update(lines, refresh=True)
                if "q" in keys(interval):
                    return


@contextmanager
def _keyboard() -> Iterator[Callable[[float], str]]:
    """What is typed within so many seconds, without the enter key and unseen; the terminal is as before afterwards."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield lambda within: "".join(select([], [], [], within)[0])
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield lambda within: os.read(0, 64).decode(errors="ignore") if select([0], [], [], within)[0] else ""
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def bar(done: float, width: int) -> str:
    """A progress bar of `width` characters for a part `done` between 0 and 1."""
    filled = round(min(1.0, max(0.0, done)) * width)
    return "━" * filled + "─" * (width - filled)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> str:
    """Columns two spaces apart, headed; the columns in `right` are aligned right. Nothing where there is no row."""
    if not rows:
        return ""
    cells = [list(heads), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    return "\n".join(
        "  ".join(c.rjust(widths[i]) if i in right else c.ljust(widths[i]) for i, c in enumerate(row)).rstrip()
        for row in cells
    )


def beside(label: str, texts: Iterable[str]) -> list[str]:
    """Texts on a line each, the first of them behind a label."""
    return [f"{'' if number else label:<{LABEL}} {text}" for number, text in enumerate(texts)]


def age(since: float) -> str:
    """How long ago a time in seconds since 1970 is, by this machine's clock."""
    return duration(time.time() - since)


def called(peer: dict[str, Any]) -> str:
    """A peer of an answer as a person tells it from others: the name that it gave itself, if any, and its id."""
    id, name = short_peer(peer["peer_id"]), plain(peer.get("name") or "", 20)
    return f"{name} …{id[-6:]}" if name else id


def short_peer(peer_id: str) -> str:
    """A peer id that fits a line and can still be told from others: its end, as all of them begin alike."""
    clean = plain(peer_id)
    return clean if len(clean) <= 16 else f"{clean[:8]}…{clean[-6:]}"
