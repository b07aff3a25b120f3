"""A run's data in the shard store: cut by the run's creator, or found in this node's own corpus. All of it blocks.

Whatever is kept for a run is pinned, so that nothing that the owner or another run fetches displaces it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from swarmnode.node.storage.datadir import NoSpace
from swarmnode.node.storage.runs import RunStore
from swarmnode.node.storage.shardstore import ShardStore
from swarmnode.protocols.transfer.shard_tree import CHUNK, ShardId, ShardManifest, chunk_count, leaf, parse_id
from swarmnode.protocols.transfer.shard_wire import NoRoom, ShardError, ShardNotHeld
from swarmnode.training.corpus import MIN_CHUNKS, Chunk, CorpusError, corpus_for_run, divide, read_chunks
from swarmnode.training.dataset import MAX_INDEX, BadIndex, CutCorpus, DataEntry, Index, cut, decode, encode, texts_of
from swarmnode.training.runspec import RunSpec

logger = logging.getLogger(__name__)

MB = 1_000_000
READ = 4 * CHUNK  # bytes read and hashed at once


def publish(spec: RunSpec, corpus: str, store: ShardStore) -> RunSpec:
    """CutCorpus the corpus of a run's creator into shards, keep them, and fill in what the specification then says.

    A specification that already has an index of another corpus comes back as it is: its data must come from peers.
    Raises CorpusError, NoSpace or ShardError.
    """
    held = "" if spec.data.index else spec.task.heldout_sha256
    text = corpus_for_run(corpus, heldout_sha256=held, heldout=None)
    shares_text = spec.data.source == "shards"
    parts = cut(text)
    texts = [parts.heldout[1], *(text for _, text in parts.shards)] if shares_text else [parts.heldout[1]]
    index = encode(_index_of(parts, shares_text))
    shard = manifest_of(index).id
    if spec.data.index not in ("", shard.hex()):
        logger.info("the corpus here is not the one that the run file was made with; its data have to come from peers")
        return spec
    keep([*texts, index], store)
    return spec.resolved(heldout_sha256=text.heldout_sha256, index=shard.hex())


def keep(texts: Sequence[bytes], store: ShardStore) -> None:
    """Make each text a pinned shard. Raises NoSpace, with nothing pinned, where they do not fit; or ShardError."""
    manifests = [manifest_of(text) for text in texts]
    pinned = _pinned(store)
    size = sum(manifest.size for manifest in manifests if manifest.id not in pinned)
    if size + sum(pinned.values()) > store.cap:
        raise NoSpace(
            f"the run's data take {size / MB:.1f} MB as shards, which do not fit: shards_cap allows "
            f"{store.cap / MB:.1f} MB, and {sum(pinned.values()) / MB:.1f} MB of it are pinned. Raise it (--shards-cap "
            "GB), unpin shards of other runs (swarmnode shards ls), or name a smaller corpus."
        )
    try:
        for text, manifest in zip(texts, manifests, strict=True):
            if not intact(manifest.id, store):
                _write(text, manifest, store)
    except NoRoom as error:
        raise NoSpace(f"the run's data cannot be kept as shards: {error}") from error
    pin_all([manifest.id for manifest in manifests], store)


def pin_all(shards: Iterable[ShardId], store: ShardStore) -> None:
    """Pin those that are not pinned yet. Raises ShardNotHeld, NoRoom or ShardError."""
    pinned = _pinned(store)
    for shard in shards:
        if shard not in pinned:
            store.pin(shard)


def intact(shard: ShardId, store: ShardStore) -> bool:
    """Whether a shard is here and the disk still has its bytes; one that is damaged counts as not held from now on."""
    if not store.holding(shard).complete:
        return False
    try:
        for _ in _verified(shard, store):
            pass
    except ShardNotHeld as error:
        logger.warning("%s", error)
        return False
    return True


def read_index(shard: ShardId, store: ShardStore) -> Index:
    """The index of a data set that is here. Raises BadIndex, or ShardNotHeld."""
    manifest = store.manifest(shard)
    if manifest.size > MAX_INDEX:
        raise BadIndex(f"{manifest.size} bytes; at most {MAX_INDEX} are allowed")
    return decode(b"".join(bytes(part) for part in _verified(shard, store)))


def own_chunks(corpus: str) -> list[Chunk]:
    """The chunks of this node's corpus; none where the default one is not on this machine. Raises CorpusError."""
    try:
        return read_chunks(corpus)
    except CorpusError:
        if corpus:
            raise
        return []


def make_index(spec: RunSpec, chunks: list[Chunk], store: ShardStore) -> bool:
    """Whether these chunks are the run's corpus, so that its index could be made here. Raises NoSpace or ShardError."""
    if len(chunks) < MIN_CHUNKS:
        return False
    index = encode(_index_of(cut(divide(chunks)), spec.data.source == "shards"))
    if manifest_of(index).id.hex() != spec.data.index:
        return False
    keep([index], store)
    return True


def take_own(wanted: Iterable[DataEntry], index: Index, chunks: list[Chunk], store: ShardStore) -> None:
    """Keep those shards that these chunks happen to make. Raises NoSpace or ShardError."""
    found = dict(zip((entry.shard for entry in index.shards), texts_of(chunks, index), strict=True))
    if chunks:
        found[index.heldout.shard] = divide(chunks).heldout
    texts = ((entry, found.get(entry.shard, b"")) for entry in wanted)
    keep([text for entry, text in texts if len(text) == entry.size and manifest_of(text).id == entry.shard], store)


def release_forgotten(runs: RunStore, store: ShardStore) -> None:
    """Pin the data of runs that were left no longer: they go when their room is needed."""
    for name in runs.forgotten():
        try:
            shard = parse_id(name)
            index = read_index(shard, store)
            for one in (shard, index.heldout.shard, *(entry.shard for entry in index.shards)):
                if store.holding(one).size:
                    store.pin(one, False)
        except (ValueError, ShardError) as error:  # ValueError: BadIndex, or another file's name
            logger.warning("what was pinned for the data %s stays pinned: %s", name[:12], error)
        runs.forget(name)


def manifest_of(text: bytes) -> ShardManifest:
    """What a text is as a shard."""
    return ShardManifest(len(text), b"".join(leaf(text[at : at + CHUNK]) for at in range(0, len(text), CHUNK)))


def _index_of(parts: CutCorpus, shares_text: bool) -> Index:
    def entry(upto: int, text: bytes) -> DataEntry:
        return DataEntry(manifest_of(text).id, len(text), upto)

    return Index(entry(*parts.heldout), tuple(entry(*part) for part in parts.shards) if shares_text else ())


def _verified(shard: ShardId, store: ShardStore) -> Iterator[memoryview]:
    """A complete shard, part by part in the same memory, each checked against its hash. Raises ShardNotHeld."""
    room, index = memoryview(bytearray(READ)), 0
    while index < store.manifest(shard).chunks:
        size = store.read(shard, index, room)
        yield room[:size]
        index += chunk_count(size)


def _pinned(store: ShardStore) -> dict[ShardId, int]:
    """Size by shard."""
    return {kept.shard: kept.size for kept in store.kept() if kept.pinned}


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
