"""What makes the command line quick: none of its modules imports anything heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "trio", "libp2p", "numpy", "rich", "matplotlib", "cryptography", "multiaddr", "pydantic")

IMPORT_ALL = """
import json, sys
from importlib import import_module
from swarmnode.cli.main import COMMANDS
for module, attribute in COMMANDS.values():
    getattr(import_module(module), attribute)
import swarmnode.cli.views, swarmnode.node.logs, swarmnode.node.identity
print(json.dumps(sorted(sys.modules)))
"""

RUN_ONE = """
import sys
from swarmnode.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print(*sorted(sys.modules))
"""


def test_no_command_module_imports_anything_heavy() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True)
    loaded = set(json.loads(run.stdout))
    assert "typer" in loaded
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize("arguments", [["--help"], ["status"]], ids=["help", "status"])
def test_a_command_that_runs_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    """Parsing its own options is typer's part, which imports more in some versions than in others."""
    environ = {**os.environ, "SWARMNODE_DATA_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", RUN_ONE, *arguments], capture_output=True, text=True, check=True, env=environ
    )
    loaded = set(run.stdout.split())
    assert "typer" in loaded
    assert not loaded & set(HEAVY)
