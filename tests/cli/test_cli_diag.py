"""The file for a bug report: what is in it, and that no secret is."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

from swarmnode.cli.diag import struck
from swarmnode.node.exitcodes import OK, USAGE
from swarmnode.node.logs import FILE_NAME

TOKEN = "page-token-0123456789abcdef"
PASSPHRASE = 'a "quoted" passphrase, schön'
API_KEY = "hf_abcdefghijklmnop"
LINK = "swarm1qpzry9x8gf2tvdw0s3jn54khce6mua7lqpzry9x8gf2tvdw0s3jn54khce6mua7l"


def texts(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {
            Path(member.name).name: file.read().decode()
            for member in archive.getmembers()
            if (file := archive.extractfile(member)) is not None
        }


def test_diag_has_what_a_report_needs_and_no_secret(
    swarmnode: Any, daemon: Any, home: Path, answer: Any, tmp_path: Path
) -> None:
    secret_file = tmp_path / "passphrase"
    secret_file.write_text(PASSPHRASE + "\n")
    environ = {"SWARMNODE_PASSPHRASE_FILE": str(secret_file), "HF_TOKEN": API_KEY}
    assert swarmnode("id", SWARMNODE_PASSPHRASE="").returncode == OK
    key = (home / "identity.key").read_text()
    run_id, successor = answer["run"]["run_id"], "c1" * 32
    (home / "dashboard.token").write_text(TOKEN)
    (home / "logs").mkdir(exist_ok=True)
    said = f"key {key} token {TOKEN} {PASSPHRASE} {API_KEY} join {LINK} http://me:pass@host/ of run {run_id}"
    line = {"time": "2026-01-01T00:00:00.000Z", "level": "INFO", "logger": "swarmnode.x", "message": said}
    (home / "logs" / FILE_NAME).write_text(json.dumps(line) + "\n")
    daemon.status |= {"join": f"swarmnode join {LINK}", "problems": [f"{PASSPHRASE} {TOKEN} --run {successor}"]}

    told = swarmnode("diag", str(tmp_path / "report.tar.gz"), "--json", **environ)
    assert told.returncode == OK, told.stderr
    found = texts(tmp_path / "report.tar.gz")
    assert (tmp_path / "report.tar.gz").stat().st_mode & 0o777 == 0o600
    assert found.keys() >= {"versions.json", "config.json", "status.json", "peers.json", "netcheck.json", "log.jsonl"}
    assert found["metrics.txt"] == "swarmnode_peers 2\n" and json.loads(found["versions.json"])["packages"]["libp2p"]
    assert json.loads(found["status.json"])["run"]["name"] == "byte-lm" and '"port"' in found["config.json"]
    whole = "\n".join(found.values())
    assert run_id[:12] in whole and "of run" in found["log.jsonl"]
    secrets = [TOKEN, PASSPHRASE, json.dumps(PASSPHRASE)[1:-1], API_KEY, LINK, "me:pass", run_id[:32], successor]
    for secret in [*secrets, *(part for part in key.splitlines() if "KEY" not in part)]:
        assert secret not in whole, secret
    again = swarmnode("diag", str(tmp_path / "report.tar.gz"), **environ)
    assert again.returncode == USAGE and "there is a file already" in again.stderr


def test_diag_without_a_node_says_what_it_lacks(swarmnode: Any, tmp_path: Path) -> None:
    told = swarmnode("diag", str(tmp_path / "report.tar.gz"))
    assert told.returncode == OK, told.stderr
    found = texts(tmp_path / "report.tar.gz")
    assert "status.json" not in found and "no swarmnode daemon is running" in found["missing.txt"]
    assert "- lacks status.json" in told.stdout


def test_a_run_id_is_shortened_wherever_it_stands() -> None:
    for before, after in (("", ""), ("a\n", " b"), ("run_", "_x"), ("/runs/", "/checkpoints")):
        said = struck(json.dumps(before + "ab" * 32 + after), [])
        assert "ab" * 6 + "…" in said and "ab" * 7 not in said
    assert struck("ab" * 64, []) == "ab" * 64  # a signature
