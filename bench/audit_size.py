"""An audit of a model of any size by two trainer processes, as daemons run them: what it takes, and whether lies show.

    python bench/audit_size.py                                    # 135 M parameters: 24 GB of memory, 15 GB of disk
    python bench/audit_size.py --layers 4 --width 128 --heads 4 --steps 16

Random weights. An author trains one round and records its states; a second process, with another number of threads,
repeats one stretch from what the author shows; then the books are done as an auditor does them. One JSON object:
seconds of a step, of recording beside it, of the replay and of the books, bytes on disk and on the wire, peak memory of
either process, and the distances of the honest stretch and of one on other data.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import trio

from swarmnode.node.trainer.child import TrainerSettings
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.protocols.methods.trainer import Batches, Slice
from swarmnode.training.codecs import codec
from swarmnode.training.codecs.feedback import ErrorFeedback
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.verify.replay import DECAY, LEAST, Distance, explains, walk
from swarmnode.training.verify.trace import Leg, Origin, Stretch, Trace, vector_id
from swarmnode.training.verify.vectors import Vectors

TEXT = 200_000  # bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=960)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="steps of a round")
    parser.add_argument("--train", type=int, default=0, help="steps that are trained; 0: one stretch and a half")
    parser.add_argument("--device", default="cpu", help="of the author (default cpu)")
    parser.add_argument("--auditor", default="", metavar="DEVICE", help="of the auditor, else that of the author")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swarmnode-audit-") as folder:
        print(json.dumps(trio.run(measure, options, Path(folder).absolute())))


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    text = " ".join(random.Random(1).choices(["def", "self", "return", "x", "if", "for", "in"], k=TEXT)).encode()[:TEXT]
    (folder / "shard").write_bytes(text)
    (folder / "heldout").write_bytes(text[: TEXT // 10])
    spec = parse_runspec(
        {
            "run": {"name": "audit", "trust": "open"},
            "task": {"heldout_sha256": hashlib.sha256(text[: TEXT // 10]).hexdigest()},
            "model": {name: getattr(options, name) for name in ("layers", "heads", "width", "context")},
            "inner": {"batch": options.batch, "steps": options.steps},
            "trust": {"audit_share": 0.03},
        },
        source="bench",
    )
    settings = TrainerSettings(
        nice=0,
        device=options.device,
        heldout=str(folder / "heldout"),
        texts=(str(folder / "shard"),),
        sandbox="auto",
    )
    shown = Vectors(folder / "shown")
    author = replace(settings, threads=2, scratch=str(folder / "author"))
    told, stretch, delta = await train(spec, author, options.train or options.steps * 3 // 2, shown)
    on = options.auditor or options.device
    auditor = replace(settings, threads=1, scratch=str(folder / "auditor"), device=on)
    told |= await audit(spec, auditor, stretch, text, shown)
    told |= await trio.to_thread.run_sync(books, spec, stretch, delta, shown)
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return told | {"trainer_peak_gb": round(children, 2), "daemon_peak_gb": round(own, 2)}


async def train(
    spec: RunSpec, settings: TrainerSettings, steps: int, shown: Vectors
) -> tuple[dict[str, Any], Stretch, np.ndarray]:
    """A round and a half of an author; its first stretch, whose states are shown, and what it moved, (P,)."""
    trainer = TrainerProcess(spec, run_id=spec.run_id, peer_id="author", settings=settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(trainer.run)
        before = trainer.parameters()
        began = trio.current_time()
        done = await trainer.train(round=0, steps=steps, seconds=float("inf"))
        marked = await trainer.mark()
        recorded = trio.current_time() - began - done.seconds
        stretch = marked.stretches[0]
        folder = trainer.states[0]
        await trio.to_thread.run_sync(lambda: show(folder, shown, stretch))
        on_disk = sum(path.stat().st_size for path in folder.iterdir())
        parameters = trainer.layout.parameters
        nursery.cancel_scope.cancel()
    end = shown.get(stretch.end.parameters)
    assert end is not None
    points = len(marked.stretches) + 1
    return (
        {
            "parameters": parameters,
            "device": trainer.device,
            "stretches": [each.steps for each in marked.stretches],
            "step_s": round(done.seconds / done.steps, 3),
            "recording_s_per_point": round(recorded / points, 3),
            "recording_over_training": round(recorded / done.seconds, 4),
            "recording_over_training_at_10_steps_a_stretch": round(recorded / points / (10 * done.seconds / steps), 4),
            "disk_gb": round(on_disk / 1e9, 2),
        },
        stretch,
        before - end,
    )


def show(folder: Path, shown: Vectors, stretch: Stretch) -> None:
    """Have the states of a stretch elsewhere, without a copy."""
    shown.folder.mkdir(exist_ok=True)
    for id in (*stretch.start.vectors, *stretch.end.vectors):
        os.link(folder / id.hex(), shown.folder / id.hex())


async def audit(
    spec: RunSpec, settings: TrainerSettings, stretch: Stretch, text: bytes, shown: Vectors
) -> dict[str, Any]:
    """Repeat the stretch in a process of its own, on its data and on others."""
    trainer = TrainerProcess(spec, run_id=spec.run_id, peer_id="auditor", settings=settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(trainer.run)
        fetched = trainer.states[2]
        fetched.mkdir(parents=True)
        size = 0
        began = time.perf_counter()
        for id in (*stretch.start.vectors, *stretch.end.vectors):
            os.link(shown.folder / id.hex(), fetched / id.hex())
            vector = shown.get(id)
            assert vector is not None
            assert vector_id(vector) == id
            size += vector.nbytes
        hashed = time.perf_counter() - began
        steps = tuple(range(stretch.step, stretch.step + stretch.steps))
        places = await trainer.places(Batches("author", stretch.round, steps, len(text)))
        slice = Slice("author", stretch, len(text), tuple((start, text[start:stop]) for start, stop in places))
        honest = await trainer.replay(slice)
        other = await trainer.replay(replace(slice, author="somebody", pieces=((0, text),)))
        nursery.cancel_scope.cancel()
    (true,), (lie,) = honest.distances, other.distances
    return {
        "auditor": trainer.device,
        "replay_s": round(honest.seconds, 2),
        "states_hashed_s": round(hashed, 2),
        "states_fetched_gb": round(size / 1e9, 2),
        "honest": row(true),
        "honest_within": true.within(LEAST),
        "other_data": row(lie),
        "other_data_within": lie.within(LEAST),
    }


def books(spec: RunSpec, stretch: Stretch, delta: np.ndarray, shown: Vectors) -> dict[str, Any]:
    """Encode as the author does, then check the contribution as an auditor does."""
    encoding, nothing = codec(spec.exchange.codec), np.zeros(delta.size, np.float32)
    raw = bytes(ErrorFeedback(encoding, delta.size, decay=DECAY).encode(delta))
    start, end = (shown.get(point.parameters) for point in (stretch.start, stretch.end))
    assert start is not None
    assert end is not None
    began = time.perf_counter()
    legs = (Leg(b"", False, (stretch,)),)
    ids = (stretch.start.parameters, stretch.end.parameters, vector_id(nothing))
    trace = Trace(Origin.FRESH, b"", bytes(32), *ids, legs, (bytes(32),))
    offered = walk(trace, start, ends={stretch.end.parameters: end}, states={})
    explains(raw, start - offered, nothing, encoding)
    return {"books_s": round(time.perf_counter() - began, 2), "contribution_mb": round(len(raw) / 1e6, 2)}


def row(found: Distance) -> list[float]:
    """Of the parameters and both moments, three digits."""
    return [float(f"{each:.3g}") for each in (found.parameters, found.first, found.second)]


if __name__ == "__main__":
    main()
