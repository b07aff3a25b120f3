"""How shards stand in a trainer's text."""

from __future__ import annotations

import pytest
import trio

from swarmnode.protocols.methods.open.checks.texts import NO_TEXTS, Texts, TrainingText
from swarmnode.protocols.network import PeerId

SHARDS = {b"b": b"0123456789", b"a": b"abcde", b"c": b"XYZ"}


class Three(Texts):
    """Three shards, of which reads are remembered."""

    def __init__(self) -> None:
        self.reads: list[tuple[PeerId, bytes, int, int]] = []

    def size(self, shard: bytes) -> int | None:
        return len(SHARDS[shard]) if shard in SHARDS else None

    async def read(self, holder: PeerId, shard: bytes, start: int, stop: int) -> bytes:
        await trio.lowlevel.checkpoint()
        self.reads.append((holder, shard, start, stop))
        return SHARDS[shard][start:stop]


def test_shards_stand_in_the_order_of_their_ids_whoever_names_them_how() -> None:
    async def main() -> None:
        texts = Three()
        for order in ([b"b", b"a", b"c"], [b"c", b"b", b"a"]):
            shelf = TrainingText(texts, order)
            assert shelf.size == 18
            assert await shelf.pieces("who", [(1, 3)]) == ((1, b"bc"),)
            assert await shelf.pieces("who", [(4, 7), (14, 18)]) == ((4, b"e"), (5, b"01"), (14, b"9"), (15, b"XYZ"))
        assert texts.reads[0] == ("who", b"a", 1, 3)

    trio.run(main)


@pytest.mark.parametrize("shards", [[b"a", b"d"], [b"a", b"a"]])
def test_what_is_not_the_runs_or_stands_twice_is_refused(shards: list[bytes]) -> None:
    with pytest.raises(ValueError, match="not the run's"):
        TrainingText(Three(), shards)


def test_without_text_there_is_nothing_to_read() -> None:
    assert TrainingText(NO_TEXTS, ()).size == 0
