"""What `swarmnode local` does: a swarm trains, perhaps one node trains alone, then the summary and the report.

With `--json` standard output carries one JSON object a line and nothing else: `node` for each node in order, `round` as
rounds end, `summary` last. What is for people goes to standard error then.

A node that dies or freezes costs nothing here: the command ends with 0 and a summary when the others reached the last
round. It ends with 1 and the tail of the logs when none did. Ctrl-C and SIGTERM stop all nodes and show what was
reached, with exit code 130.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from swarmnode.cli.init import is_brought, tables_of
from swarmnode.cli.local.attack import Onlooker, make_identities, under_attack
from swarmnode.cli.local.report import Results, Summary, by_rollouts, figures, in_pairs, latest, summarize, write_report
from swarmnode.cli.local.swarm import LocalOptions, LocalSwarm, SwarmFailed
from swarmnode.cli.local.view import Lines, LiveTable
from swarmnode.cli.terminal import LEARNS_BY, UsageMistake, print_json
from swarmnode.node.config import OFF
from swarmnode.node.control.client import ControlClient, ControlError
from swarmnode.node.exitcodes import ERROR, FORCED, OK, ExpectedError
from swarmnode.training.rl.section import hf_folder
from swarmnode.training.runspec import RunSpec, load_runspec, parse_runspec, to_toml

EVALUATION_LIMIT = 300.0  # s for the thorough held-out loss, on one thread beside other nodes


def ask_for_heldout_loss(data_dir: Path) -> float:
    """The thorough held-out loss of the node that lives in `data_dir`, in bits per byte; in a run by rollouts, the
    reward on fresh questions. Raises ExpectedError or OSError, and of what is no such answer KeyError and the like."""
    answer = ControlClient(data_dir).call("evaluate", timeout=EVALUATION_LIMIT)
    measured = answer["reward"] if "reward" in answer else answer["heldout_bits_per_byte"]
    if measured is None:
        raise ControlError("it is no number, so training has diverged: lower [inner] lr or clip")
    return float(measured)


def run_local(options: LocalOptions) -> int:
    """Run `options` on the main thread, as nodes die with it; the exit code. Raises ExpectedError, SettingError."""
    began = time.monotonic()
    console = Console(stderr=options.json)
    try:
        spec = _runspec(options)
        policy = spec.rollouts.policy if hf_folder(spec.rollouts.policy) else ""
        options = replace(options, policy=policy, loss_unit=spec.loss_unit)
        if options.attack is not None:
            spec = under_attack(spec, options.attack)
        options.report.mkdir(parents=True, exist_ok=True)  # better to fail now than after the training
        folder = _folder(options)
        if options.attack is not None and spec.exchange.method == "open" and not spec.trust.validators:
            spec = spec.updated(trust={"validators": make_identities(folder, options.nodes)})
        (folder / "run.toml").write_text(to_toml(spec), encoding="utf-8")
    except OSError as error:
        raise ExpectedError(f"{error.filename} cannot be written: {error.strerror}; name another folder") from error

    swarm = LocalSwarm(options, folder)
    lone = LocalSwarm(replace(options, nodes=1, attack=None), folder, name="solo")
    onlooker = Onlooker(options.attack, swarm.nodes) if options.attack is not None else None
    code = OK
    heldout: float | None = None
    solo: float | None = None
    kept = f"data directories and logs of the nodes: {folder}"
    nodes = [(node.label, node.data_dir) for node in (*swarm.nodes, *(lone.nodes if options.solo else ()))]
    view = LiveTable(console) if console.is_terminal else Lines(console)
    with _sigterm_like_ctrl_c(), view, _page(nodes, folder, options.dashboard, view):
        try:
            heldout = _train(swarm, view, onlooker, emits=options.json)
            if options.solo:
                solo = _train(lone, view)
        except KeyboardInterrupt:
            code = FORCED
            view.remark("stopped before the end; the losses are those of the last round")
        except SwarmFailed as error:
            if heldout is None:  # there is nothing to summarize
                view.note(kept)
                raise
            code = ERROR
            view.remark(f"the node alone failed, so there is nothing to compare with: {error}")
        view.phase("writing the report")
        summary = summarize(
            swarm.reports,
            spec,
            parameters=swarm.parameters,
            heldout=latest(swarm.reports) if heldout is None else heldout,
            solo=latest(lone.reports) if solo is None else solo,
            seconds=time.monotonic() - began,
        )
        if summary.reward is not None and spec.rollouts.task == "digits" and summary.rounds < LEARNS_BY:
            chance = f"{spec.rollouts.difficulty**-2:.2g}"
            view.remark(f"who guesses earns {chance}; that policies learn shows by round {LEARNS_BY} or so (--rounds)")
        undefended = spec.exchange.method == "diloco"
        attack = None if onlooker is None else {**onlooker.summary(), "words": onlooker.words(undefended)}
        results = Results(spec, summary, swarm.nodes, lone.nodes[0], view.remarks, attack)
        page = None
        try:
            page = write_report(options.report, results)
        except OSError as error:
            view.remark(f"the report could not be written: {error}")
            code = code or ERROR

    _show(console, summary, page)
    for line in attack["words"] if attack else ():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if options.json:
        print_json({**summary.event(), **({} if onlooker is None else {"attack": onlooker.summary()})})
    if options.keep or options.data_dir is not None or code == ERROR:
        console.print(kept, highlight=False, soft_wrap=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)  # the figures are shown already; what cannot be deleted stays
    return code


def _runspec(options: LocalOptions) -> RunSpec:
    """What is run. Raises SettingError, UsageMistake."""
    task = options.task
    if options.run_file is not None:
        if task and not is_brought(task):
            raise UsageMistake(f"--task {task} is a run by itself; leave out the run file {options.run_file}")
        return load_runspec(options.run_file)
    tables = tables_of(task or "byte-lm", name="local" if task else "byte-lm")
    tables["run"] |= {"trust": "open"} if options.attack is not None and not task else {}
    return parse_runspec(tables, source=f"--task {task}" if task else "the built-in run")


def _folder(options: LocalOptions) -> Path:
    """Where the nodes live. Raises OSError."""
    if options.data_dir is not None:
        options.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return options.data_dir.resolve()
    state = os.environ.get("XDG_STATE_HOME") or tempfile.gettempdir()
    Path(state).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="swarmnode-local-", dir=state)).resolve()


def _train(swarm: LocalSwarm, view: Lines, onlooker: Onlooker | None = None, *, emits: bool = False) -> float | None:
    """Run one swarm from start to stop; returns its held-out loss. Raises SwarmFailed."""
    who = "one node alone" if len(swarm.nodes) == 1 else f"{len(swarm.nodes)} nodes"
    with swarm:
        view.phase(f"starting {who}")
        view.show(swarm)
        for _ in swarm.start():
            view.show(swarm)
        if emits:
            for index, node in enumerate(swarm.nodes):
                assert node.ready is not None
                told = {name: node.ready.get(name) for name in ("trainer_pid", "peer_id", "multiaddr")}
                about = {"node": index, "pid": node.pid, "data_dir": str(node.data_dir), **told}
                print_json({"event": "node", **about, **({"lie": node.lie} if node.lie else {})})
        view.phase(f"training with {who}")
        for arrived in swarm.watch():
            if arrived is not None and onlooker is not None and arrived[1]["event"] == "round":
                onlooker.saw(*arrived)
            view.show(swarm)
            if arrived is not None:
                node, event = arrived
                if event["event"] == "round" and emits:
                    print_json({"event": "round", "node": swarm.nodes.index(node), **event})
                elif event["event"] == "warning":
                    view.remark(f"node {node.label}: {event.get('message')}")
                elif event["event"] == "caught_up":
                    view.remark(f"node {node.label} caught up at round {event.get('round')}")
        view.phase("measuring the reward" if by_rollouts(swarm.reports) else "measuring the held-out loss")
        heldout = _heldout_loss(swarm, view)
        view.phase("stopping the nodes")
    view.settle()
    return heldout


@contextmanager
def _page(nodes: Sequence[tuple[str, Path]], folder: Path, address: str, view: Lines) -> Iterator[None]:
    """The page that shows all nodes, for as long as the block runs."""
    with ExitStack() as stack:
        if address != OFF:
            from swarmnode.node.dashboard.server import served

            try:
                view.note(f"watch it in a browser: {stack.enter_context(served(nodes, folder, address))}")
            except (OSError, ValueError) as error:
                view.remark(f"there is no page to watch it: {address} cannot be served: {error}")
        yield


def _heldout_loss(swarm: LocalSwarm, view: Lines) -> float | None:
    """Measured by the first node that answers, where all hold the same parameters. Else the loss of the last round.

    Where each has parameters of its own, the mean of all who answer; in a run by rollouts that of their rewards.
    """
    rewarded = by_rollouts(swarm.reports)
    each = rewarded or in_pairs(swarm.reports)
    what = "its reward" if rewarded else "the held-out loss"
    found: list[float] = []
    for node in swarm.survivors():
        if not found or each:
            try:
                found.append(ask_for_heldout_loss(node.data_dir))
            except (ExpectedError, OSError, KeyError, TypeError, ValueError) as error:
                view.remark(f"node {node.label} could not measure {what}: {error}")
    if found:
        return fmean(found)
    instead = "that of the answers" if rewarded else "the shorter measurement"
    view.remark(f"no node measured {what}; the figure is {instead} of the last round")
    return latest(swarm.reports)


def _show(console: Console, summary: Summary, page: Path | None) -> None:
    shown = Table.grid(padding=(0, 2))
    for name, value in figures(summary):
        shown.add_row(name, value)
    if page is not None:
        shown.add_row("report", str(page))
    console.print(shown)


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """A supervisor's SIGTERM stops the nodes and shows what was reached, like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
