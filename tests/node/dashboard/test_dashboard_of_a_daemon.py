"""The dashboard of real daemons: what its owner is told, what others cannot have, and how the node ends."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, needs_chromium
from realnodes import Node, swarmnode, until

WATCH = ("--role", "watch", "--no-upnp")
NOBODY = 65534  # a user that exists everywhere and owns nothing
NEIGHBOUR = f"""
import encodings.idna, os, socket, sys, urllib.error, urllib.request
home, address = sys.argv[1:]
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
for name in ("dashboard.token", "dashboard.html"):
    try:
        print("read", open(f"{{home}}/{{name}}").read())
    except PermissionError:
        pass
try:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(f"{{home}}/control.sock")
        print("connected")
except PermissionError:
    pass
try:
    print("answered", urllib.request.urlopen(f"{{address}}api/nodes", timeout=10).read())
except urllib.error.HTTPError as refused:
    assert refused.code == 401
print("asked")
"""


class Asked:
    """What a program with the token gets from the page of a node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.page = str(node.command_line("open", "--print")["address"])
        self.address, _, self.token = self.page.partition("#")

    def open(self, path: str, params: dict[str, Any] | None = None) -> Any:
        body = None if params is None else json.dumps(params).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        return urllib.request.urlopen(urllib.request.Request(self.address + path, body, headers), timeout=20)

    def json(self, path: str, params: dict[str, Any] | None = None) -> Any:
        with self.open(path, params) as answer:
            return json.load(answer)


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    """A node that only watches."""
    with Node(tmp_path / "home", *WATCH, "--dashboard", "127.0.0.1:0", corpus=None) as node:
        node.wait_for("ready")
        yield Asked(node)


def test_a_daemon_shows_itself_and_ends_at_once_though_its_page_is_open(asked: Asked) -> None:
    peer = asked.node.ready["peer_id"]
    assert asked.json("api/nodes") == [{"node": 0, "name": "", "peer_id": peer}]
    assert asked.json("api/nodes/0/status", {})["peer_id"] == peer
    with asked.open("metrics") as answer:
        assert b"\nswarmnode_uptime_seconds " in answer.read()
    live = [asked.open("api/nodes/0/live") for _ in range(3)]
    assert [answer.readline() for answer in live] == [b"event: view\n"] * 3
    began = time.monotonic()
    assert swarmnode("stop", "--data-dir", asked.node.home).returncode == 0
    assert asked.node.wait() == 0
    assert time.monotonic() - began < 9, "a reader is waited for up to 10 s otherwise"
    assert "Traceback" not in asked.node.log()


def test_the_page_can_stop_the_node_and_is_answered(asked: Asked) -> None:
    assert asked.json("api/nodes/0/stop", {}) == {}
    assert asked.node.wait() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
def test_another_user_of_the_machine_gets_neither_token_nor_socket_nor_answer(asked: Asked) -> None:
    for folder in asked.node.home.parents:
        if not folder.stat().st_mode & 0o001 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)  # that the data directory itself must keep others out
    assert stat.S_IMODE(asked.node.home.stat().st_mode) == 0o700
    done = subprocess.run(
        [sys.executable, "-c", NEIGHBOUR, str(asked.node.home), asked.address],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("asked\n", 0), done.stderr


@pytest.mark.slow
def test_two_daemons_share_no_port_and_no_token_and_one_without_a_page_says_so(asked: Asked, tmp_path: Path) -> None:
    same = asked.address.removeprefix("http://").strip("/")
    with Node(tmp_path / "second", *WATCH, "--dashboard", same, corpus=None) as second:
        second.wait_for("ready")
        other = Asked(second)
        assert other.address != asked.address and other.token != asked.token
        other.token = asked.token
        with pytest.raises(urllib.error.HTTPError, match="401"):
            other.json("api/nodes")
    with Node(tmp_path / "third", *WATCH, "--no-dashboard", corpus=None) as third:
        third.wait_for("ready")
        assert third.command_line("status")["dashboard"] is None
        refused = swarmnode("open", "--data-dir", third.home)
        assert refused.returncode == 1 and "--no-dashboard" in refused.stderr
    with Node(tmp_path / "fourth", *WATCH, "--dashboard", "192.0.2.1:0", corpus=None) as fourth:
        fourth.wait_for("ready")
        assert "there is no dashboard" in fourth.log()


def test_the_browser_gets_the_token_from_a_file_and_not_as_an_argument(asked: Asked, tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n')
    browser.chmod(0o755)
    opened = swarmnode("open", "--data-dir", asked.node.home, DISPLAY=":9", BROWSER=str(browser))
    assert opened.returncode == 0 and opened.stdout.strip() == asked.page
    until(lambda: (tmp_path / "arguments").exists() and (tmp_path / "arguments").read_text().strip() != "")
    go = asked.node.home / "dashboard.html"
    assert (tmp_path / "arguments").read_text().strip() == go.as_uri()
    assert asked.page in go.read_text() and stat.S_IMODE(go.stat().st_mode) == 0o600


@needs_chromium
@pytest.mark.slow
def test_in_a_browser_no_other_origin_reads_it_and_no_inline_script_runs(asked: Asked, tmp_path: Path) -> None:
    """Another origin is a page from a file, another port, and another name of this machine."""
    port = int(asked.address.strip("/").rpartition(":")[2])
    with Browser() as browser:
        page = browser.open(asked.page)
        page.wait(f"document.body.innerText.includes({asked.node.ready['peer_id'][-6:]!r})")
        assert page.js("location.hash") == ""  # whoever looks over the shoulder, and the history, get no token
        page.js(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
        )
        page.js("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 2\">')")
        page.js(
            "document.body.append(Object.assign(document.createElement('script'), {src: 'http://127.0.0.1:9/x.js'}))"
        )
        refused = "Content Security Policy"  # each answer of the page brings what it told before
        until(lambda: page.js("true") and sum(refused in error for error in page.errors) >= 3)
        assert page.js("window.ran === undefined")
        assert page.js("fetch('http://127.0.0.1:9/').then(() => 'left', () => 'kept')") == "kept"

        with Node(tmp_path / "other", *WATCH, "--dashboard", "127.0.0.1:0", corpus=None) as node:
            node.wait_for("ready")
            foreign = [browser.open(Asked(node).address), browser.open(f"http://localhost:{port}/")]
            bare = tmp_path / "evil.html"
            bare.write_text("<!doctype html><title>evil</title>")
            foreign.append(browser.open(bare.as_uri()))
            for evil in foreign:
                evil.wait("document.readyState === 'complete' && document.title")
                evil.call("Page.setBypassCSP", enabled=True)
                evil.js("window.before = true")
                evil.call("Page.reload")
                evil.wait("!window.before && document.readyState === 'complete' && document.title")
                for ask in (
                    f"fetch('{asked.address}api/nodes', {{headers: {{Authorization: 'Bearer {asked.token}'}}}})",
                    f"fetch('{asked.address}api/nodes/0/stop', {{method: 'POST', body: '{{}}', "
                    f"headers: {{Authorization: 'Bearer {asked.token}', 'Content-Type': 'application/json'}}}})",
                    f"fetch('{asked.address}')",
                ):
                    told = evil.js(
                        f"{ask}.then((answer) => answer.text()).then(() => 'read', (error) => String(error))"
                    )
                    assert told.startswith("TypeError"), told
                framed = (
                    f"new Promise((done) => {{ const frame = document.createElement('iframe'); frame.src = "
                    f"'{asked.address}'; frame.onload = () => done(frame.contentDocument === null); "
                    "document.documentElement.append(frame) })"
                )
                assert evil.js(framed) is True
                evil.js("0")  # what was refused is told before
                assert any("frame-ancestors" in error for error in evil.errors), evil.errors
    assert asked.json("api/nodes/0/status", {})["role"] == "watch"  # nobody stopped it
