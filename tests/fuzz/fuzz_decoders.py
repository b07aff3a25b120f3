"""Coverage-guided fuzzing of every decoder that strangers' bytes reach, with atheris (libFuzzer for Python).

    python tests/fuzz/fuzz_decoders.py [--only NAME] [--corpus build/fuzz] [libFuzzer options: -max_total_time=60 …]

`make fuzz` installs atheris and runs this. The targets are in tests/support/anybytes.py. What is found is shown with
its traceback and written to crash-<sha1> beside the corpus; such a file as an argument runs that input again. Inputs
that reach something new are kept in the corpus, so that the next run goes on from there.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "support"))  # as pyproject.toml does for pytest

try:
    import atheris
except ImportError:
    sys.exit(
        "atheris is not installed, so nothing was fuzzed. `make fuzz` installs it; there are wheels for Linux and"
        " CPython 3.11 to 3.13, elsewhere it is built and wants clang. The tests try the same targets with Hypothesis."
    )

with atheris.instrument_imports(include=["swarmnode", "anybytes"]):
    from anybytes import TARGETS, all_seeds, choose

LONGEST = 20_000  # bytes: more than the longest seed


def option(name: str, default: str) -> str:
    """Take `name VALUE` out of the command line."""
    if name not in sys.argv:
        return default
    at = sys.argv.index(name)
    value = sys.argv[at + 1]
    del sys.argv[at : at + 2]
    return value


def main() -> None:
    only = option("--only", "")
    folder = Path(option("--corpus", str(ROOT / "build" / "fuzz"))).resolve()
    if only and only not in TARGETS:
        sys.exit(f"no target {only!r}; known targets: {', '.join(TARGETS)}")
    corpus = folder / (only.replace(" ", "-") or "all")
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(TARGETS[only].seeds if only else all_seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)

    def one(raw: bytes) -> None:
        target, rest = (TARGETS[only], raw) if only else choose(raw)
        target.takes(rest)

    again = any(Path(argument).is_file() for argument in sys.argv[1:])
    fresh = [f"-max_len={LONGEST}", f"-artifact_prefix={folder}/", str(corpus)]
    atheris.Setup([*sys.argv, *([] if again else fresh)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
