"""The text of a run without its nodes: cut, held out and divided as the product does it.

    text = RunText(spec, folder)                            # the standard library's sources; or corpus="/data/books"
    task = ByteLM(text.spec, Assignment(text.spec.run_id, "alice", **text.files("alice")))
    settings = TrainerSettings(**text.files("alice"))       # of a trainer process
    text.heldout, text.slice("alice")                       # bytes

Whoever publishes the same corpus with the same seed and vocabulary, a daemon above all, holds out the very same text.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from swarmnode.node.storage.cutting import publish, read_index
from swarmnode.node.storage.shardstore import ShardStore
from swarmnode.protocols.transfer.shard_manifest import parse_id
from swarmnode.training.dataset import ranking, share
from swarmnode.training.runspec import RunSpec

PLENTY = 1 << 40  # bytes


class RunText:
    """A corpus, cut for the run `spec` into shards in `folder`, which must outlive this. Raises CorpusError.

    Of the shards, `apart` belong to nobody: a text to test on, `tested`, that no peer trains on or judges by.
    """

    def __init__(self, spec: RunSpec, folder: Path, corpus: str = "", *, apart: int = 0) -> None:
        self._store = ShardStore(folder / "shards", cap=PLENTY)
        self.spec = publish(spec, corpus, self._store)  # with the hash of what is held out
        whole = read_index(parse_id(self.spec.data.index), self._store)
        self.index = dataclasses.replace(whole, shards=whole.shards[apart:])
        self.after = (whole.heldout, *whole.shards)[apart].upto  # the cut behind which lies what peers train on
        self.heldout = self._path(whole.heldout.shard).read_bytes()
        self.tested = b"".join(self._path(entry.shard).read_bytes() for entry in whole.shards[:apart])

    def files(self, peer: str) -> dict[str, Any]:
        """What the Assignment and the TrainerSettings of a peer say of the text: its own quarter of the shards."""
        mine = ranking(self.index, self.spec.run_id, peer)[: share(self.index)]
        tokenizer = self.spec.data.tokenizer
        return {
            "heldout": str(self._path(self.index.heldout.shard)),
            "texts": tuple(sorted(str(self._path(entry.shard)) for entry in mine)),
            "tokenizer": str(self._path(parse_id(tokenizer))) if tokenizer else "",
        }

    def slice(self, peer: str) -> bytes:
        """What a peer trains on."""
        return b"".join(Path(path).read_bytes() for path in self.files(peer)["texts"])

    def _path(self, shard: bytes) -> Path:
        return self._store.path(shard)
