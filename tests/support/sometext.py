"""Text to train on, as the files that a node would have of its run, without a run's corpus.

spec = parse_runspec({**tables, "task": {"heldout_sha256": HELDOUT_SHA256}}, source="test")
settings = TrainerSettings(**some_text(tmp_path))
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

HELDOUT = random.Random(1).randbytes(20_000)
HELDOUT_SHA256 = hashlib.sha256(HELDOUT).hexdigest()


def some_text(folder: Path, text: bytes = b"", heldout: bytes = HELDOUT) -> dict[str, Any]:
    """What an Assignment or a TrainerSettings says of a text, random bytes without one, and of what is held out."""
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    (texts / "heldout").write_bytes(heldout)
    (texts / "text").write_bytes(text or random.Random(0).randbytes(180_000))
    return {"heldout": str(texts / "heldout"), "texts": (str(texts / "text"),)}
