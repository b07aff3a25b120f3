"""Which run a node takes part in: one by a TOML file on this machine, one in its data directory, or one of peers.

A specification that a peer sends must hash to the run id, and contains numbers and names only, never code.

And which there are, for `swarmnode discover` and `swarmnode join NAME`: where no daemon runs, `look_around` makes a
node that lasts as long as the search, with this machine's key, on any free port, in no run.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import trio

from swarmnode.node.assembly import Node, RunOptions, at_home, check_admitted
from swarmnode.node.config import NodeConfig
from swarmnode.node.exitcodes import CONFIG, ExpectedError
from swarmnode.node.host.addresses import parse
from swarmnode.node.logs import show_ahead
from swarmnode.node.process import reason_of
from swarmnode.node.storage.checkpoints import newest_round
from swarmnode.node.storage.cutting import finishing, publish
from swarmnode.node.storage.datadir import RUN_ID, ChosenRun, RunStore, RunUnavailable
from swarmnode.node.storage.datasets import shown
from swarmnode.node.succession import begun_from, tokenizer_beside
from swarmnode.node.trainer.child import with_base
from swarmnode.protocols.calls.rpc import CallError
from swarmnode.protocols.catalogue import FoundRun
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.peers.hello import Incompatible, greet, serve_hello
from swarmnode.protocols.runner import in_thread
from swarmnode.protocols.state.membership import RunListing, ask_runs, ask_spec
from swarmnode.training.options import SettingError, installing
from swarmnode.training.rl.section import asked_by
from swarmnode.training.runspec import BUILT_IN, RunSpec, decode, load_runspec
from swarmnode.training.tasks import needs_text, task_source

logger = logging.getLogger(__name__)

ANSWER_WITHIN = 30.0  # seconds for a join address to be reached and to tell its runs
REFUSED_FOR = 8.0  # seconds that others have to come, found through the DHT, once a peer does not know the run
OTHERS_WITHIN = 1.0  # seconds that others have to tell their runs, once one has
ASK_EVERY = 1.0  # seconds
RUNS = 4  # of one peer that a person is shown
NAME = 64  # characters of a run's name that a person is shown
SEARCH = 20.0  # seconds of a search
NONCE = 16  # random bytes that tell a run from another one by the same file


class NoRun(ExpectedError):
    """The command line does not say which run, and it cannot be guessed."""

    exit_code = CONFIG


class RunFinder:
    """Finds the run that the command line means, on disk or among peers."""

    def __init__(self, node: Node) -> None:
        self._node, self._store, self._network = node, node.store, node.network

    async def choose(self) -> ChosenRun:
        """The run, which is kept from now on; where the owner chooses it on the page, as soon as one can be had.

        Raises SettingError, RunUnavailable, NoRun or CorpusError, each with what to do.
        """
        node = self._node
        if not node.options.choose:
            return await self._found()
        if not node.dashboard:
            raise NoRun(
                "the run is to be chosen on the node's page, and there is none: start the node with one (--dashboard), "
                "or name the run (swarmnode run RUN.toml, swarmnode join LINK)"
            )
        while True:
            node.want(await node.choice.made())
            try:
                return await self._found()
            except Exception as error:
                reason = reason_of(error)
                if not isinstance(reason, (ExpectedError, SettingError)):
                    raise
                logger.warning("the run that was chosen cannot be had: %s", reason)
                node.choice.refused = str(reason)

    async def _found(self) -> ChosenRun:
        """The run that options and settings name. Raises as `choose` does."""
        options, config = self._node.options, self._node.config
        file, run_id, joining = options.runspec, options.run_id, bool(config.join)
        creator, tokenizer = False, ""
        if file is not None:
            loaded = file if isinstance(file, RunSpec) else await in_thread(partial(load_runspec, file))
            based, tokenizer = await with_base(loaded, config.base)
            spec = await in_thread(lambda: begun_from(based, config.weights))
            tokenizer = tokenizer or tokenizer_beside(config.weights)
            creator = True
        elif run_id is not None:
            here = await in_thread(lambda: [known for known in self._store.known() if known.startswith(run_id)])
            known = await in_thread(lambda: self._store.load(here[0])) if here else None
            spec = known if known is not None else await self._from_peers(run_id)
        elif joining:
            spec = await self._run_of_peers()
        else:
            spec = await self._only_known_run()
        spec = await in_thread(lambda: with_gym(_with_task(spec, config.task, creator), creator))
        with_text, file_names_text = needs_text(spec.task.name, config.task), bool(spec.data.index)
        with finishing(self._node.shard_store, self._store):
            if with_text and creator:
                spec = await self._published(spec, config.tokenizer or tokenizer)
            elif with_text and not spec.data.index:
                raise RunUnavailable(f"run {spec.run.name} ({spec.run_id[:12]}…) names no data: ask whoever made it")
            if creator:
                resolved = spec
                spec = await in_thread(lambda: self._begun_here(resolved, file_names_text, joining))
            chosen = ChosenRun(spec, spec.run_id, creator)
            check_admitted(chosen.spec, self._network.me)
            await in_thread(lambda: self._store.keep(chosen.spec))
        return chosen

    async def _published(self, spec: RunSpec, tokenizer: str) -> RunSpec:
        """With this node's corpus cut into shards. Raises NoRun, CorpusError, NoSpace or ShardError."""
        config, store = self._node.config, self._node.shard_store
        if config.data == "local" and spec.data.source == "shards" and not spec.data.index:
            raise NoRun(
                "--data local keeps the text of a node that joins a run, and this node begins one: it would publish "
                'the corpus. Write source = "local" below [data] in the run file (the held-out tenth is published '
                "even then), or leave out --data local."
            )
        async with shown(self._node.emit) as meter:
            return await in_thread(lambda: publish(spec, config.corpus, store, tokenizer=tokenizer, meter=meter))

    def _begun_here(self, spec: RunSpec, names_text: bool, joining: bool) -> RunSpec:
        """The run that this node began by the file, or else a new one. Blocking.

        Where the file does not say so, a new run's nonce is drawn, and its creator owns and judges it: nobody else's
        run is it. One that a nonce in the file makes the same on several machines is begun by any of them, so that it
        has the owner whom the file names, or none.
        A node that joins others by such a file would begin a run of its own, which nobody wants; nor does who restarts
        it by a file that does not say which text it is of (`names_text`), and another text is here now. Raises NoRun.
        """
        begun = spec.begun_by(self._network.me)
        before = {run.run_id: run for run in self._store.specs() if _is_by(run, begun)}
        if len(before) > 1:
            raise NoRun(f"{len(before)} runs by this file are known here; say which:\n{self._listed(before)}")
        if before:
            (known,) = before.values()
            return known
        open_ = {"data": {"index": "", "tokenizer": ""}, "task": {"heldout_sha256": ""}}
        of_file = begun.updated(**open_)
        owner = spec.run.owner or ("" if begun.owner or spec.run.nonce else self._network.me)
        own = [run for run in self._store.specs() if run.owner == (begun.owner or owner)]
        apart = {run.run_id: run for run in own if _is_by(run.updated(**open_), of_file)}
        if apart and not names_text and not spec.run.nonce:
            raise NoRun(
                "the text here is another than when this node began a run by this file, as of a corpus that grew or of "
                f"another version of Python; a run keeps its text. Go on with it by its id:\n{self._listed(apart)}\n"
                "or write a nonce of your own below [run] in the file, to begin a new one"
            )
        nonce = spec.run.nonce or secrets.token_hex(NONCE)
        if joining and begun != spec:
            raise NoRun(
                "the run file does not say who judges the run ([trust] validators), so its run id depends on who "
                "begins it: join by a link in place of the file (swarmnode id --join prints it there), "
                "or list the validators' peer ids in the file"
            )
        if joining and not spec.run.nonce:
            raise NoRun(
                "the run file has no nonce, so it begins a run of its own wherever it is used, and this node is to "
                "join others: join by a link in place of the file (swarmnode id --join prints it "
                "there). To begin a run all the same, or one run from this file on several machines, write "
                f'nonce = "{nonce}" below [run] in the file.'
            )
        return begun.updated(run={"nonce": nonce, "owner": owner})

    async def _only_known_run(self) -> RunSpec:
        known = self._store.known()
        if not known:
            raise NoRun(
                "no run is named and none is known here: give a run file (swarmnode init writes one, swarmnode "
                "run RUN.toml begins it), or a link to join one by (swarmnode join LINK); swarmnode open lets you "
                "choose one in a browser"
            )
        if len(known) > 1:
            raise NoRun(f"{len(known)} runs are known here; say which:\n{self._listed(known)}")
        spec = self._store.load(known[0])
        if spec is None:
            raise NoRun(f"run {known[0][:12]} lost its specification; name its file or a node to join")
        logger.info("going on with run %s (%s)", spec.run.name, known[0][:12])
        return spec

    def _listed(self, known: Iterable[str]) -> str:
        """The commands that go on with these runs, with what each is, the one that was saved last first. Blocking."""
        lines = []
        for run in kept_runs(self._store, known):
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["saved"]))
            has = f"begun {when}, no checkpoint" if run["rounds"] is None else f"{run['rounds']} rounds, saved {when}"
            lines.append(f"  swarmnode run --run {run['run_id']}  # {run['name'] or 'damaged'}, {has}")
        return "\n".join(lines)

    async def _peers(self) -> tuple[PeerId, ...]:
        """Connected peers, as soon as there are any. Raises RunUnavailable."""
        if not self._network.peers():
            logger.info("waiting up to %.0f s for a node of the swarm to answer", ANSWER_WITHIN)
        with trio.move_on_after(ANSWER_WITHIN):
            while not self._network.peers() and not self._node.discovery.gave_up:  # noqa: ASYNC110
                await trio.sleep(0.1)
        peers = tuple(view.peer for view in self._network.peers())
        if not peers:
            failures = self._node.discovery.join_failures
            tried = "\n".join(f"  {address}: {why.removeprefix(f'{address}: ')}" for address, why in failures.items())
            raise RunUnavailable(
                "nobody answered, so the run cannot be fetched. Tried:\n"
                f"{tried or '  no address'}\nCheck that the node is running and the address is complete "
                "(swarmnode id --join prints it there), then start again."
            )
        return peers

    async def _run_of_peers(self) -> RunSpec:
        """The run that the nodes there take part in; where none tells of one, the only one that is known here."""
        try:
            found = await self._told_by_peers()
        except RunUnavailable as error:
            if len(await in_thread(self._store.known)) != 1:
                raise
            logger.warning("%s", str(error).splitlines()[0])
            return await self._only_known_run()
        terminal = sys.stdin.isatty() and sys.stdout.isatty()  # else `input` holds a lock that Python's end asks for
        if len(found) > 1 and terminal and not self._node.options.json_events:
            self._node.asks = True
            show_ahead("")
            try:
                ask = partial(_ask_which_run, list(found.values()))
                chosen = await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
            finally:
                self._node.asks = False
            if chosen is not None:
                return await self._from_peers(chosen.run_id)
        if len(found) > 1:
            listed = "\n".join(f"  --run {r.run_id}   {r.name}, round {r.round}" for r in found.values())
            raise RunUnavailable(f"the nodes that answered take part in {len(found)} runs; add one of these:\n{listed}")
        (only,) = found.values()
        logger.info("joining the only run there: %s (%s…), round %d", only.name, only.run_id[:12], only.round)
        return await self._from_peers(only.run_id)

    async def _told_by_peers(self) -> dict[str, RunListing]:
        """Runs of connected peers by their ids, of those who tell them soon after the first. Raises RunUnavailable."""
        told, silent = await self._ask_peers()
        if not told:
            raise RunUnavailable(
                f"no node there told of a run that it takes part in:\n{silent}\nWait until one does, or begin a run "
                "with a file that names a nonce (swarmnode run RUN.toml --join LINK)."
            )
        # Strangers' words, which a person is shown.
        named = (replace(run, name="".join(filter(str.isprintable, run.name))[:NAME]) for runs in told for run in runs)
        return {run.run_id: run for run in named}

    async def _from_peers(self, run_id: str) -> RunSpec:
        specs, silent = await self._ask_peers(run_id)
        if not specs:
            raise RunUnavailable(
                f"no peer gave the specification of run {run_id[:12]}…:\n{silent}\nCheck the run id, and that the "
                "address is of a node in that run (swarmnode id --join prints a line there)."
            )
        return specs[0]

    async def _ask_peers(self, run_id: str = "") -> tuple[list[Any], str]:
        """What connected peers give, who are all asked at once, and again until one gives something.

        That is their runs, for which others have OTHERS_WITHIN after the first; or one run's specification, for which
        others have REFUSED_FOR to come where one does not know it. With it, why each of the others gave nothing.
        """
        given: list[Any] = []
        silent: dict[PeerId, str] = {}  # why each gave nothing
        foreign, asked = set[PeerId](), set[PeerId]()  # who speaks another version; who has not answered yet
        enough, first = trio.CancelScope(), trio.Event()

        async def ask(peer: PeerId) -> None:
            try:
                given.append(await (self._spec_of(peer, run_id) if run_id else self._runs_of(peer)))
                enough.deadline = min(enough.deadline, trio.current_time() + (0.0 if run_id else OTHERS_WITHIN))
                first.set()
            except (CallError, SettingError) as error:
                if peer not in silent:
                    logger.info("%s tells nothing of the run: %s", peer, error)
                    silent[peer] = str(error)
                    if run_id and not given:
                        enough.deadline = trio.current_time() + REFUSED_FOR
                    try:
                        await greet(self._network, peer, timeout=5.0)
                    except Incompatible as why:
                        silent[peer] = str(why)
                        foreign.add(peer)
                    except NetworkError:
                        pass  # it is gone, which the first error says
            asked.discard(peer)

        peers = await self._peers()
        with trio.move_on_after(ANSWER_WITHIN), enough:
            async with trio.open_nursery() as asking:
                while not given and (run_id or not peers or not foreign.issuperset(peers)):
                    for peer in [each for each in peers if each not in asked]:
                        asked.add(peer)
                        asking.start_soon(ask, peer)
                    with trio.move_on_after(ASK_EVERY):
                        await first.wait()
                    peers = tuple(view.peer for view in self._network.peers())
        return given, "\n".join(f"  {peer}: {why}" for peer, why in silent.items())

    async def _spec_of(self, peer: PeerId, run_id: str) -> RunSpec:
        """Of the peer's run with this id, or with the id that begins so. Raises CallError or SettingError."""
        whole = run_id if RUN_ID.fullmatch(run_id) else (await self._runs_of(peer, run_id))[0].run_id
        return decode(await ask_spec(self._node.rpc, peer, whole), expected_run_id=whole)

    async def _runs_of(self, peer: PeerId, beginning: str = "") -> list[RunListing]:
        """The peer's runs whose ids begin so. Raises CallError."""
        told = await ask_runs(self._node.rpc, peer)
        runs = [run for run in told if RUN_ID.fullmatch(run.run_id) and run.run_id.startswith(beginning)]
        if not runs:
            raise CallError(f"it takes part in no run{' whose id begins so' if beginning else ''}")
        return runs[:RUNS]


def kept_runs(store: RunStore, known: Iterable[str]) -> list[dict[str, Any]]:
    """What is here of these runs, the one that was saved last first. Blocking.

    `rounds`: those of the newest checkpoint, None without one; `saved`: seconds since 1970; `name`: "" where the
    specification is damaged.
    """
    names = {run.run_id: run.run.name for run in store.specs()}
    kept = []
    for run_id in known:
        folder = store.folder(run_id)
        rounds = newest_round(folder / "checkpoints")
        saved = (folder if rounds is None else folder / "checkpoints").stat().st_mtime
        kept.append({"run_id": run_id, "name": names.get(run_id, ""), "rounds": rounds, "saved": saved})
    return sorted(kept, key=lambda run: (-run["saved"], run["run_id"]))


def _is_by(run: RunSpec, file: RunSpec) -> bool:
    """Whether a run is one by this file, which may name nonce and owner or leave them open."""
    left_open = {key: "" for key in ("nonce", "owner") if not getattr(file.run, key)}
    return run == file or ("nonce" in left_open and run.updated(run=left_open) == file)


def _with_task(spec: RunSpec, local: str, creator: bool) -> RunSpec:
    """The run with the hash of its local task's file, which its creator fills in and all others must have. Blocking.

    Raises SettingError where the file is another one, and where a task is neither built in nor on this machine, or
    both: a member without --task would train the built-in task of that name beside those who train the local one.
    """
    asked = asked_by(spec.rollouts.task)
    if not local and asked.needs_file:
        raise SettingError(
            f"the run {spec.run.name} asks {spec.rollouts.task!r}, a file that each node brings: add --task "
            "text:FILE.jsonl, or --task FILE.py:CLASS for a class, the same file that its other members have "
            "(docs/rollouts.md)"
        )
    if not local and spec.task.name not in BUILT_IN:
        raise SettingError(
            f"the run {spec.run.name} learns {spec.task.name!r}, which is none of the built-in tasks: add --task "
            "FILE.py:CLASS, the same file that its other members have (code never comes from a peer; docs/tasks.md)"
        )
    if not local:
        return spec
    if spec.task.name in BUILT_IN and not (asked.needs_file and asked_by(local).kind == asked.kind):
        if asked.needs_file:
            raise SettingError(f"--task {local!r} is no file such as the run asks, {spec.rollouts.task!r}")
        raise SettingError(
            f"--task: the run's task is {spec.task.name!r}, which is built in; give [task] name in the run file a name "
            "of its own, or leave out --task"
        )
    here, wanted = hashlib.sha256(task_source(local)).hexdigest(), spec.task.code_sha256
    if wanted and here != wanted:
        raise SettingError(
            f"--task {local}: the run's members have another file, with sha-256 {wanted[:12]}…, and this one has "
            f"{here[:12]}…: get theirs, as nodes that run different code cannot train together. Who changed the code "
            "begins a new run with it"
        )
    return spec.updated(task={"code_sha256": here}) if creator else spec


def with_gym(spec: RunSpec, creator: bool) -> RunSpec:
    """The run with the version of reasoning-gym that its questions come from, which its creator fills in.

    Raises SettingError where it is missing here, or another one: its questions would be others.
    """
    if asked_by(spec.rollouts.task).kind != "gym":
        return spec
    try:
        here = version("reasoning-gym")
    except PackageNotFoundError as error:
        raise SettingError(
            f"the run {spec.run.name} asks tasks of reasoning-gym, which is not installed here: "
            f"{installing('swarmnode[rl]')}"
        ) from error
    wanted = spec.rollouts.gym
    if wanted and wanted != here:
        raise SettingError(
            f"the run's members have reasoning-gym {wanted}, and here is {here}, whose questions may differ: "
            f"{installing(f'reasoning-gym=={wanted}')}"
        )
    return spec.updated(rollouts={"gym": here}) if creator else spec


def _ask_which_run(listings: list[RunListing]) -> RunListing | None:
    """Let the person at the terminal choose; None where the input ends (Ctrl-D). Blocking."""
    print("The nodes that answered take part in several runs:")
    for number, listing in enumerate(listings, 1):
        print(f"  {number}  {listing.name}, round {listing.round}, {listing.members} members  {listing.run_id[:12]}…")
    while True:
        try:
            answer = input(f"Which one to join (1 to {len(listings)})? ").strip()
        except EOFError:
            return None
        if answer.isdecimal() and 1 <= int(answer) <= len(listings):
            return listings[int(answer) - 1]


# --- looking for runs ------------------------------------------------------------------------------------------------


async def look(node: Node, wanted: str, within: float) -> dict[str, Any]:
    """The runs that a node finds, how many peers it has then, and why join addresses and seeds did not answer."""
    runs = [*map(_told_of, await node.catalogue.search(wanted=wanted, within=within))]
    return {"runs": runs, "peers": len(node.network.peers()), "unreached": dict(node.discovery.join_failures)}


def look_around(config: NodeConfig, wanted: str, within: float) -> dict[str, Any]:
    """What a node of this configuration finds. Raises ExpectedError."""
    config = replace(config, role="watch", port=0, upnp=False, log_level="error")
    with at_home(config) as (datadir, identity, logs):
        options = RunOptions(None, None, None, stay=False, json_events=False)

        async def main() -> dict[str, Any]:
            node = Node(config, datadir, identity, logs, options)
            serve_hello(node.network, node.agent)
            async with trio.open_nursery() as nursery:
                for part in (node.network.run, node.rpc.run, node.discovery.run):
                    await nursery.start(part)
                found = await look(node, wanted, within)
                nursery.cancel_scope.cancel()
            return found

        return trio.run(main)


def _told_of(found: FoundRun) -> dict[str, Any]:
    """A run that was found, for people and programs."""
    spec, listing = found.spec, found.entry.listing
    return {
        "run_id": spec.run_id,
        "name": spec.run.name,
        "task": spec.task.name,
        "method": spec.exchange.method,
        "trust": spec.run.trust,
        "code_sha256": spec.task.code_sha256 or None,
        "owner": spec.owner or None,
        "by_owner": found.by_owner,
        "signed_by": list(found.witnesses),
        "networks": len(set(found.witnesses.values())),
        "round": found.answer.round,
        "members": found.answer.members,
        "parameters": listing.parameters,
        "memory": listing.memory or None,
        "rate": listing.rate or None,
        "age_s": round(max(0.0, time.time() - found.entry.listing.signed / 1000), 1),
        "addresses": [place for place in found.places if parse(place) is not None],
    }
