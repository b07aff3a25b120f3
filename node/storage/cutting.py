"""What a node does with its own corpus: makes a run's shards of it, finds some of them in it, or trains on it alone.

All of it blocks, works in a folder of its own beside the shards, and needs memory that does not grow with the corpus.
Whatever is kept for a run is pinned, so that nothing that the owner or another run fetches displaces it.

    cut/<key>                 which data set a corpus made, so that it is not cut again while neither has changed
    own-text/<run id>/        what a node with text of its own trains on; nobody else can have it
    cut-unfinished            ids of shards that belong to no run yet, a line each
    cutting-…/                documents that are being sorted; left over where the daemon was killed
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from swarmnode.node.storage.datadir import NoSpace, RunStore, write_atomic
from swarmnode.node.storage.shardstore import MARGIN, ShardStore
from swarmnode.protocols.transfer.shard_manifest import CHUNK, ShardId, ShardManifest, parse_id
from swarmnode.protocols.transfer.shard_wire import NoRoom, ShardError, ShardNotHeld, parts_of
from swarmnode.training import dataset
from swarmnode.training.dataset import BadIndex, DataEntry, Index, Recipe, Shuffled
from swarmnode.training.documents import Documents, Meter
from swarmnode.training.runspec import RunSpec
from swarmnode.training.tokens import BYTES, MAX_TOKENIZER, CorpusError, size_of, train

logger = logging.getLogger(__name__)

SAMPLE = 32 << 20  # bytes of text that a tokenizer is trained on
OWN_TEXT = "own-text"
OWN_SHARE = 4  # a node with text of its own trains on one document in so many, so that equal corpora differ,
SMALL = 1 << 20  # bytes of a corpus below which it trains on all of it
MB = 1_000_000


def publish(
    spec: RunSpec, corpus: str, store: ShardStore, *, tokenizer: str = "", meter: Meter | None = None
) -> RunSpec:
    """Cut the corpus of a run's creator into shards, keep them, and fill in what the specification then says.

    Called within `finishing`, else the next start deletes them. `tokenizer` is a file tokenizer.json; without one, a
    vocabulary above 256 has one trained. A specification that already has an index of another corpus comes back as it
    is: its data must come from peers. Raises CorpusError, NoSpace, ShardError or Stopped.
    """
    meter = meter or Meter()
    given = read_tokenizer(tokenizer)
    if given and spec.data.vocabulary == BYTES:
        spec = spec.updated(data={"vocabulary": size_of(given)})
    source = Documents(corpus, vocabulary=spec.data.vocabulary)
    note = _note(spec, source, given, store)
    if (filled := _made_before(spec, note, store)) is not None:
        return filled
    kept = _Kept(store, _unfinished(store))
    try:
        with _scratch(store) as folder:
            shuffled = Shuffled(folder, spec.run.seed, expected=source.size)
            meter.begin("reading", source.size)
            piece = dataset.piece_for(source.size)
            for document in source.read(piece, meter):
                shuffled.put(document)
            dataset.check_enough(shuffled, source.root)
            raw = given
            if not raw and spec.data.vocabulary > BYTES and not source.tokens:
                meter.begin("training a tokenizer", 0)
                raw = train(dataset.sample_of(shuffled, SAMPLE), spec.data.vocabulary)
            recipe = Recipe(spec.run.seed, piece, spec.data.vocabulary, b"" if source.tokens else raw)
            shares_text = spec.data.source == "shards"
            if shares_text and not recipe.tokenizer and shuffled.size > store.cap:
                raise kept.does_not_fit(shuffled.size)
            entries, heldout = list[DataEntry](), ""
            for upto, content in dataset.cut(shuffled, recipe, meter):
                if entries and not shares_text:
                    break
                heldout = heldout or hashlib.sha256(content).hexdigest()
                entries.append(DataEntry(kept.add(content), len(content), upto))
        index = dataset.encode(Index(entries[0], tuple(entries[1:]), spec.run.seed, piece))
        index_id, tokenizer_id = ShardManifest.of(index).id.hex(), kept.add(raw).hex() if raw else ""
        filled = spec.resolved(heldout_sha256=heldout, index=index_id, tokenizer=tokenizer_id)
        if not spec.data.index and spec.task.heldout_sha256 not in ("", heldout):
            raise CorpusError(
                f"this node's held-out text ({heldout[:12]}…) is not the run's ({spec.task.heldout_sha256[:12]}…): its "
                "corpus is another; use the same corpus, or leave heldout_sha256 out of the run file"
            )
        if spec.data.index not in ("", filled.data.index):
            kept.undo()
            logger.info("the corpus here is not the one that the run file was made with; its data must come from peers")
            return spec
        kept.add(index)
    except BaseException as error:
        kept.undo()
        if isinstance(error, NoRoom):
            raise kept.does_not_fit(kept.size) from error
        raise
    made = [filled.data.index, heldout, filled.data.tokenizer]
    write_atomic(note, json.dumps(made).encode())
    return filled


def _note(spec: RunSpec, source: Documents, given: bytes, store: ShardStore) -> Path:
    """Where it stands what this corpus was made into."""
    what = [source.signature, spec.run.seed, spec.data.vocabulary, spec.data.source, hashlib.sha256(given).hexdigest()]
    folder = store.folder.parent / "cut"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _made_before(spec: RunSpec, note: Path, store: ShardStore) -> RunSpec | None:
    """The specification filled in, where this corpus was cut before and all of it is still here."""
    try:
        index_id, heldout, tokenizer = json.loads(note.read_bytes())
        shards = _all_shards(index_id, read_index(parse_id(index_id), store), tokenizer)
    except (OSError, ValueError, ShardError):
        return None
    same = spec.data.index in ("", index_id) and (spec.data.index or spec.task.heldout_sha256 in ("", heldout))
    if not same or not all(store.holding(shard).complete for shard in shards):
        return None
    pin_all(shards, store)
    return spec.resolved(heldout_sha256=heldout, index=index_id, tokenizer=tokenizer)


def read_tokenizer(path: str) -> bytes:
    """The file tokenizer.json, or the one in a folder; nothing where no path is given. Raises CorpusError."""
    if not path:
        return b""
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise CorpusError(f"--tokenizer {file}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_TOKENIZER:
        raise CorpusError(f"--tokenizer {file}: {len(raw)} bytes; at most {MAX_TOKENIZER} are allowed")
    size_of(raw)
    return raw


class _Kept:
    """Shards that were kept for a run so far, to be undone where it fails."""

    def __init__(self, store: ShardStore, journal: Path | None = None) -> None:
        """`journal`: where their ids are written, a line each, before they are there."""
        self._store, self._journal = store, journal
        self._pinned = {kept.shard: kept.size for kept in store.kept() if kept.pinned}
        self._added: list[ShardId] = []
        self.size = 0  # bytes

    def add(self, content: bytes) -> ShardId:
        """Make it a pinned shard. Raises NoRoom or ShardError."""
        manifest = ShardManifest.of(content)
        self.size += manifest.size
        if manifest.id not in self._pinned:
            self._added.append(manifest.id)
            if self._journal is not None:
                with self._journal.open("ab", 0) as journal:
                    journal.write(f"{manifest.id.hex()}\n".encode())
                    os.fsync(journal.fileno())
        if not intact(manifest.id, self._store):
            _write(content, manifest, self._store)
        self._store.pin(manifest.id)
        return manifest.id

    def undo(self) -> None:
        for shard in self._added:
            with suppress(ShardNotHeld):  # the last one may not have come so far
                self._store.pin(shard, False)
                self._store.drop(shard)

    def does_not_fit(self, size: int) -> NoSpace:
        pinned = sum(self._pinned.values())
        free = shutil.disk_usage(self._store.folder).free
        if free - MARGIN < self._store.cap - pinned:
            return NoSpace(
                f"the run's data take {size / MB:.1f} MB or more as shards, and the disk of {self._store.folder} has "
                f"{free / MB:.1f} MB free, of which {MARGIN / MB:.1f} MB stay so: make room on it, take a directory on "
                "another one (--data-dir), or name a smaller corpus."
            )
        return NoSpace(
            f"the run's data take {size / MB:.1f} MB or more as shards, which do not fit: shards_cap allows "
            f"{self._store.cap / MB:.1f} MB, and {pinned / MB:.1f} MB of it are pinned. Raise it (--shards-cap "
            "GB), unpin shards of other runs (swarmnode shards ls), or name a smaller corpus."
        )


def keep(texts: Sequence[bytes], store: ShardStore) -> None:
    """Make each text a pinned shard. Raises NoSpace, with nothing pinned, where they do not fit; or ShardError."""
    kept = _Kept(store)
    try:
        for text in texts:
            kept.add(text)
    except NoRoom as error:
        kept.undo()
        raise kept.does_not_fit(sum(map(len, texts))) from error


def pin_all(shards: Iterable[ShardId], store: ShardStore) -> None:
    """Raises ShardNotHeld, NoRoom or ShardError."""
    for shard in shards:
        store.pin(shard)


def intact(shard: ShardId, store: ShardStore) -> bool:
    """Whether a shard is here and the disk still has its bytes; one that is damaged counts as not held from now on."""
    if not store.holding(shard).complete:
        return False
    try:
        for _ in parts_of(store, shard):
            pass
    except ShardNotHeld as error:
        logger.warning("%s", error)
        return False
    return True


def read_index(shard: ShardId, store: ShardStore) -> Index:
    """The index of a data set that is here. Raises BadIndex, or ShardNotHeld."""
    manifest = store.manifest(shard)
    if manifest.size > dataset.MAX_INDEX:
        raise BadIndex(f"{manifest.size} bytes; at most {dataset.MAX_INDEX} are allowed")
    return dataset.decode(b"".join(map(bytes, parts_of(store, shard))))


def _all_shards(index_id: str, index: Index, tokenizer: str) -> list[ShardId]:
    """The index, what it names, and the tokenizer, if there is one. Raises ValueError for what is no id."""
    named = (index_id, tokenizer) if tokenizer else (index_id,)
    return [*map(parse_id, named), *(entry.shard for entry in (index.heldout, *index.shards))]


def _recipe_of(spec: RunSpec, index: Index, store: ShardStore) -> Recipe:
    """How the documents of a run became its shards. Its tokenizer is here. Raises ShardNotHeld."""
    tokenizer = b""
    if spec.data.tokenizer:
        tokenizer = b"".join(map(bytes, parts_of(store, parse_id(spec.data.tokenizer))))
    return Recipe(index.seed, index.piece, spec.data.vocabulary, tokenizer)


def take_own(
    spec: RunSpec, wanted: Sequence[DataEntry], index: Index, corpus: str, store: ShardStore, meter: Meter
) -> None:
    """Keep those of the wanted shards, or of the held-out part, that this node's corpus happens to make.

    Raises CorpusError, NoSpace, ShardError or Stopped.
    """
    recipe = _recipe_of(spec, index, store)
    source = _own_source(corpus, recipe)
    entries = (index.heldout, *index.shards)
    after = dict(zip((entry.shard for entry in entries), (-1, *(entry.upto for entry in entries)), strict=False))
    ranges = sorted((after[entry.shard], entry.upto) for entry in wanted)
    with _scratch(store) as folder:
        shuffled = Shuffled(folder, recipe.seed, expected=source.size)
        for document, digest in _hashed(source, recipe, meter):
            number = bisect_left(ranges, (dataset.place_of(digest), -1)) - 1  # the last range that begins before it
            if number >= 0 and dataset.place_of(digest) <= ranges[number][1]:
                shuffled.put(document, digest)
        named = {entry.shard: entry.size for entry in wanted}
        for content in dataset.remade(shuffled, index, recipe.on(source)):
            if len(content) in named.values() and named.get(ShardManifest.of(content).id) == len(content):
                keep([content], store)


def own_text(
    spec: RunSpec, peer_id: str, index: Index, corpus: str, store: ShardStore, meter: Meter
) -> tuple[Path, ...]:
    """Files to train on, made of a quarter of this node's corpus (all of a small one) but what the run holds out.

    Raises CorpusError, NoSpace, ShardError or Stopped.
    """
    recipe = _recipe_of(spec, index, store)
    source = _own_source(corpus, recipe)
    folder = store.folder.parent / OWN_TEXT / spec.run_id
    made_of = json.dumps([source.signature, index.seed, index.piece, recipe.vocabulary, spec.data.tokenizer]).encode()
    if not (folder / "made-of").exists() or (folder / "made-of").read_bytes() != made_of:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        mine = (spec.run_id + peer_id).encode()
        with _scratch(store) as scratch:
            shuffled = Shuffled(scratch, recipe.seed, expected=source.size)
            for document, digest in _hashed(source, recipe, meter):
                drawn = 0 < source.size < SMALL or hashlib.sha256(mine + digest).digest()[0] % OWN_SHARE == 0
                if drawn and dataset.place_of(digest) > index.heldout.upto:
                    shuffled.put(document, digest)
            dataset.check_enough(shuffled, source.root, 1)
            most = dataset.shard_size(shuffled.size)
            for number, (_, content) in enumerate(dataset.packed(shuffled, recipe.on(source), meter, most)):
                write_atomic(folder / f"{number:06d}.tokens", content)
        write_atomic(folder / "made-of", made_of)
    return tuple(sorted(file for file in folder.iterdir() if file.suffix == ".tokens"))


def _own_source(corpus: str, recipe: Recipe) -> Documents:
    """This node's corpus. Raises CorpusError."""
    source = Documents(corpus, vocabulary=recipe.vocabulary)
    if not source.tokens and not recipe.tokenizer and recipe.vocabulary != BYTES:
        raise CorpusError(
            f"corpus {source.root}: the run's data are tokens, and it names no tokenizer that would make them of "
            "text; name files of tokens with --corpus"
        )
    return source


def _hashed(source: Documents, recipe: Recipe, meter: Meter) -> Iterator[tuple[bytes, bytes]]:
    """Each document with its hash. Raises CorpusError or Stopped."""
    meter.begin("reading", source.size)
    for document in source.read(recipe.piece, meter):
        yield document, dataset.hash_of(document, recipe.seed)


@contextmanager
def _scratch(store: ShardStore) -> Iterator[Path]:
    """A folder for what is being sorted. What a daemon that was killed left there is deleted. Raises NoSpace."""
    beside = store.folder.parent
    for left in beside.glob("cutting-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="cutting-", dir=beside) as folder:
        try:
            yield Path(folder)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoSpace(
                    f"{beside}: the disk is full. While a corpus is cut, the disk must hold its text once more, beside "
                    "the shards: free some, or name a smaller corpus (--corpus)."
                ) from error
            raise


def _write(text: bytes, manifest: ShardManifest, store: ShardStore) -> None:
    here = store.begin(manifest)
    try:
        for index in range(manifest.chunks):
            if not here >> index & 1:
                store.write(manifest.id, [(index, memoryview(text)[index * CHUNK : (index + 1) * CHUNK])])
        store.finish(manifest.id)
    except BaseException:
        store.suspend(manifest.id)
        raise


def _unfinished(store: ShardStore) -> Path:
    """Ids of shards that belong to no run yet, one a line."""
    return store.folder.parent / "cut-unfinished"


@contextmanager
def finishing(store: ShardStore, runs: RunStore | None = None) -> Iterator[None]:
    """Keeps what `publish` cuts if this ends well or `runs` know it; else it goes, at the next start at the latest."""
    try:
        yield
    except BaseException:
        drop_unfinished(store, {spec.data.index for spec in runs.specs()} if runs is not None else frozenset())
        raise
    _unfinished(store).unlink(missing_ok=True)


def drop_unfinished(store: ShardStore, begun: Set[str] = frozenset()) -> None:
    """Delete what was cut for a run that never came to be (`begun` has the indexes of the others): not to be served."""
    with suppress(FileNotFoundError):
        names = _unfinished(store).read_text(errors="replace").split()
        for name in names if begun.isdisjoint(names) else ():
            with suppress(ValueError, ShardNotHeld):
                store.pin(parse_id(name), False)
                store.drop(parse_id(name))
        _unfinished(store).unlink()


def release_forgotten(runs: RunStore, store: ShardStore) -> None:
    """Pin the data of runs that were left no longer: they go when their room is needed. Own text goes at once."""
    forgotten, needed = runs.forgotten(), set[ShardId]()
    for spec in runs.specs() if forgotten else ():
        with suppress(ValueError, ShardError):  # its index is not here
            index = read_index(parse_id(spec.data.index), store)
            needed.update(_all_shards(spec.data.index, index, spec.data.tokenizer))
    for name, tokenizer in forgotten:
        try:
            for one in _all_shards(name, read_index(parse_id(name), store), tokenizer):
                if one not in needed and store.holding(one).size:
                    store.pin(one, False)
        except (ValueError, ShardError) as error:  # ValueError: BadIndex, or another file's name
            logger.warning("what was pinned for the data %s stays pinned: %s", name[:12], error)
        runs.forget(name)
    known = set(runs.known())
    for folder in (store.folder.parent / OWN_TEXT).glob("*"):
        if folder.name not in known:
            shutil.rmtree(folder, ignore_errors=True)
