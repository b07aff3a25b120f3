"""`swarmnode history`: the rounds of a run as this node saw them end, from the file that it keeps."""

from __future__ import annotations

import csv
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any

import typer

from swarmnode.cli.terminal import (
    UsageMistake,
    as_json,
    count,
    curve,
    directory,
    duration,
    number_of,
    plain,
    print_json,
    run_meant,
    say,
    short_peer,
    show,
    size,
    spec_of,
    table,
)
from swarmnode.node.exitcodes import CONFIG, ExpectedError
from swarmnode.node.storage.datadir import DataDir, explaining
from swarmnode.node.storage.history import ALL, HISTORY, MOST, figures
from swarmnode.training.options import installing

Write = Callable[[dict[str, Any]], None]  # of one round

PLOT_HEIGHT = 14  # lines
FOLLOW_EVERY = 1.0  # seconds
STAGES = ("trained_s", "exchange_s", "commit_s", "reveal_s", "judge_s", "waited_s")
COLUMNS = (
    *("round", "time", "loss", "trained_loss", "accuracy", "reward", "heldout_reward", "seconds", *STAGES),
    *("steps", "tokens", "members", "missing", "outcome", "own", "share", "bytes_in", "bytes_out", "steered"),
)


def history(
    run_id: Annotated[
        str | None,
        typer.Argument(metavar="RUN", show_default=False, help="Its name, or how its id begins. [default: see above]"),
    ] = None,
    since: Annotated[int, typer.Option(min=0, metavar="ROUND", help="First round.")] = 0,
    last: Annotated[int, typer.Option(min=1, metavar="ROUNDS", help="So many rounds in the table, the newest.")] = 20,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values. [default: table]")] = False,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the curve of loss or reward. [default: table]")] = False,
    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write them there for TensorBoard, in a folder of the run. [default: no]"),
    ] = None,
    wandb: Annotated[
        str | None,
        typer.Option(metavar="PROJECT", help="Write them as a run of this Weights & Biases project. [default: no]"),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on writing as rounds end, until Ctrl-C. [default: those so far]")
    ] = False,
) -> None:
    """Show the rounds of a run as this node saw them end.

    Of each: loss or reward, what took how long, who was missing, bytes.

    RIGHT is the share of held-out tokens that the model expects first; FRESH the reward on fresh questions.
    It comes from the disk, whether or not the node is running; without RUN it is of the run that the node is in, or of
    the only one there is. Of more than 1000 rounds, --csv, --plot and --json have at most 1000, evenly apart. Example:
    swarmnode history --csv > rounds.csv
    """
    if as_csv + plot + as_json() > 1:
        raise UsageMistake("--csv, --plot and --json exclude one another; give one of them")
    written_elsewhere = tensorboard is not None or wandb is not None
    if (as_csv or plot) if written_elsewhere else follow:
        raise UsageMistake("--follow goes with --tensorboard and --wandb, and --csv and --plot do not; leave it out")
    home = DataDir(directory())
    answer = run_on_disk(home, run_meant(home, run_id, "swarmnode history "), since)
    rounds = answer["rounds"]
    newest, given = rounds[-last:], _given(rounds)
    if not written_elsewhere:
        answer["rounds"] = rounds = rounds[::-1][:: max(1, -(-len(rounds) // MOST))][::-1]
    if written_elsewhere:
        told = None
        while told is None:
            places = [] if tensorboard is None else [_for_tensorboard(tensorboard.expanduser(), answer)]
            places += [] if wandb is None else [_for_wandb(wandb, home, answer)]
            told = _write(places, home, answer, since=since, follow=follow)
        show({"run_id": answer["run_id"], "written": told}, f"{number_of(told, 'round')} written")
    elif as_json():
        print_json(answer)
    elif not rounds:
        say("no round has ended here yet" if not since else f"no round has ended here since round {since}")
    elif as_csv:
        written = csv.DictWriter(sys.stdout, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
        written.writeheader()
        for each in rounds:
            written.writerow({**each, "missing": " ".join(each.get("missing", ())), "steered": _steered(each)})
    elif plot:
        print("\n".join(_plot(answer)))
    else:
        print("\n".join([*_table({**answer, "rounds": newest}), given]))


def run_on_disk(home: DataDir, run_id: str, since: int = 0) -> dict[str, Any]:
    """As the daemon's method `history` answers. Raises DataDirError."""
    name = unit = ""
    if (spec := spec_of(home, run_id)) is not None:  # else the rounds can be read all the same
        name, unit = spec.run.name, spec.loss_unit
    rounds = figures(home.run(run_id) / HISTORY, since, most=ALL)
    return {"run_id": run_id, "name": name, "unit": unit, "rounds": rounds}


# -- for other programs that draw curves


def _write(
    places: Sequence[AbstractContextManager[Write]], home: DataDir, answer: dict[str, Any], *, since: int, follow: bool
) -> int | None:
    """Tell each place the rounds in the answer, and with `follow` those that end from then on; how many there were.

    None where the node went over to another history, which is then in the answer: it is to be written anew. With
    `follow` a first SIGINT waits for what is being written, and a second one interrupts it.
    """
    told, rounds, ended = 0, answer["rounds"], []
    newest: dict[str, Any] = {"round": since}
    with ExitStack() as stack:
        if follow:
            stack.callback(signal.signal, signal.SIGINT, interrupt := signal.getsignal(signal.SIGINT))
            signal.signal(signal.SIGINT, lambda number, _: ended.append(signal.signal(number, interrupt)))
        writers = [stack.enter_context(place) for place in places]
        while True:
            for newest in rounds:
                for write in writers:
                    write(newest)
                told += 1
            if follow:
                time.sleep(FOLLOW_EVERY)
            if ended or not follow:
                break
            rounds = run_on_disk(home, answer["run_id"], newest["round"])["rounds"]
            if told and [each["time"] for each in rounds[:1]] == [newest["time"]]:
                del rounds[0]
            elif told and (rounds := run_on_disk(home, answer["run_id"], since)["rounds"]):
                answer["rounds"] = rounds
                return None
    return told


def _numbers(each: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in each.items() if isinstance(v, int | float) and k not in ("round", "time")}


@contextmanager
def _for_tensorboard(folder: Path, answer: dict[str, Any]) -> Iterator[Write]:
    """Writes rounds into a file of events, in place of those that were written before."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise _lacking("tensorboard", error) from error
    folder /= f"{answer['name']}-{answer['run_id'][:12]}"
    with explaining(folder):
        for before in folder.glob("events.out.tfevents.*"):
            before.unlink()
        file = EventFileWriter(str(folder))

    def write(each: dict[str, Any]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in _numbers(each).items()]
        file.add_event(Event(wall_time=each["time"], step=each["round"], summary=Summary(value=values)))
        file.flush()

    with closing(file):
        yield write


@contextmanager
def _for_wandb(project: str, home: DataDir, answer: dict[str, Any]) -> Iterator[Write]:
    """Writes rounds as a new run of a project, in the mode that WANDB_MODE says."""
    try:
        import wandb
    except ImportError as error:
        raise _lacking("wandb", error) from error
    spec = spec_of(home, answer["run_id"])
    told = {"project": project, "name": answer["name"], "group": answer["run_id"][:12]}
    try:
        with wandb.init(**told, config=asdict(spec) if spec is not None else {}) as run:
            yield lambda each: run.log(_numbers(each), step=each["round"])
    except wandb.Error as error:
        hint = "(WANDB_MODE=offline keeps the run on this disk, for wandb sync)"
        raise ExpectedError(f"--wandb {project}: Weights & Biases refused: {str(error).rstrip('.')}; {hint}") from error


def _lacking(extra: str, error: ImportError) -> ExpectedError:
    return ExpectedError(
        f"--{extra} needs another package ({error}): {installing(f'swarmnode[{extra}]')}", exit_code=CONFIG
    )


def measured(rounds: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """The curve of a run: rounds, and their loss, or reward where there is none."""
    name = "reward" if any("reward" in each for each in rounds) else "loss"
    return [(each["round"], each[name]) for each in rounds if name in each]


def _plot(answer: dict[str, Any]) -> Iterator[str]:
    points = measured(answer["rounds"])
    if not points:
        yield "nothing was measured in these rounds"
        return
    width = max(20, min(get_terminal_size().columns, 120) - 12)
    yield f"{plain(answer['name'], 24)}  {answer['run_id'][:12]}   {plain(answer['unit'], 32)}"
    yield from curve([value for _, value in points], width, PLOT_HEIGHT)
    first, newest = f"round {points[0][0]}", f"round {points[-1][0]}"
    yield " " * 10 + first + newest.rjust(width - len(first))


def _table(answer: dict[str, Any]) -> Iterator[str]:
    rounds = answer["rounds"]
    stages = [stage for stage in STAGES if any(stage in each for each in rounds)]
    unit = plain(answer["unit"], 32)
    yield f"{plain(answer['name'], 24)}  {answer['run_id'][:12]}   seconds of each part{f'; {unit}' if unit else ''}"
    values = ("REWARD", "FRESH") if any("reward" in each for each in rounds) else ("LOSS", "RIGHT")
    parts = (stage.removesuffix("_s").upper() for stage in stages)
    steered = ["STEERED"] if any("steered" in each for each in rounds) else []
    heads = ("ROUND", "TIME", *values, "SECONDS", *parts, "MEMBERS", "OWN WORK", "IN", "OUT", "MISSING", *steered)
    rows = [_row(each, stages) + [_steered(each) for _ in steered] for each in rounds]
    yield table(heads, rows, right=frozenset({0, *range(2, 6 + len(stages))}))


def _given(rounds: Sequence[dict[str, Any]]) -> str:
    tokens, trained, came, went = (
        sum(each.get(name, 0) for each in rounds) for name in ("tokens", "trained_s", "bytes_in", "bytes_out")
    )
    counted = sum(each.get("own") == "accepted" for each in rounds)
    return (
        f"this node's work counted in {counted} of {number_of(len(rounds), 'round')}: {count(tokens)} tokens, "
        f"{duration(trained)} of training, {size(came)} in, {size(went)} out"
    )


def _row(each: dict[str, Any], stages: Sequence[str]) -> list[str]:
    value = each.get("reward", each.get("loss"))
    second = each.get("heldout_reward", each.get("accuracy"))
    missing = [f"{short_peer(peer)} ({plain(each['why'][peer], 40)})" for peer in each.get("missing", ())[:2]]
    more = len(each.get("missing", ())) - len(missing)
    return [
        str(each["round"]),
        time.strftime("%m-%d %H:%M:%S", time.localtime(each["time"])),
        "-" if value is None else f"{value:.4f}",
        "-" if second is None else f"{second:.1%}",
        *(f"{each[name]:.2f}" if name in each else "-" for name in ("seconds", *stages)),
        str(each.get("members", "-")),
        plain(each.get("own", "-"), 40),
        *(size(each[name]) if name in each else "-" for name in ("bytes_in", "bytes_out")),
        ", ".join(missing) + (f" and {more} more" if more else ""),
    ]


def _steered(each: dict[str, Any]) -> str:
    return plain(" ".join(f"{key}={value}" for key, value in each.get("steered", {}).items()), 80)
