"""Golden vectors of the arithmetic that members of a swarm must share bit by bit, and their expected hashes.

    python -m swarmnode.training.golden          # prints what this machine computes, as the table below

A daemon checks them before it takes part in a run, and CI checks them wherever it runs. They catch a numpy, a compiler
or a CPU that fuses, reorders or flushes what docstrings say is rounded one by one. Inputs come from SHAKE-256 and
powers of two, with no random number library between: with ties, both zeros, subnormals and large values.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

from swarmnode.training.codecs import CODECS, codec, codec_in
from swarmnode.training.open_step import CLIP_UNIT, Factor, apply_contributions, clip_units, norm_of, opened
from swarmnode.training.outer import Layout, OuterState, Vector, fold_in, outer_step, shares_of, state_hash

SIZE = 2 * 4096 + 1024 + 77  # two whole chunks of topk, a short one, and short last blocks of the others


class GoldenMismatch(Exception):
    """This machine computes other bits than the swarm; the text says where, what it means and what to do."""


def check_golden() -> None:
    """Compute every golden vector; some 20 ms. Raises GoldenMismatch naming all that differ."""
    wrong = [name for name, digest in computed().items() if digest != EXPECTED[name]]
    if wrong:
        raise GoldenMismatch(
            f"this machine computes other bits than the swarm: {', '.join(wrong)} (of {len(EXPECTED)} checks; numpy"
            f" {np.__version__}). Its parameters would drift away from everybody's, so it must not train with others."
            " Install numpy from the wheels of PyPI, without libraries that make the CPU take subnormal numbers for"
            " zero; if the mismatch stays or moves from start to start, suspect the memory or the CPU"
        )


def computed() -> dict[str, str]:
    """What this machine computes: sha-256 by the name of the check."""
    found = {"inputs": vector("inputs").tobytes()}
    for name, momentum in (("outer_step", 0.9), ("outer_step without momentum", 0.0)):
        state = _state()
        for round in range(2):
            state = outer_step(state, vector(f"gradient {round}"), lr=0.7, momentum=momentum)
        found[name] = _bits(state)
    mean: Vector = np.zeros(SIZE, np.float32)
    for i, share in enumerate(shares_of([3, 1, 7])):
        fold_in(mean, share, vector(f"part {i}"))
    found["weighted_sum"] = mean.tobytes()
    for name in CODECS:
        raw = bytes(codec(name).encode(vector("pseudo-gradient")))
        found[f"codec {name}"] = raw + codec(name).decode(raw, SIZE).tobytes()
    for name in ("topk", "int8"):
        raws = [bytes(codec(name).encode(vector(f"contribution {i}"))) for i in range(3)]
        factors = [Factor(5, CLIP_UNIT, 13), Factor(1, 333_333, 13), Factor(7, CLIP_UNIT - 1, 13)]
        state = apply_contributions(_state(), raws, factors, lr=1.0, codec_name=name)
        norms = [norm_of(opened(raw, SIZE, codec_name=name)) for raw in raws]
        found[f"open_step {name}"] = state.parameters.tobytes() + struct.pack("<3d", *norms)
    state, factors = _state(), [Factor(5, CLIP_UNIT, 12), Factor(7, CLIP_UNIT - 1, 12)]
    for round in range(4):
        raws = [bytes(codec_in(round, "sign3").encode(vector(f"turn {round} {i}"))) for i in range(2)]
        state = apply_contributions(state, raws, factors, lr=0.7, momentum=0.8, codec_name="sign3")
    found["open_step sign3 in turns, with momentum"] = _bits(state)
    norms = [norm_of(vector(f"norm {i}", 100 * (i + 1))) for i in range(6)] + [0.0, 1e-300, 1e300]
    found["clip_units"] = struct.pack("<9d", *norms) + struct.pack("<9q", *clip_units(norms))
    found["state_hash"] = state_hash(3, Layout.of([("w", (SIZE - 7, 1)), ("b", (7,))]), _state()).encode()
    return {name: hashlib.sha256(raw).hexdigest() for name, raw in found.items()}


def vector(name: str, size: int = SIZE) -> Vector:
    """Finite values, float32 (size,), of magnitudes 2^-20 to 2^4; every 64th is subnormal, a zero, huge or a tie."""
    words = np.frombuffer(hashlib.shake_256(name.encode()).digest(4 * size), "<u4")
    # 24 bits convert to float32 exactly, and so does every power of two
    values = (words & np.uint32(0xFFFFFF)).astype(np.float32) * np.float32(2.0**-24)
    values = np.ldexp(values, (words >> np.uint32(24) & np.uint32(31)).astype(np.int32) % 25 - 20)
    values[words >> np.uint32(31) == 1] *= np.float32(-1)
    for offset, special in enumerate((1e-40, -0.0, 0.5, -0.5, 1e-45, 0.0, 4096.0, -(2.0**-126))):
        values[offset * 64 + 7 :: 512] = np.float32(special)
    return values.astype(np.float32, copy=False)


def _state() -> OuterState:
    return OuterState.start(vector("parameters"))


def _bits(state: OuterState) -> bytes:
    return state.parameters.tobytes() + state.momentum.tobytes()


EXPECTED: dict[str, str] = {
    "inputs": "51537792275c1120c53357b086e744afab6b4fb321544a3134ea525fc99b956d",
    "outer_step": "60f4985d80d5ef9bf0f36deec203b66869faec09d84418423be778cd80ddec24",
    "outer_step without momentum": "a40bc7115206b8047fb03de7b6709aeeec1473c7b6625a23ccea7f8f44f86009",
    "weighted_sum": "6429926dc6a937c9a40e9599cad2a8612d6df216ef12b906c59d7403b32d448a",
    "codec fp32": "b3431c7c307f3e92b721eb026eb2ba2c6fd60c66125f2bd5b9d28d3b798dee52",
    "codec fp16": "426822a1488af3a7089313375aa2252ee160c0c1994e262d41fc4451f5af035d",
    "codec bf16": "e229117ec1539162be7f8303e2e3fef5ed2deee35ca5df1a43c0fa97b6a01dfc",
    "codec int8": "30154a74e01676e379a96f1d7ac4f326769a536af5aecb18d36ad1e083b75d3e",
    "codec int4": "2b7a00379ddd8be50a4b98bc523e6055a006dbaae1566fe3a3ec5c15f00dceed",
    "codec e3m0": "aed255e9b836c334463b464bd95f98a25ad2a493393a255747920a5d33791d4c",
    "codec sign": "211a7101f43bed002937b69c9c69b7248390993d4e5854ad138524d9235ec04a",
    "codec sign3": "7beed26e0c10c01f4180df0619759727e74e5617478432cf6af915c1ab8eb385",
    "codec topk": "686ad9267d4ec2cbf2e79355162fb9e150c4d7a9b19ab52300b7864bfe49b751",
    "open_step topk": "ade79e33769d329fbf281f59b3eadcbac18d14b9f4786efe007eaa93b45d0244",
    "open_step int8": "f15f226db1c08b7614fb977235eeeaebf92c36b86f63b0cd6c087812c27c368f",
    "open_step sign3 in turns, with momentum": "a5c8152a073855426a6620749cb4ccc9144166cc0ea664dc3b379b56a553c29d",
    "clip_units": "1d58d31e8d208611cd0f44beae9e98cd4dff189426415f4df793507b372053cd",
    "state_hash": "8be92aaeb3463bf48dfb9a3f3ec87261de59be2a583bf384330372e33b186f12",
}


if __name__ == "__main__":
    for check, digest in computed().items():
        print(f'    "{check}": "{digest}",')
