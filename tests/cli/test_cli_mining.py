"""`swarmnode id --mine`: a key that cost work, and no key lost on the way to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from swarmnode.node.exitcodes import CONFIG, DATADIR_BUSY, OK
from swarmnode.node.storage.datadir import DataDir
from swarmnode.protocols.state.membership import work_of


def identify(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "swarmnode", "id", "--data-dir", str(home), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_a_mined_key_has_the_work_and_stays(tmp_path: Path) -> None:
    done = identify(tmp_path, "--mine", "6", "--json")
    assert done.returncode == OK, done.stderr
    told = json.loads(done.stdout)
    assert told["work_bits"] == work_of(told["peer_id"]) >= 6
    again = identify(tmp_path, "--mine", "6")
    assert again.stdout.strip() == told["peer_id"] and "already" in again.stderr


def test_a_key_that_is_there_is_only_replaced_when_asked_and_then_kept_aside(tmp_path: Path) -> None:
    old = identify(tmp_path).stdout.strip()
    bits = work_of(old) + 5
    refused = identify(tmp_path, "--mine", str(bits))
    assert refused.returncode == CONFIG and "--replace" in refused.stderr
    assert identify(tmp_path).stdout.strip() == old
    replaced = identify(tmp_path, "--mine", str(bits), "--replace")
    assert replaced.returncode == OK and work_of(replaced.stdout.strip()) >= bits
    (aside,) = tmp_path.glob("identity.key.*")
    assert aside.name.endswith(old[-12:]) and str(aside) in replaced.stderr
    assert aside.stat().st_mode & 0o777 == 0o600


def test_the_key_of_a_running_daemon_is_not_replaced(tmp_path: Path) -> None:
    with DataDir(tmp_path):
        assert identify(tmp_path, "--mine", "1").returncode == DATADIR_BUSY
