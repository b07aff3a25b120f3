"""What `swarmnode local` does: a swarm trains, perhaps one node trains alone, then the summary and the report.

With `--json` standard output carries one JSON object a line and nothing else: `node` for each node in order, `round` as
rounds end, `summary` last. What is for people goes to standard error then.

A node that dies or freezes costs nothing here: the command ends with 0 and a summary when the others reached the last
round. It ends with 1 and the tail of the logs when none did. Ctrl-C and SIGTERM stop all nodes and show what was
reached, with exit code 130.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from swarmnode.cli.local.attack import Attack, Onlooker, make_identities, under_attack
from swarmnode.cli.local.report import (
    NodeFacts,
    Results,
    by_rollouts,
    curve,
    figures,
    strict_json,
    summarize,
    write_report,
)
from swarmnode.cli.local.swarm import AllNodesDied, LocalSwarm, NodeProcess, StartFailed, SwarmSettings
from swarmnode.cli.local.view import Lines, snapshot, view_for
from swarmnode.node import exitcodes
from swarmnode.node.control.client import ControlClient, ControlError, NotRunning
from swarmnode.training.options import SettingError
from swarmnode.training.runspec import RunSpec, load_runspec, parse_runspec, to_toml

EVALUATION_LIMIT = 300.0  # s for the thorough held-out loss, on one thread beside other nodes

Measure = Callable[[Path], float]  # data directory of a running node -> held-out loss in bits per byte
Emit = Callable[[dict[str, Any]], None]


class NotMeasured(Exception):
    """A node could not be asked for the held-out loss, or did not answer with a number."""


@dataclass(frozen=True)
class LocalOptions:
    """The command line of `swarmnode local`."""

    nodes: int
    rounds: int
    run_file: Path | None = None  # None is the built-in byte-lm run
    solo: bool = False
    json: bool = False
    threads: int = 1
    report: Path = Path("report")
    keep: bool = False
    data_dir: Path | None = None  # None is a temporary folder, removed at the end
    attack: Attack | None = None  # by the last nodes


@dataclass
class Ending:
    """How the training ended; filled in as it goes, so that an interruption leaves what was reached."""

    code: int = exitcodes.OK
    heldout: float | None = None
    solo: float | None = None
    notes: list[str] = field(default_factory=list)
    failure: str | None = None  # why there is nothing to summarize


def ask_for_heldout_loss(data_dir: Path) -> float:
    """The thorough held-out loss, in bits per byte, of the node that lives in `data_dir`. Raises NotMeasured.

    In a run by rollouts it is the reward on fresh questions.
    """
    try:
        answer = ControlClient(data_dir).call("evaluate", timeout=EVALUATION_LIMIT)
        return float(answer["reward"] if "reward" in answer else answer["heldout_bits_per_byte"])
    except (ControlError, NotRunning, OSError, KeyError, TypeError, ValueError) as error:
        raise NotMeasured(str(error)) from error


def run_local(
    options: LocalOptions, *, command: Sequence[str] | None = None, measure: Measure = ask_for_heldout_loss
) -> int:
    """Do what `options` say; returns the exit code. `command` replaces the daemon's program, `measure` the question for
    the held-out loss. To be called from the main thread: of Ctrl-C, and because the nodes die with it."""
    began = time.monotonic()
    console = Console(stderr=options.json)
    try:
        spec = _runspec(options.run_file, attacked=options.attack is not None)
        options.report.mkdir(parents=True, exist_ok=True)  # better to fail now than after the training
        folder = _folder(options)
        if options.attack is not None:
            spec = under_attack(spec, options.attack, make_identities(folder, options.nodes))
        (folder / "run.toml").write_text(to_toml(spec), encoding="utf-8")
    except SettingError as error:
        return _complain(str(error), exitcodes.CONFIG)
    except OSError as error:
        return _complain(f"{error.filename} cannot be written: {error.strerror}; name another folder", exitcodes.ERROR)

    settings = SwarmSettings(options.nodes, options.rounds, options.threads, folder / "run.toml", folder)
    if options.attack is not None:
        settings = replace(settings, lie=options.attack.lie, liars=options.attack.liars)
    swarm = LocalSwarm(settings, command=command)
    lone = LocalSwarm(replace(settings, nodes=1, name="solo"), command=command)
    onlooker = Onlooker(options.attack, swarm.nodes) if options.attack is not None else None
    ending = Ending()
    with _sigterm_like_ctrl_c(), view_for(console) as view:
        try:
            ending.heldout = _train(swarm, view, ending, measure, _emit if options.json else _ignore, onlooker)
            if options.solo:
                ending.solo = _train(lone, view, ending, measure, _ignore)
        except KeyboardInterrupt:
            ending.code = exitcodes.FORCED
            _remark(view, ending, "stopped before the end; the losses are those of the last round")
        except (StartFailed, AllNodesDied) as error:
            ending.code = exitcodes.ERROR
            if ending.heldout is None:
                ending.failure = str(error)
            else:
                _remark(view, ending, f"the node alone failed, so there is nothing to compare with: {error}")
        if ending.failure is None:
            view.phase("writing the report")
            results = _results(spec, swarm, lone, ending, time.monotonic() - began)
            page = _write_report(options.report, results, view, ending)

    if ending.failure is not None:
        _complain(ending.failure, ending.code)
    else:
        _show(console, results, page)
        if onlooker is not None:
            for line in onlooker.words(undefended=spec.exchange.method == "diloco"):
                console.print(line, highlight=False, markup=False, soft_wrap=True)
        if options.json:
            attacked = {} if onlooker is None else {"attack": onlooker.summary()}
            _emit({**results.summary.event(), **attacked})
    if options.keep or options.data_dir is not None or ending.code == exitcodes.ERROR:
        console.print(f"data directories and logs of the nodes: {folder}", highlight=False, soft_wrap=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)  # the figures are shown already; what cannot be deleted stays
    return ending.code


def _runspec(run_file: Path | None, *, attacked: bool) -> RunSpec:
    if run_file is not None:
        return load_runspec(run_file)
    trust = {"trust": "open"} if attacked else {}
    return parse_runspec({"run": {"name": "byte-lm", "seed": 1, **trust}}, source="the built-in run")


def _folder(options: LocalOptions) -> Path:
    """Where the nodes live. Raises OSError."""
    if options.data_dir is not None:
        options.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return options.data_dir.resolve()
    state = os.environ.get("XDG_STATE_HOME") or tempfile.gettempdir()
    Path(state).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="swarmnode-local-", dir=state)).resolve()


def _train(
    swarm: LocalSwarm,
    view: Lines,
    ending: Ending,
    measure: Measure,
    emit: Emit,
    onlooker: Onlooker | None = None,
) -> float | None:
    """Run one swarm from start to stop; returns its held-out loss. Raises StartFailed, AllNodesDied."""
    alone = len(swarm.nodes) == 1
    who = "one node alone" if alone else f"{len(swarm.nodes)} nodes"
    with swarm:
        view.phase(f"starting {who}")
        view.show(snapshot(swarm))
        for _ in swarm.start():
            view.show(snapshot(swarm))
        for index, node in enumerate(swarm.nodes):
            emit(_node_event(index, node))
        view.phase(f"training with {who}")
        for arrived in swarm.watch():
            if arrived is not None and onlooker is not None and arrived[1]["event"] == "round":
                onlooker.saw(*arrived)
            view.show(snapshot(swarm, onlooker))
            if arrived is not None:
                node, event = arrived
                if event["event"] == "round":
                    emit({"event": "round", "node": swarm.nodes.index(node), **event})
                elif event["event"] == "warning":
                    _remark(view, ending, f"node {node.label}: {event.get('message')}")
                elif event["event"] == "caught_up":
                    _remark(view, ending, f"node {node.label} caught up at round {event.get('round')}")
        view.phase("measuring the reward" if by_rollouts(swarm.reports) else "measuring the held-out loss")
        heldout = _heldout_loss(swarm, view, ending, measure)
        view.phase("stopping the nodes")
    view.settle()
    return heldout


def _node_event(index: int, node: NodeProcess) -> dict[str, Any]:
    assert node.ready is not None
    return {
        "event": "node",
        "node": index,
        "pid": node.pid,
        "trainer_pid": node.ready.get("trainer_pid"),
        "peer_id": node.ready.get("peer_id"),
        "data_dir": str(node.data_dir),
        "multiaddr": node.ready.get("multiaddr"),
        **({"lie": node.lie} if node.lie else {}),
    }


def _heldout_loss(swarm: LocalSwarm, view: Lines, ending: Ending, measure: Measure) -> float | None:
    """Measured by the first node that answers; all hold the same parameters. Else the loss of the last round.

    In a run by rollouts, where each has a policy of its own: the mean reward of all who answer.
    """
    rewarded = by_rollouts(swarm.reports)
    what = "its reward" if rewarded else "the held-out loss"
    found: list[float] = []
    for node in swarm.survivors():
        if not found or rewarded:
            try:
                found.append(measure(node.data_dir))
            except NotMeasured as error:
                _remark(view, ending, f"node {node.label} could not measure {what}: {error}")
    if found:
        return fmean(found)
    instead = "that of the answers" if rewarded else "the shorter measurement"
    _remark(view, ending, f"no node measured {what}; the figure is {instead} of the last round")
    return _last_loss(swarm)


def _last_loss(swarm: LocalSwarm) -> float | None:
    measured = curve(swarm.reports)
    return measured[-1][1] if measured else None


def _results(spec: RunSpec, swarm: LocalSwarm, lone: LocalSwarm, ending: Ending, seconds: float) -> Results:
    ready = [node.ready for node in swarm.nodes if node.ready is not None]
    return Results(
        run=spec.run.name,
        run_id=next((str(said["run_id"]) for said in ready if said.get("run_id")), "not known"),
        summary=summarize(
            swarm.reports,
            parameters=swarm.parameters,
            heldout=_last_loss(swarm) if ending.heldout is None else ending.heldout,
            solo=_last_loss(lone) if ending.solo is None else ending.solo,
            seconds=seconds,
            by_rollouts=not spec.needs_data,
        ),
        nodes=tuple(
            NodeFacts(node.label, str((node.ready or {}).get("peer_id", "")), node.state, tuple(node.reports))
            for node in swarm.nodes
        ),
        solo=tuple(lone.nodes[0].reports),
        notes=tuple(ending.notes),
    )


def _write_report(folder: Path, results: Results, view: Lines, ending: Ending) -> Path | None:
    """The report's page; None where it could not be written."""
    try:
        if not write_report(folder, results):
            _remark(view, ending, "the report has no picture: pip install matplotlib")
    except OSError as error:
        _remark(view, ending, f"the report could not be written: {error}")
        ending.code = ending.code or exitcodes.ERROR
        return None
    return folder / "index.html"


def _show(console: Console, results: Results, page: Path | None) -> None:
    """The summary for people."""
    shown = Table.grid(padding=(0, 2))
    for name, value in figures(results.summary):
        shown.add_row(name, value)
    if page is not None:
        shown.add_row("report", str(page))
    console.print(shown)


def _remark(view: Lines, ending: Ending, text: str) -> None:
    """Say it now and in the report."""
    ending.notes.append(text)
    view.note(text)


def _complain(message: str, code: int) -> int:
    typer.echo(f"swarmnode: {message}", err=True)
    return code


def _emit(event: dict[str, Any]) -> None:
    print(json.dumps(strict_json(event), allow_nan=False), flush=True)


def _ignore(event: dict[str, Any]) -> None:
    """For a swarm whose events nobody reads."""


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """A supervisor's SIGTERM stops the nodes and shows what was reached, like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
