"""A run's data: who has the text fetches nothing, who lacks it gets it, and nothing else is ever trained on."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import trio
from disconnecting import disconnect

from swarmnode.node.storage import datasets
from swarmnode.node.storage.cutting import keep, publish, read_index, release_forgotten
from swarmnode.node.storage.datadir import DataDir, DataDirError, NoSpace, RunStore, RunUnavailable
from swarmnode.node.storage.datasets import DataSet
from swarmnode.node.storage.shardstore import ShardStore
from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.runner import inline
from swarmnode.protocols.transfer.shard_manifest import ShardId, ShardManifest
from swarmnode.protocols.transfer.shards import Shards
from swarmnode.testing.simnet import SimNetwork, SimWorld, run_with_nursery
from swarmnode.training.dataset import LEAST_PIECE as CHUNK
from swarmnode.training.dataset import Recipe, Shuffled, cut, encode, ranking, share
from swarmnode.training.documents import Documents, Meter
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.tokens import CorpusError, decode, spellings, train

CHUNKS = 216
WANTED = 16  # of the 65 shards that these make
PLENTY = 1 << 30


def spec_of(source: str = "shards", **data: Any) -> RunSpec:
    return parse_runspec({"run": {"name": "t"}, "data": {"source": source, **data}}, source="test")


def text_of(chunks: int, seed: int) -> bytes:
    """Text without ends of lines, so that it is cut into documents of CHUNK bytes."""
    return random.Random(seed).randbytes(chunks * CHUNK // 2).hex().encode()


def parts_of(corpus: Path) -> list[tuple[int, bytes]]:
    """The held-out part and the shards of a corpus, by the definition."""
    recipe, meter = Recipe(seed=0, piece=CHUNK, vocabulary=256), Meter()
    with TemporaryDirectory() as folder:
        shuffled = Shuffled(Path(folder), 0, expected=1)
        for document in Documents(str(corpus), vocabulary=256).read(CHUNK, meter):
            shuffled.put(document)
        return list(cut(shuffled, recipe, meter))


@dataclass
class Member:
    network: SimNetwork
    rpc: Rpc
    store: ShardStore
    shards: Shards
    corpus: Path
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    events: list[dict[str, Any]] = field(default_factory=list)

    def data(self, spec: RunSpec, *, own_text: bool = False) -> DataSet:
        return DataSet(
            spec,
            shards=self.shards,
            store=self.store,
            runner=inline,
            corpus=str(self.corpus),
            own_text=own_text,
            emit=self.events.append,
        )

    def publish(self, spec: RunSpec) -> RunSpec:
        return publish(spec, str(self.corpus), self.store)


class Swarm:
    """Members on one simulated network, and their texts."""

    def __init__(self, world: SimWorld, nursery: trio.Nursery, folder: Path) -> None:
        self.world = world
        self._nursery = nursery
        self.folder = folder
        self.nothing = folder / "nothing"
        self.nothing.mkdir()
        self.text = self.write("text", CHUNKS)

    def write(self, name: str, chunks: int, *, seed: int = 1, others: int = 0) -> Path:
        """A corpus of one file; those with the same seed have the same chunks, but for the last `others`."""
        path = self.folder / f"{name}.txt"
        path.write_bytes(text_of(chunks, seed)[: (chunks - others) * CHUNK] + text_of(others, seed + 1))
        return path

    async def start(
        self, name: str, corpus: Path, *, cap: int = PLENTY, store: type[ShardStore] = ShardStore
    ) -> Member:
        network = self.world.node(name)
        rpc = Rpc(network)
        kept = store(self.folder / name, cap=cap)
        member = Member(network, rpc, kept, Shards(network, rpc, kept, runner=inline, seed=1), corpus)
        await self._nursery.start(self._live, member)
        return member

    async def begun(self) -> tuple[Member, RunSpec]:
        """Who published the text, and the run that names it."""
        creator = await self.start("creator", self.text)
        return creator, creator.publish(spec_of())

    async def joined(self, name: str, by: Member) -> Member:
        """One without text who is connected to another."""
        member = await self.start(name, self.nothing)
        await member.network.connect(by.network.me)
        return member

    async def _live(self, member: Member, *, task_status: trio.TaskStatus[None]) -> None:
        with member.scope:
            async with trio.open_nursery() as nursery:
                for part in (member.network, member.rpc, member.shards):
                    await nursery.start(part.run)
                task_status.started()


Main = Callable[[Swarm], Awaitable[None]]


@pytest.fixture
def swarm(tmp_path: Path) -> Callable[..., None]:
    """Run `main(swarm)` under a jumping clock."""

    def run(main: Main, **world: Any) -> None:
        run_with_nursery(lambda nursery: main(Swarm(SimWorld(**world), nursery, tmp_path)))

    return run


@asynccontextmanager
async def running(data: DataSet) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(data.run)
        yield
        nursery.cancel_scope.cancel()


def content(name: str) -> bytes:
    return Path(name).read_bytes()


def damage(name: str) -> None:
    damaged = bytearray(content(name))
    damaged[100] ^= 1
    Path(name).write_bytes(damaged)


def texts(data: DataSet) -> list[bytes]:
    return list(map(content, data.take()))


def quarter_of(spec: RunSpec, member: Member, corpus: Path) -> list[bytes]:
    """What a member should train on, by the definition: the first shards of its ranking."""
    by_id = {ShardManifest.of(text).id: text for _, text in parts_of(corpus)}
    index = read_index(bytes.fromhex(spec.data.index), member.store)
    return [by_id[entry.shard] for entry in ranking(index, spec.run_id, member.network.me)[: share(index)]]


def pinned(store: ShardStore) -> set[ShardId]:
    return {kept.shard for kept in store.kept() if kept.pinned}


Runs = Callable[..., None]


def test_member_without_the_text_trains_on_its_quarter_fetched_from_the_creator(swarm: Runs) -> None:
    async def main(swarm: Swarm) -> None:
        creator, spec = await swarm.begun()
        member = await swarm.joined("member", creator)
        data = member.data(spec)
        async with running(data):
            await trio.sleep(10)
            assert sorted(texts(data)) == sorted(quarter_of(spec, member, swarm.text))
            heldout = parts_of(swarm.text)[0][1]
            assert content(data.heldout) == heldout
            assert spec.task.heldout_sha256 == hashlib.sha256(heldout).hexdigest()
        told = data.status()
        assert (
            told["shards"] == told["wanted"] == WANTED < told["in_run"]
            and told["bytes"] == told["fetched"] == data.room
        )
        assert member.events[-1] == {"event": "data", **told, "rate": member.events[-1]["rate"], "left": 0}
        assert told["of"] == told["bytes"] and member.events[-1]["rate"] > 0
        assert data.warnings == {} and len(pinned(member.store)) == WANTED + 2

    swarm(main)


def test_member_fetches_the_tokenizer_as_well_and_the_shards_are_its_tokens(swarm: Runs) -> None:
    async def main(swarm: Swarm) -> None:
        corpus = swarm.write("words", 24)
        creator = await swarm.start("creator", corpus)
        spec = creator.publish(spec_of(vocabulary=300))
        member = await swarm.joined("member", creator)
        data = member.data(spec)
        async with running(data):
            await trio.sleep(10)
            tokenizer = content(data.tokenizer)
            assert ShardManifest.of(tokenizer).id.hex() == spec.data.tokenizer
            assert bytes.fromhex(spec.data.tokenizer) in pinned(member.store)
            spelled = spellings(tokenizer, 300)
            for text in texts(data):
                written = decode(np.frombuffer(text, "<u2"), spelled)
                assert all(written[at : at + CHUNK] in corpus.read_bytes() for at in range(0, len(written), CHUNK))
        assert data.status()["shards"] == data.status()["wanted"] > 0

    swarm(main)


def test_what_a_member_fetches_is_announced_by_the_index_alone(swarm: Runs) -> None:
    async def main(swarm: Swarm) -> None:
        creator, spec = await swarm.begun()
        member = await swarm.joined("member", creator)
        async with running(member.data(spec)):
            await trio.sleep(10)
            for shard in pinned(member.store):
                found = (member.network.me,) if shard.hex() == spec.data.index else ()
                assert await creator.network.find_providers(shard) == found

    swarm(main)


def test_member_with_the_same_text_needs_nobody(swarm: Runs) -> None:
    async def main(swarm: Swarm) -> None:
        _, spec = await swarm.begun()
        member = await swarm.start("member", swarm.write("copy", CHUNKS))
        data = member.data(spec)
        async with running(data):
            assert texts(data) == quarter_of(spec, member, swarm.text)
        assert data.status()["fetched"] == 0

    swarm(main)


def test_member_with_nearly_the_same_text_fetches_only_what_differs(swarm: Runs) -> None:
    async def main(swarm: Swarm) -> None:
        creator, spec = await swarm.begun()
        member = await swarm.start("member", swarm.write("older", CHUNKS, others=20))
        await member.network.connect(creator.network.me)
        data = member.data(spec)
        async with running(data):
            await trio.sleep(10)
            assert sorted(texts(data)) == sorted(quarter_of(spec, member, swarm.text))
        assert 0 < data.status()["fetched"] < data.status()["bytes"]
        assert len(pinned(member.store)) == WANTED + 2

    swarm(main)


@pytest.mark.parametrize("label", ["python-stdlib", "books"])
def test_who_named_no_corpus_reads_the_default_one_for_a_run_of_it_alone(
    label: str, swarm: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr("swarmnode.node.storage.cutting.take_own", lambda *told: read.append(told[3]))

    async def main(swarm: Swarm) -> None:
        creator = await swarm.start("creator", swarm.text)
        spec = creator.publish(parse_runspec({"run": {"name": "t"}, "task": {"corpus": label}}, source="test"))
        data = (await swarm.joined("member", creator)).data(spec)
        data._corpus = ""
        async with running(data):
            await trio.sleep(10)
            assert data.status()["shards"] == WANTED

    swarm(main)
    assert read == ([""] if label == "python-stdlib" else [])


def test_data_outlive_their_creator_as_far_as_members_hold_them(swarm: Runs) -> None:
    async def main(swarm: Swarm) -> None:
        creator, spec = await swarm.begun()
        second = await swarm.joined("second", creator)
        async with running(held := second.data(spec)):
            await trio.sleep(10)
        creator.scope.cancel()
        third = await swarm.joined("third", second)
        data = third.data(spec)
        async with running(data):
            began = texts(data)
            assert set(began) < set(quarter_of(spec, third, swarm.text)) and began
            await trio.sleep(1)
            assert "still looking" in data.warnings["data"]
            await trio.sleep(datasets.OWN_FIRST + 10)
            assert set(began + texts(data)) == set(texts(held))
            assert data.warnings == {}

    swarm(main)


def test_what_nobody_had_is_fetched_when_somebody_comes_who_has_it(swarm: Runs) -> None:
    async def main(swarm: Swarm) -> None:
        creator, spec = await swarm.begun()
        holder = await swarm.start("holder", swarm.nothing)
        parts = [text for _, text in parts_of(swarm.text)]
        index = read_index(bytes.fromhex(spec.data.index), creator.store)
        keep([encode(index), *parts[:31]], holder.store)
        member = await swarm.joined("member", holder)
        data = member.data(spec)
        async with running(data):
            await trio.sleep(1)
            before = set(texts(data))
            assert "data" in data.warnings
            await member.network.connect(creator.network.me)
            await trio.sleep(datasets.LOOK_AGAIN + 1)
            assert before | set(texts(data)) == set(quarter_of(spec, member, swarm.text))
            assert data.warnings == {}

    swarm(main)


def test_training_begins_before_all_is_here_and_the_trainer_is_fed_the_rest(swarm: Runs) -> None:
    async def main(swarm: Swarm) -> None:
        creator, spec = await swarm.begun()
        member = await swarm.joined("member", creator)
        fed: list[bytes] = []

        class Trainer:
            async def feed(self, texts: Sequence[str]) -> None:
                fed.extend(map(content, texts))

        data = member.data(spec)
        async with running(data), trio.open_nursery() as nursery:
            first = texts(data)
            assert WANTED / 8 <= len(first) < WANTED / 2
            await nursery.start(data.pass_on, Trainer())
            await trio.sleep(60)
            assert sorted(first + fed) == sorted(quarter_of(spec, member, swarm.text))
            nursery.cancel_scope.cancel()

    swarm(main, bandwidth=100_000.0)


def test_restarted_member_has_its_text_at_once_and_alone(swarm: Runs) -> None:
    async def main(swarm: Swarm) -> None:
        creator, spec = await swarm.begun()
        member = await swarm.joined("member", creator)
        data = member.data(spec)
        async with running(data):
            await trio.sleep(3)
            before = sorted(texts(data))
        await disconnect(member.network, creator.network.me)
        creator.scope.cancel()
        again = member.data(spec)
        async with running(again):
            assert sorted(texts(again)) == before and len(before) == WANTED
        assert again.status()["fetched"] == 0

    swarm(main)


def test_everybody_knows_what_a_member_is_to_train_on(swarm: Runs) -> None:
    async def main(swarm: Swarm) -> None:
        creator, spec = await swarm.begun()
        member = await swarm.joined("member", creator)
        mine, theirs = member.data(spec), creator.data(spec)
        assert theirs.assigned(member.network.me) == ()  # before the index is here
        async with running(mine), running(theirs):
            await trio.sleep(10)
            mine.take()
            assert set(theirs.assigned(member.network.me)) == set(mine.given())
            assert set(theirs.assigned(creator.network.me)) != set(mine.given())

    swarm(main)


def test_shard_that_the_disk_changed_is_fetched_again_before_it_is_trained_on(swarm: Runs) -> None:
    async def main(swarm: Swarm) -> None:
        creator, spec = await swarm.begun()
        member = await swarm.joined("member", creator)
        async with running(data := member.data(spec)):
            await trio.sleep(10)
            names = data.take()
        damage(names[0])
        async with running(again := member.data(spec)):
            await trio.sleep(10)
            assert sorted(texts(again)) == sorted(quarter_of(spec, member, swarm.text))
        assert 0 < again.status()["fetched"] <= CHUNK * 4

    swarm(main)


class LyingStore(ShardStore):
    """Serves zeroes."""

    def read(self, shard: ShardId, index: int, room: memoryview) -> int:
        size = super().read(shard, index, room)
        room[:size] = bytes(size)
        return size


def test_wrong_bytes_never_reach_training(swarm: Runs) -> None:
    async def main(swarm: Swarm) -> None:
        creator, spec = await swarm.begun()
        parts = [text for _, text in parts_of(swarm.text)]
        index = encode(read_index(bytes.fromhex(spec.data.index), creator.store))
        liar = await swarm.start("liar", swarm.nothing, store=LyingStore)
        keep([index, *parts], liar.store)
        member = await swarm.start("member", swarm.nothing)
        keep([index, parts[0]], member.store)
        await member.network.connect(liar.network.me)
        data = member.data(spec)
        with pytest.RaisesGroup(pytest.RaisesExc(RunUnavailable, match="no text to train on"), flatten_subgroups=True):
            async with running(data):
                raise AssertionError("it trains on what a liar sent")
        assert data.take() == () and member.shards.violations.count(liar.network.me) > 0
        await member.network.connect(creator.network.me)
        async with running(data := member.data(spec)):
            await trio.sleep(60)
            assert sorted(texts(data)) == sorted(quarter_of(spec, member, swarm.text))

    swarm(main)


def test_index_that_nobody_has_ends_with_what_to_do(swarm: Runs) -> None:
    async def main(swarm: Swarm) -> None:
        _, spec = await swarm.begun()
        member = await swarm.start("member", swarm.write("other", CHUNKS, seed=9))
        with pytest.RaisesGroup(pytest.RaisesExc(RunUnavailable, match="--corpus"), flatten_subgroups=True):
            async with running(member.data(spec)):
                raise AssertionError("there is nothing to train on")

    swarm(main)


@pytest.mark.parametrize("raw", [bytes(2 << 20), b"no index", b""])
def test_shard_that_is_no_index_is_refused(swarm: Runs, raw: bytes) -> None:
    async def main(swarm: Swarm) -> None:
        liar = await swarm.start("liar", swarm.nothing)
        keep([raw], liar.store)
        spec = spec_of().resolved(heldout_sha256="00", index=ShardManifest.of(raw).id.hex())
        member = await swarm.joined("member", liar)
        with pytest.RaisesGroup(RunUnavailable, flatten_subgroups=True):
            async with running(member.data(spec)):
                raise AssertionError("it took that for an index")
        assert not member.store.holding(ShardManifest.of(raw).id).complete or len(raw) < 100

    swarm(main)


@pytest.mark.parametrize("source", ["local", "shards"])
def test_node_with_its_own_text_takes_only_the_held_out_part(swarm: Runs, source: str) -> None:
    async def main(swarm: Swarm) -> None:
        creator = await swarm.start("creator", swarm.text)
        spec = creator.publish(spec_of(source))
        member = await swarm.start("member", swarm.write("own", CHUNKS, seed=9))
        await member.network.connect(creator.network.me)
        data = member.data(spec, own_text=source == "shards")
        async with running(data):
            own = [text[at : at + CHUNK] for text in texts(data) for at in range(0, len(text), CHUNK)]
            written = swarm.folder.joinpath("own.txt").read_bytes()
            assert set(own) < {written[at : at + CHUNK] for at in range(0, len(written), CHUNK)}
            assert CHUNKS / 8 < len(own) == len(set(own)) == data.room // CHUNK < CHUNKS / 2
            assert content(data.heldout) == parts_of(swarm.text)[0][1] and data.given() == () and data.own_text
            assert data.take() == ()  # all of it was given
            assert len(pinned(member.store)) == 2
        empty = dict.fromkeys(("shards", "wanted", "in_run", "bytes", "fetched"), 0)
        assert data.status() == {"source": "local", "of": data.room, **empty}

    swarm(main)


def test_run_with_local_data_publishes_no_text(swarm: Runs) -> None:
    async def main(swarm: Swarm) -> None:
        creator = await swarm.start("creator", swarm.text)
        spec = creator.publish(spec_of("local"))
        index = read_index(bytes.fromhex(spec.data.index), creator.store)
        assert index.shards == () and index.heldout.size == len(parts_of(swarm.text)[0][1])
        assert pinned(creator.store) == {bytes.fromhex(spec.data.index), index.heldout.shard}

    swarm(main)


def test_same_text_and_file_are_the_same_run_and_publishing_again_changes_nothing(tmp_path: Path) -> None:
    text = text_of(100, seed=1)
    specs = []
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_bytes(text)
        store = ShardStore(tmp_path / name, cap=PLENTY)
        specs += [publish(spec_of(), str(tmp_path / f"{name}.txt"), store) for _ in range(2)]
        assert len(store.kept()) == len(pinned(store)) == 92
    assert len({spec.run_id for spec in specs}) == 1


def test_run_file_that_was_filled_in_is_published_by_who_has_its_text_only(tmp_path: Path) -> None:
    for seed, name in enumerate(("right", "wrong")):
        (tmp_path / f"{name}.txt").write_bytes(text_of(50, seed))
    stores = {name: ShardStore(tmp_path / name, cap=PLENTY) for name in ("first", "right", "wrong")}
    spec = publish(spec_of(), str(tmp_path / "right.txt"), stores["first"])
    for name in ("right", "wrong"):
        assert publish(spec, str(tmp_path / f"{name}.txt"), stores[name]) == spec
    assert pinned(stores["right"]) == pinned(stores["first"]) and not stores["wrong"].kept()
    unfilled = parse_runspec({"run": {"name": "t"}, "task": {"heldout_sha256": "00"}}, source="test")
    with pytest.raises(CorpusError, match="not the run's"):
        publish(unfilled, str(tmp_path / "right.txt"), stores["first"])


def test_data_that_the_disk_has_no_room_for_are_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "text.txt"
    corpus.write_bytes(text_of(100, seed=1))
    real = os.statvfs(tmp_path)
    full = os.statvfs_result([*real[:3], 10, 10, *real[5:]])  # free blocks
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    store = ShardStore(tmp_path / "store", cap=80 * CHUNK)
    with pytest.raises(NoSpace, match=r"the disk of .* MB free, of which 67\.1 MB stay so: make room .*--data-dir"):
        publish(spec_of(), str(corpus), store)
    assert not store.kept()


def test_data_over_the_cap_are_refused_with_its_name_and_nothing_is_pinned(tmp_path: Path) -> None:
    corpus = tmp_path / "text.txt"
    corpus.write_bytes(text_of(100, seed=1))
    store = ShardStore(tmp_path / "store", cap=80 * CHUNK)
    with pytest.raises(NoSpace, match=r"shards_cap allows 0\.7 MB"):
        publish(spec_of(), str(corpus), store)
    assert not store.kept()
    enough = ShardStore(tmp_path / "enough", cap=101 * CHUNK)
    keep([bytes(30 * CHUNK)], enough)
    with pytest.raises(NoSpace, match=r"0\.2 MB of it are pinned"):
        publish(spec_of(), str(corpus), enough)
    assert len(pinned(enough)) == 1


def test_member_whose_cap_is_too_low_trains_on_what_fits_and_says_so(swarm: Runs) -> None:
    async def main(swarm: Swarm) -> None:
        creator, spec = await swarm.begun()
        member = await swarm.start("member", swarm.nothing, cap=30 * CHUNK)
        await member.network.connect(creator.network.me)
        data = member.data(spec)
        async with running(data):
            await trio.sleep(5)
            assert 0 < len(texts(data)) < WANTED
            assert "shards_cap" in data.warnings["share"]
            assert 0 < data.status()["wanted"] < WANTED

    swarm(main)


def test_data_of_a_run_that_was_left_may_be_displaced_unless_another_run_needs_them(tmp_path: Path) -> None:
    corpus = tmp_path / "text.txt"
    corpus.write_bytes(text_of(50, seed=1))
    store, runs = ShardStore(tmp_path / "shards", cap=PLENTY), RunStore(DataDir(tmp_path))
    specs = [
        publish(parse_runspec({"run": {"name": name}}, source="test"), str(corpus), store) for name in ("one", "two")
    ]
    for spec in specs:
        runs.keep(spec)
    everything = pinned(store)
    for spec, kept in zip(specs, (everything, set()), strict=True):
        (runs.folder(spec.run_id) / "run.spec").unlink()
        release_forgotten(runs, store)
        assert pinned(store) == kept
    assert len(store.kept()) == len(everything) and runs.forgotten() == ()


@pytest.mark.parametrize("broken", ["damaged", "unreadable"])
def test_data_of_a_run_whose_file_is_broken_stay_pinned(tmp_path: Path, broken: str) -> None:
    corpus = tmp_path / "text.txt"
    corpus.write_bytes(text_of(50, seed=1))
    store, runs = ShardStore(tmp_path / "shards", cap=PLENTY), RunStore(DataDir(tmp_path))
    spec = publish(parse_runspec({"run": {"name": "one"}}, source="test"), str(corpus), store)
    runs.keep(spec)
    everything, path = pinned(store), runs.folder(spec.run_id) / "run.spec"
    if broken == "damaged":
        path.write_bytes(b"no spec")
        release_forgotten(runs, store)
    else:
        path.unlink()
        path.mkdir()  # EISDIR stands for any error of reading
        with pytest.raises(DataDirError, match=r"run\.spec"):
            release_forgotten(runs, store)
    assert everything and pinned(store) == everything


def test_a_run_that_was_left_takes_nothing_from_one_that_shares_some_of_its_data(tmp_path: Path) -> None:
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_bytes(text_of(50, seed=1))
    other.write_bytes(text_of(50, seed=2))
    (tmp_path / "tokenizer.json").write_bytes(train([text_of(2, seed=3)], 300))
    store, runs = ShardStore(tmp_path / "shards", cap=PLENTY), RunStore(DataDir(tmp_path))
    stays = publish(spec_of(), str(text), store, tokenizer=str(tmp_path))
    runs.keep(stays)
    needed = pinned(store)
    for spec, corpus, shared in ((spec_of(), other, 1), (spec_of("local"), text, 2)):  # the held-out part as well
        left = publish(spec, str(corpus), store, tokenizer=str(tmp_path))
        index = read_index(bytes.fromhex(left.data.index), store)
        of_it = {bytes.fromhex(left.data.tokenizer), *(entry.shard for entry in (index.heldout, *index.shards))}
        assert len(needed & of_it) == shared
        runs.keep(left)
        (runs.folder(left.run_id) / "run.spec").unlink()
        release_forgotten(runs, store)
        assert pinned(store) == needed
