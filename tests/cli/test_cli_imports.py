"""What makes the command line quick: none of its modules imports anything heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

HEAVY = ("torch", "trio", "libp2p", "numpy", "rich", "matplotlib", "cryptography", "multiaddr", "pydantic")

IMPORT_ALL = """
import json, sys
from importlib import import_module
from swarmnode.cli.main import COMMANDS
for module, attribute in COMMANDS.values():
    getattr(import_module(module), attribute)
import swarmnode.cli.status_view, swarmnode.node.logs, swarmnode.node.identity
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""

RUN_ONE = """
import sys
from swarmnode.cli.main import main
main(["status", "--data-dir", sys.argv[1]])
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_no_command_module_imports_anything_heavy() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True)
    loaded = set(json.loads(run.stdout))
    assert "typer" in loaded
    assert not loaded & set(HEAVY)


def test_a_command_that_runs_imports_nothing_heavy(tmp_path: Path) -> None:
    """Parsing its own options is typer's part, which imports more in some versions than in others."""
    run = subprocess.run([sys.executable, "-c", RUN_ONE, str(tmp_path)], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "typer" in loaded
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize("arguments", [["--help"], ["status"]])
def test_help_and_status_answer_at_once(arguments: list[str], tmp_path: Path) -> None:
    """0.3 s is the promise on an idle machine (see docs/cli.md); a busy one gets three times that before this fails."""
    taken: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        environ = {**os.environ, "SWARMNODE_DATA_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-m", "swarmnode.cli.main", *arguments], capture_output=True, env=environ)
        taken.append(time.perf_counter() - start)
    assert median(taken) < 0.9, taken
