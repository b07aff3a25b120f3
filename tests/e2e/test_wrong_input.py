"""What goes wrong for careful people too: each case ends or carries on as they would want, and says what to do."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgpack
import pytest
from lying_peer import LyingPeer
from realnodes import LOCAL, PATIENCE, PROGRAM, RUN_TOML, Node, environment, swarmnode, until

from swarmnode.node.storage.cutting import publish
from swarmnode.node.storage.datadir import DataDir
from swarmnode.node.storage.shardstore import ShardStore
from swarmnode.training.runspec import SCHEMA, encode, load_runspec

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWG45TKiahNhiYdeSysBg4uAde6sWQTDALm2FxgqJB7q4s"
ELSEWHERE = "ab" * 32  # a run id that nothing hashes to

TASK = """
import torch

class Sum:
    '''Learns to add four numbers.'''

    tokens_per_sample = 4

    def __init__(self, spec, assignment, device="cpu"):
        torch.manual_seed(spec.run.seed)
        self.model = torch.nn.Linear(4, 1)

    def draw(self, samples, generator):
        return torch.randn(samples, 4, generator=generator)

    def loss(self, batch):
        return (self.model(batch).squeeze(-1) - batch.sum(-1)).pow(2).mean()

    @torch.no_grad()
    def evaluate(self, *, thorough):
        return float(self.loss(torch.eye(4)))

    def sample(self, prompt, *, length, temperature, seed):
        return b"6"
"""


@pytest.fixture(scope="module", autouse=True)
def patient(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, other_corpus: Path, run_file: Path
) -> Iterator[dict[str, Node]]:
    """Nodes that get no run within some seconds; started first, so that the other tests run meanwhile."""
    folder = tmp_path_factory.mktemp("patient")
    spec = publish(load_runspec(run_file), str(corpus), ShardStore(folder / "shards", cap=1 << 30))
    kept = folder / "other-corpus" / "runs" / spec.run_id
    kept.mkdir(parents=True)
    (kept / "run.spec").write_bytes(encode(spec))

    newer = msgpack.packb({**msgpack.unpackb(encode(spec)), "schema": SCHEMA + 1})
    newer_id = hashlib.sha256(newer).hexdigest()
    with LyingPeer({ELSEWHERE: encode(spec), newer_id: newer}) as liar, ExitStack() as stack:
        nodes = {
            "nobody": Node(folder / "nobody", "--join", NOBODY, corpus=corpus),
            "liar": Node(folder / "liar", "--join", liar.address, "--run", ELSEWHERE, corpus=corpus),
            "newer": Node(folder / "newer", "--join", liar.address, "--run", newer_id, corpus=corpus),
            "other-corpus": Node(folder / "other-corpus", "--run", spec.run_id, corpus=other_corpus),
        }
        yield {name: stack.enter_context(node) for name, node in nodes.items()}


def refused(*arguments: str | Path, code: int, **environ: str) -> str:
    """What a command says on standard error when it ends with `code`, which must be no traceback."""
    done = swarmnode(*arguments, **environ)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert done.stderr.startswith("swarmnode: ") or "\nswarmnode: " in done.stderr, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("batch = 2", "bacth = 2", "[inner]: unknown key 'bacth'; did you mean 'batch'?"),
        ("batch = 2", "batch = 0", "[inner]: batch = 0 is not valid; expected 1 to 65536 sequences"),
        ("[model]", "[modle]", "unknown table [modle]; known tables: run, task, data, model"),
        ("heads = 2", "heads = 5", "width = 32 is not a multiple of twice heads = 5"),
        ('name = "tiny"', "", "[run]: 'name' is missing"),
        ("seed = 3", "seed = ", "not valid TOML"),
    ],
)
def test_mistake_in_a_run_file_is_named_before_anything_starts(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_TOML.replace(before, after))
    home = tmp_path / "home"
    for command in (
        ("run", path, "--data-dir", home),
        ("local", path) if "heads" in before else ("config", "check", path),
    ):
        text = refused(*command, code=3)
        assert str(path) in text and said in text
    assert not home.exists()


def test_missing_run_file_and_missing_run_say_what_to_give(tmp_path: Path) -> None:
    assert "no such file" in refused("run", tmp_path / "absent.toml", "--data-dir", tmp_path / "home", code=3)
    assert "swarmnode join" in refused("run", "--data-dir", tmp_path / "home", "--port", "0", *LOCAL, code=3)


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "no such file or folder"), ("", "no text in it"), ("hello", "at least 8 are needed")],
)
def test_corpus_that_cannot_be_used_is_named(tmp_path: Path, run_file: Path, text: str | None, said: str) -> None:
    corpus = tmp_path / "corpus.txt"
    if text is not None:
        corpus.write_text(text)
    where = ("--data-dir", tmp_path / "home", "--port", "0", *LOCAL)
    told = refused("run", run_file, *where, "--corpus", corpus, code=3)
    assert str(corpus) in told and said in told and "--corpus" in told


def test_port_that_is_taken_is_named(tmp_path: Path, run_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        told = refused("run", run_file, "--data-dir", tmp_path / "home", "--port", str(port), *LOCAL, code=6)
    assert f"port {port} is in use" in told and "--port 0" in told


def test_data_directory_of_another_version_is_left_alone(tmp_path: Path, run_file: Path) -> None:
    (tmp_path / "layout").write_text("2\n")
    told = refused("run", run_file, "--data-dir", tmp_path, "--port", "0", *LOCAL, code=5)
    assert "upgrade swarmnode" in told and not (tmp_path / "identity.key").exists()


def test_custom_task_is_trained_from_a_local_file(tmp_path: Path, corpus: Path) -> None:
    run_file, task = tmp_path / "sum.toml", tmp_path / "my_task.py"
    task.write_text(TASK)
    run_file.write_text(RUN_TOML + '[task]\nname = "sum"\n')
    with Node(tmp_path / "node", run_file, "--task", f"{task}:Sum", "--rounds", "2", corpus=corpus) as node:
        assert node.wait() == 0, node.log()
    rounds = [event for event in node.events if event["event"] == "round"]
    assert len(rounds) == 2 and rounds[1]["loss"] < rounds[0]["loss"] and node.ready["parameters"] == 5


@pytest.mark.slow
def test_custom_task_that_cannot_be_loaded_says_why(tmp_path: Path, run_file: Path) -> None:
    sums, broken = tmp_path / "sum.toml", tmp_path / "broken.py"
    sums.write_text(RUN_TOML + '[task]\nname = "sum"\n')
    broken.write_text("import nothing_of_this_name\n")
    where = ("--data-dir", tmp_path / "home", "--port", "0", *LOCAL)
    told = refused("run", sums, "--task", f"{broken}:Sum", *where, code=1)
    assert str(broken) in told and "nothing_of_this_name" in told
    assert "which is built in" in refused("run", run_file, "--task", f"{broken}:Sum", *where, code=3)
    assert "FILE.py:CLASS" in refused("run", sums, "--task", "sum", *where, code=2)
    new = ("--data-dir", tmp_path / "new", "--port", "0", *LOCAL)
    assert "No such file" in refused("run", sums, "--task", f"{tmp_path}/missing.py:Sum", *new, code=3)
    assert "FILE.py:CLASS" in refused("run", sums, "--task", broken, *new, code=3)
    assert not (tmp_path / "new").exists()  # it is told before anything starts


@pytest.mark.slow
def test_resumed_run_goes_on_from_the_newest_checkpoint_that_is_whole(
    tmp_path: Path, corpus: Path, run_file: Path
) -> None:
    node = Node(tmp_path / "node", run_file, "--checkpoint-every", "1", corpus=corpus)
    with node:
        node.wait_for("round", lambda event: event["round"] == 2)
        node.send(signal.SIGINT)
        assert node.wait() == 0
    kept = sorted(node.home.glob("runs/*/checkpoints/*.json"))
    newest, before = json.loads(kept[-1].read_text()), json.loads(kept[-2].read_text())
    damaged = kept[-1].with_suffix(".safetensors")
    content = bytearray(damaged.read_bytes())
    content[5000] ^= 1
    damaged.write_bytes(content)
    with node:
        first = node.wait_for("round")
        node.command_line("stop")
        assert node.wait() == 0
    assert first["round"] == before["round"] == newest["round"] - 1
    assert f"checkpoint {kept[-1].stem} is skipped" in node.log() and "damaged" in node.log()


def in_a_small_disk(size: str, folder: Path) -> tuple[str, ...]:
    """A command prefix that mounts a disk of `size` on `folder`, seen by that command alone. Skips where it may not."""
    folder.mkdir()
    unshare = ("unshare", "--map-root-user", "--mount", "--")
    mount = f"mount -t tmpfs -o size={size} tmpfs '{folder}'"
    if shutil.which("unshare") is None or subprocess.run([*unshare, "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this system does not let tests mount a small disk of their own")
    return (*unshare, "sh", "-c", f'{mount} && exec "$0" "$@"')


@pytest.mark.slow
def test_full_disk_stops_checkpoints_and_not_the_training(tmp_path: Path, corpus: Path, run_file: Path) -> None:
    disk = in_a_small_disk("96m", tmp_path / "disk")
    node = Node(
        tmp_path / "disk" / "node", run_file, "--checkpoint-every", "1", corpus=corpus, program=(*disk, str(PROGRAM))
    )
    with node:
        node.wait_for("ready")
        seen_by_the_node = Path(f"/proc/{node.process.pid}/root/{tmp_path}/disk/full")
        with contextlib.suppress(OSError), seen_by_the_node.open("wb", buffering=0) as full:
            while True:
                full.write(bytes(1 << 20))
        node.wait_for("round", lambda event: event["round"] == 2, since=len(node.events))
        node.send(signal.SIGINT)
        assert node.wait() == 7
        assert node.events[-2] == {"event": "stopped", "code": 7}
    assert "no space left" in node.log() and "Training goes on" in node.log() and "Traceback" not in node.log()


def stopped_at_the_start(home: Path, *run: str | Path, corpus: Path) -> str:
    """What a node prints that is told to stop as soon as it can be asked, before it trains."""
    address = DataDir(home).socket_candidates()
    arguments = [PROGRAM, "run", *run, "--data-dir", home, "--port", "0", *LOCAL, "--corpus", corpus]
    with subprocess.Popen([*map(str, arguments)], stdout=subprocess.PIPE, text=True, env=environment()) as process:
        until(lambda: any(path.exists() for path in address))
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    return told


@pytest.mark.slow
def test_a_node_stopped_at_its_start_tells_the_rounds_that_are_on_the_disk(
    tmp_path: Path, corpus: Path, run_file: Path
) -> None:
    home = tmp_path / "node"
    with Node(home, run_file, corpus=corpus) as node:
        run_id = node.ready["run_id"]
        node.wait_for("round", lambda event: event["round"] == 1)
        node.send(signal.SIGINT)
        assert node.wait() == 0
    (*_, newest) = sorted(home.glob("runs/*/checkpoints/*.json"))
    rounds = json.loads(newest.read_text())["round"]
    assert rounds >= 2
    told = stopped_at_the_start(home, run_file, corpus=corpus)
    assert f"stopped in order; the newest checkpoint of run {run_id[:12]}… has {rounds} rounds in it" in told


def test_data_for_which_the_disk_or_the_cap_has_no_room_are_refused(
    tmp_path: Path, corpus: Path, run_file: Path
) -> None:
    where = ("--data-dir", tmp_path / "home", "--port", "0", *LOCAL, "--corpus", corpus)
    told = refused("run", run_file, *where, "--shards-cap", "0.0001", code=7)
    assert "shards_cap allows 0.1 MB" in told and "--shards-cap" in told


def test_node_that_cannot_start_on_a_full_disk_says_so(tmp_path: Path, run_file: Path) -> None:
    disk = in_a_small_disk("64k", tmp_path / "disk")
    fill = f'head -c 1000000 /dev/zero > \'{tmp_path}/disk/full\' 2>&-; exec "$0" "$@"'
    command = [PROGRAM, "run", run_file, "--data-dir", tmp_path / "disk" / "node", "--port", "0", *LOCAL]
    done = subprocess.run(
        [*disk, "sh", "-c", fill, *map(str, command)], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 7, done.stderr
    assert "no space left" in done.stderr and "Traceback" not in done.stderr


def test_join_address_that_nobody_answers_ends_with_what_was_tried(patient: dict[str, Node]) -> None:
    node = patient["nobody"]
    assert node.wait() == 8
    assert "nobody answered, so" in node.log() and NOBODY in node.log() and "connection refused" in node.log()
    assert "swarmnode id --join" in node.log() and "Traceback" not in node.log()


def test_specification_that_is_not_the_runs_is_refused(patient: dict[str, Node]) -> None:
    node = patient["liar"]
    assert node.wait() == 8
    assert re.search(rf"does not hash to {ELSEWHERE[:12]}…: it is another run's", node.log()), node.log()
    assert not list(node.home.glob("runs/*/run.spec")) and "Traceback" not in node.log()


def test_run_of_a_newer_schema_asks_for_an_update(patient: dict[str, Node]) -> None:
    node = patient["newer"]
    assert node.wait() == 8
    assert f"another schema than {SCHEMA}; update swarmnode to join this run" in node.log()


def test_run_whose_data_nobody_has_is_refused(patient: dict[str, Node]) -> None:
    node = patient["other-corpus"]
    assert node.wait() == 8
    assert "the index of the run's data cannot be had" in node.log() and "--corpus" in node.log()
    assert "Traceback" not in node.log()
