"""Encodings of float32 vectors on the wire, by the name that a RunSpec gives: `codec("int8")`.

All are numpy only, stateless and deterministic: the same values make the same bytes on every CPU. What an encoding
loses is kept by `feedback.ErrorFeedback`.
"""

from __future__ import annotations

from swarmnode.training.codecs.base import Codec as Codec
from swarmnode.training.codecs.base import CodecError as CodecError
from swarmnode.training.codecs.floats import Bf16, Fp16, Fp32
from swarmnode.training.codecs.int4 import E3M0, Int4
from swarmnode.training.codecs.int8 import Int8
from swarmnode.training.codecs.sign import Sign, Sign3
from swarmnode.training.codecs.topk import TopK

CODECS: dict[str, Codec] = {
    c.name: c for c in (Fp32(), Fp16(), Bf16(), Int8(), Int4(), E3M0(), Sign(), Sign3(), TopK())
}


def codec_in(round: int, name: str) -> Codec:
    """The codec by which contributions of a round are encoded: that of `name`, in its turn. What they are needs none.

    Raises ValueError as `codec` does.
    """
    found = codec(name)
    return Sign3(round) if isinstance(found, Sign3) else found


def codec(name: str) -> Codec:
    """The codec called `name` in `[exchange] codec`. Raises ValueError naming the known ones."""
    try:
        return CODECS[name]
    except KeyError:
        raise ValueError(f"unknown codec {name!r}; known codecs: {', '.join(CODECS)}") from None
