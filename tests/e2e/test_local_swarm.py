"""`swarmnode local --json` as issue readers and scripts use it: what it prints, writes and leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

from realnodes import swarmnode

NODE = {"event", "node", "pid", "trainer_pid", "peer_id", "data_dir", "multiaddr"}
ROUND = {"event", "node", "round", "loss", "state_hash", "outcome", "seconds", "bytes_in", "bytes_out"}
SUMMARY = {
    "event",
    "nodes",
    "rounds",
    "parameters",
    "heldout_bits_per_byte",
    "solo_bits_per_byte",
    "hashes_agree",
    "bytes_per_parameter_round",
    "compute_share",
    "seconds",
}


def test_three_nodes_train_agree_and_report(tmp_path: Path, corpus: Path, run_file: Path) -> None:
    done = swarmnode(
        *("local", run_file, "--nodes", "3", "--rounds", "3", "--solo", "--json", "--report", tmp_path / "report"),
        SWARMNODE_CORPUS=str(corpus),
        timeout=110.0,  # 15 s where it is alone on two cores
        TMPDIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    nodes, rounds, summary = events[:3], events[3:-1], events[-1]

    assert [event["event"] for event in nodes] == ["node"] * 3
    assert [event["node"] for event in nodes] == [0, 1, 2]
    assert all(event.keys() >= NODE for event in nodes)
    assert len({event["peer_id"] for event in nodes}) == len({event["pid"] for event in nodes}) == 3
    assert not [event for event in nodes for pid in ("pid", "trainer_pid") if Path(f"/proc/{event[pid]}").exists()]

    assert {event["event"] for event in rounds} == {"round"}
    assert all(event.keys() >= ROUND for event in rounds)
    for number in range(3):
        ended = [event for event in rounds if event["round"] == number]
        assert sorted(event["node"] for event in ended) == [0, 1, 2]
        assert len({event["state_hash"] for event in ended}) == 1
        assert all(event["outcome"] == "Completed" and event["seconds"] > 0 for event in ended)

    assert summary.keys() >= SUMMARY
    assert (summary["event"], summary["nodes"], summary["rounds"], summary["hashes_agree"]) == ("summary", 3, 3, True)
    assert 0 < summary["heldout_bits_per_byte"] < 8 and 0 < summary["solo_bits_per_byte"] < 8
    assert 0 < summary["compute_share"] <= 1 and summary["bytes_per_parameter_round"] > 0.5

    page = (tmp_path / "report" / "index.html").read_text()
    assert page.count("://") == page.count("http://www.w3.org"), "the report must need nothing from elsewhere"
    told = json.loads(page.split('id="report">')[1].partition("</script>")[0])
    assert [len(node["peers"]["peers"]) for node in told["nodes"]] == [2, 2, 2]
    assert min(len(node["history"]["rounds"]) for node in told["nodes"]) >= 3
    assert len(told["solo"]["rounds"]) == 3 and told["settings"]["run"]["name"] and told["versions"]["torch"]
    assert not list(tmp_path.glob("swarmnode-local-*")), "data directories are left behind"
    assert "Traceback" not in done.stderr
