"""What the owner's settings make of the trainer's sandbox, and what becomes of a model that is not here."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import msgpack
import pytest
import trio

from swarmnode.node.process import AS_ROOT, runs_as_root
from swarmnode.node.trainer import child, replies
from swarmnode.node.trainer.child import (
    TrainerFailed,
    TrainerSettings,
    environment,
    fetch_model,
    with_base,
    with_models,
)
from swarmnode.protocols.methods.trainer import Replayed, TrainerDied, TrainStats
from swarmnode.protocols.wire import WireError, received
from swarmnode.training import hub
from swarmnode.training.rl.groups import Learned
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.sandbox import Rules


def rules_of(**settings: Any) -> Rules:
    return child.rules_of(TrainerSettings(**{"scratch": "/data/trainer", **settings}))


def test_a_trainer_may_read_what_its_settings_name_and_not_the_nodes_directory(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    assert str(model) not in rules_of(policy=f"hf:{model}").readable, "there is no model in it"
    (model / "config.json").touch()
    told = rules_of(
        heldout="/data/shards/ab/held",
        tokenizer="/data/shards/ef/words",
        texts=("/data/shards/cd/one", "/data/shards/cd/two"),
        task="work/my.py:Task",
        policy=f"hf:{model}",
        base="/models/base",
        readable=("/data/shards", "~/texts"),
    )
    assert set(told.readable) == {
        str(Path("~/texts").expanduser()),
        "/data/shards/ab/held",
        "/data/shards/ef/words",
        "/data/shards/cd",
        str(Path("work").absolute()),
        str(model),
        "/models/base",
        "/data/shards",
        str(hub.cache()),
    }
    assert told.scratch == "/data/trainer" and "/data" not in told.readable
    assert set(rules_of().readable) == {str(hub.cache())}


def test_a_folder_that_contains_the_key_is_noticed() -> None:
    told = rules_of(readable=("/home/me", "/home/me/.local/share/swarmnode/shards"))
    assert child.exposed(told, Path("/home/me/.local/share/swarmnode")) == "/home/me"
    assert child.exposed(told, Path("/srv/swarmnode")) == ""
    assert child.exposed(rules_of(readable=("/data/texts",)), Path("/data")) == ""


def test_a_folder_that_contains_the_key_by_a_link_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "large" / "swarmnode").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "large" / "swarmnode")
    told = rules_of(readable=(str(tmp_path / "large"),))
    assert child.exposed(told, tmp_path / "home") == str(tmp_path / "large")


def test_a_trainer_is_not_told_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "SWARMNODE_PASSPHRASE": "x",
        "HF_TOKEN": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "SSH_AUTH_SOCK": "x",
        "PGPASSWORD": "x",
        "DATABASE_URL": "postgres://me:x@localhost/data",
        "PATH": "/bin",
        "TOKENIZERS_PARALLELISM": "true",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    told = environment(TrainerSettings(threads=2, scratch="/data/trainer"))
    assert not {name for name, value in told.items() if value == "x"} and "DATABASE_URL" not in told
    assert told["PATH"] == "/bin" and told["TOKENIZERS_PARALLELISM"] == "true" and told["OMP_NUM_THREADS"] == "2"
    assert told["TMPDIR"] == "/data/trainer" and told["OMP_WAIT_POLICY"] == "PASSIVE"


def test_its_directory_is_its_own_and_empty(tmp_path: Path) -> None:
    left = tmp_path / "trainer" / "left"
    left.parent.mkdir()
    left.write_text("of the trainer before")
    child.empty(str(left.parent))
    assert os.listdir(left.parent) == [] and left.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("policy", ["", "gpt:2x48"])
def test_nothing_is_fetched_where_no_model_is_named(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    settings = TrainerSettings(policy=policy)
    assert trio.run(with_models, parse_runspec({"run": {"name": "r"}}, source="test"), settings) == settings


def test_a_folder_is_no_reason_to_ask_the_network(tmp_path: Path) -> None:
    assert trio.run(fetch_model, str(tmp_path)) == tmp_path


def test_a_model_of_the_hub_says_what_to_install_where_its_library_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise ModuleNotFoundError('No module named huggingface_hub')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(TrainerFailed, match=r"huggingface_hub; .* install .*\[hf\]"):
        trio.run(fetch_model, "someone/model")


def based_on(name: str, sha256: str) -> RunSpec:
    tables = {
        "run": {"name": "r"},
        "task": {"name": "hf-lm"},
        "model": {"base": name, "base_sha256": sha256},
    }
    return parse_runspec(tables, source="test")


def test_a_base_is_read_where_its_files_are_the_runs_and_nowhere_else(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
        (tmp_path / name / "config.json").write_text("{}")
    spec = based_on(str(tmp_path / "one"), hub.weights_hash(tmp_path / "one"))
    settings = trio.run(with_models, spec, TrainerSettings())
    assert settings.base == str(tmp_path / "one") in child.rules_of(settings).readable
    unhashed = based_on(str(tmp_path / "other"), "")
    with pytest.raises(TrainerFailed, match="without its hash"):
        trio.run(with_models, unhashed, TrainerSettings())
    foreign = f"{re.escape(str(tmp_path))}/other is not the base of the run: .* name the run's with --base"
    with pytest.raises(TrainerFailed, match=foreign):
        trio.run(with_models, spec, TrainerSettings(base=str(tmp_path / "other")))
    # A specification of a peer opens no folder that it knows nothing of.
    (tmp_path / "key").mkdir()
    with pytest.raises(TrainerFailed, match="cannot be read"):
        trio.run(with_models, based_on(str(tmp_path / "key"), "00" * 32), TrainerSettings())


def test_a_run_file_gets_the_hash_and_the_tokens_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("weights")
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    with pytest.raises(TrainerFailed, match=r"has no tokenizer\.json"):
        trio.run(with_base, based_on("elsewhere", ""), str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    spec, tokenizer = trio.run(with_base, based_on("elsewhere", ""), str(tmp_path))
    assert spec.model.base_sha256 == hub.weights_hash(tmp_path) and spec.model.base == "elsewhere"
    assert (spec.data.vocabulary, tokenizer) == (512, str(tmp_path / "tokenizer.json"))
    for none in ("{", "[]", '{"text_config": null}'):
        (tmp_path / "config.json").write_text(none)
        with pytest.raises(TrainerFailed, match=r"config\.json is none"):
            trio.run(with_base, based_on("elsewhere", ""), str(tmp_path))
    plain = parse_runspec({"run": {"name": "r"}}, source="test")
    assert trio.run(with_base, plain, str(tmp_path)) == (plain, "")


def test_a_base_that_a_peer_names_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub", reason="the extra hf is not installed")
    with socket.create_server(("127.0.0.1", 0)) as hub_of_a_liar:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub_of_a_liar.getsockname()[1]}")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        with pytest.raises(TrainerFailed, match=r"base model is not here.*--base nobody/model"):
            trio.run(with_models, based_on("nobody/model", "00" * 32), TrainerSettings())
        hub_of_a_liar.settimeout(0)
        with pytest.raises(BlockingIOError):
            hub_of_a_liar.accept()


def test_a_model_that_cannot_be_fetched_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub", reason="the extra hf is not installed")
    with socket.socket() as closed:  # nobody listens there
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        with pytest.raises(TrainerFailed, match="nobody/no-such-model"):
            trio.run(fetch_model, "nobody/no-such-model")


class Hub(BaseHTTPRequestHandler):
    """A hub of one model, which sends its weights of 30 MB in two pieces. It stands in for huggingface.co."""

    FILES: ClassVar = {"config.json": b"{}", "model.safetensors": bytes(30_000_000)}

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        *_, name = self.path.split("/")
        body = self.FILES.get(name)
        if body is None:
            listed = [{"type": "file", "path": file, "size": len(held), "oid": ""} for file, held in self.FILES.items()]
            about = {"id": "someone/model", "sha": "a" * 40, "siblings": [{"rfilename": file} for file in self.FILES]}
            body = json.dumps(listed if "/tree/" in self.path else about).encode()
        self.send_response(200)
        tag = hashlib.sha256(body).hexdigest()
        headers = {"Content-Length": len(body), "ETag": f'"{tag}"', "X-Repo-Commit": "a" * 40}
        for header, value in headers.items():
            self.send_header(header, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:5_000_000])
            time.sleep(1.1 * hub.TELL_EVERY if body[5_000_000:] else 0)
            self.wfile.write(body[5_000_000:])

    do_HEAD = do_GET


def test_how_far_a_model_is_fetched_is_told_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("huggingface_hub", reason="the extra hf is not installed")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{served.server_address[1]}")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        with caplog.at_level(logging.INFO):
            folder = trio.run(fetch_model, "someone/model")
        served.shutdown()
    assert (folder / "model.safetensors").stat().st_size == 30_000_000
    assert re.search(r"the model someone/model: fetched 1\d\.\dMB of 30\.0MB, .*B/s, .* left", caplog.text), caplog.text


def test_the_hubs_cache_is_where_its_own_library_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub.cache() == tmp_path / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert hub.cache() == tmp_path / "home" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "named"))
    assert hub.cache() == tmp_path / "named"


HARDENED = """
import os, resource, sys
from swarmnode.node.process import harden
import logging
logging.basicConfig(stream=sys.stdout)
harden()
open(sys.argv[1], 'w').close()
status = dict(line.split(':', 1) for line in open('/proc/self/status'))
print(status['NoNewPrivs'].strip(), resource.getrlimit(resource.RLIMIT_CORE), oct(os.stat(sys.argv[1]).st_mode & 0o777))
"""


def test_the_daemon_gives_up_rights_core_dumps_and_files_for_all_and_says_that_it_is_root(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HARDENED, tmp_path / "made"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "1 (0, 0) 0o600"
    assert (AS_ROOT in done.stdout) == runs_as_root()


OTHER_PROGRAM = """#!{python} -SE
import socket, sys, time
socket.socket(fileno=int(sys.argv[5])).sendall({length!r} + {sent!r})
time.sleep(60)
"""
NONSENSE = "answered nonsense"
SPENT = {"train": 0.0, "evaluate": 0.0, "audit": 0.0}


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"\xc1", NONSENSE),
        (7, NONSENSE),
        ([], NONSENSE),
        ({"id": 0, "ok": {}}, NONSENSE),
        ({"id": 0, "ok": [1], "spent": SPENT, "sampling": None}, NONSENSE),
        ({"id": 0, "ok": {}, "spent": SPENT | {"train": "all"}, "sampling": None}, NONSENSE),
        ({"id": 0, "ok": {}, "spent": SPENT, "sampling": "well"}, NONSENSE),
        ({"id": 0, "ok": {}, "spent": SPENT, "sampling": None, "error": 1}, NONSENSE),
        ({"id": 0, "ok": {}, "spent": SPENT, "sampling": None}, f"{NONSENSE}: TrainStats.steps: missing"),
        ({"id": 0, "ok": {"steps": "all"}, "spent": SPENT, "sampling": None}, f"{NONSENSE}: TrainStats.steps: a str"),
        ({"id": 0, "error": "it failed"}, NONSENSE),
        ({"id": [0], "error": "it failed", "harmless": True}, NONSENSE),
        (msgpack.packb(b"endless" * 20_000), f"{NONSENSE}: it has no end"),
        (msgpack.packb([{}] * 300), f"{NONSENSE}: an answer: more than 200 values"),
        (b"\xdd\x0f\xff\xff\xff", f"{NONSENSE}: an answer: states a length beyond its end"),
        ({"id": 0, "error": "sorry", "harmless": True}, "could not train: sorry"),
    ],
)
def test_a_trainer_that_answers_nonsense_is_one_that_died(
    sent: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "taken-over"
    sent = sent if isinstance(sent, bytes) else msgpack.packb(sent)
    length = len(sent).to_bytes(4, "big")
    program.write_text(OTHER_PROGRAM.format(python=sys.executable, length=length, sent=sent))
    program.chmod(0o700)
    monkeypatch.setattr(child.sys, "executable", str(program))
    monkeypatch.setattr(child, "MOST_VALUES", 200)

    async def main() -> None:
        trainer = child.TrainerChild(most_bytes=500)
        with trio.fail_after(30):
            async with trainer.running(0, Rules(), os.environ):
                with pytest.raises(TrainerDied, match=said):
                    await trainer.call("train", TrainStats)

    trio.run(main)


STEPS = {"steps": 1, "samples": 2, "tokens": 3, "loss": 0.5, "seconds": 0.1}
LEARNED = {
    **dict.fromkeys(("own", "informative", "taken", "authors", "external", "tokens"), 0),
    **{"reward": 0.5, "refused": {"late": 1}, "refused_answers": {}},
}
GROUP = {
    "task": ("digits/swap", 5, 7),
    "version": 0,
    "policy": "",
    "vocabulary": "bytes",
    "lengths": (2,),
    "width": 1,
    "logprobs": False,
    "content": b"ab",
}
ANSWER = {"text": "12", "reward": 0.5, "advantage": -1.0, "tokens": 3}
POINT = (bytes(32), bytes(32), 0)
INIT = {
    "layout": (("w", (2, 2)),),
    "moments": 8,
    "device": "cpu",
    "why": "",
    "sandbox": {"mode": "auto", "enforced": ("files",), "missing": ({"part": "limits", "why": "no"},)},
    "states": None,
    "has": ("places",),
}


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (
            TrainStats,
            STEPS,
            (
                {},
                STEPS | {"steps": 1.0},
                STEPS | {"loss": None},
                STEPS | {"told": "text"},
                STEPS | {"seconds": math.nan},
            ),
        ),
        (
            replies.WeighReply,
            {"weight": {"parameters": 3}, "free": None},
            ({"weight": {}, "free": None}, {"weight": 3}),
        ),
        (
            replies.InitReply,
            INIT,
            (
                INIT | {"layout": (("w", (-2, 2)),)},
                INIT | {"layout": (("w", (1 << 40, 1 << 40)),)},
                INIT | {"layout": ("w",)},
                INIT | {"moments": -1},
                INIT | {"states": {"free": 1}},
                INIT | {"sandbox": {}},
                INIT | {"has": (1,)},
            ),
        ),
        (
            Learned,
            LEARNED,
            (
                {},
                LEARNED | {"reward": None},
                LEARNED | {"reward": math.nan},
                LEARNED | {"by_task": {"digits/swap": math.inf}},
                LEARNED | {"caught": {"bob": 1}},
            ),
        ),
        (replies.EvaluateReply, {"loss": 1.0}, ({}, {"loss": "low"}, {"loss": 1.0, "accuracy": None})),
        (replies.LossReply, {"loss": None}, ({}, {"loss": b""})),
        (replies.SampleReply, {"text": b"x"}, ({"text": "x"}, {})),
        (
            replies.AnswerReply,
            {"groups": (GROUP,), "seconds": 1.0, "reward": 0.5},
            (
                {"groups": (GROUP,), "seconds": 1.0},
                {"groups": (GROUP,), "seconds": 1.0, "reward": math.nan},
                {"groups": (GROUP | {"lengths": (3,)},), "seconds": 1.0, "reward": 0.5},
                {"groups": (GROUP | {"task": ("", 5, 7)},), "seconds": 1.0, "reward": 0.5},
                {"groups": ({},), "seconds": 1.0, "reward": 0.5},
            ),
        ),
        (
            replies.ScoredAnswer,
            ANSWER,
            (ANSWER | {"reward": math.nan}, ANSWER | {"reward": 2.0}, ANSWER | {"advantage": math.inf}),
        ),
        (
            replies.ScoreReply,
            {
                "scores": (
                    {"refused": "", "why": ""},
                    {"refused": "", "why": "", "question": "?", "key": "", "answers": ()},
                )
            },
            ({"scores": ({"refused": None, "why": ""},)}, {"scores": {}}, {}),
        ),
        (
            replies.MarkReply,
            {"life": b"1", "stretches": ((POINT, POINT, 0, 0, 1, 0),)},
            (
                {"life": b"1", "stretches": ((POINT, POINT, 0, 0, 0, 0),)},
                {"life": b"1", "stretches": ((POINT, (b"", b"", 0), 0, 0, 1, 0),)},
                {"life": b"1", "stretches": (POINT,)},
            ),
        ),
        (replies.PlacesReply, {"places": ((0, 3),)}, ({"places": ((-1, 3),)}, {"places": ((3, 0),)}, {"places": (3,)})),
        (
            Replayed,
            {"distances": ({"parameters": 0.0, "first": 0.0, "second": math.inf},), "seconds": 1.0},
            (
                {"distances": 2 * ({"parameters": 0.0, "first": 0.0, "second": 0.0},), "seconds": 1.0},
                {"distances": ({"parameters": 0.0},), "seconds": 1.0},
            ),
        ),
    ],
)
def test_what_a_trainer_answers_is_of_the_commands_kind(kind: type[Any], good: Any, bad: tuple[Any, ...]) -> None:
    assert isinstance(received(kind, good), kind)
    for each in bad:
        with pytest.raises(WireError):
            received(kind, each)
