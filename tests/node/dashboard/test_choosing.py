"""A node that was started without a run: on its page its owner begins one, joins one by a link, or goes on with one."""

from __future__ import annotations

import os
import pty
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from browser import Browser, Page, needs_chromium
from realnodes import PATIENCE, PROGRAM, Node, environment, swarmnode, until

from swarmnode.node.exitcodes import CONFIG, NOT_RUNNING, OK, USAGE

RUN_FILE = """
[run]
name = "by-page"
[model]
layers = 1
heads = 2
width = 32
context = 32
[inner]
steps = 50
"""
CHOOSING = ("--choose", "--no-upnp", "--dashboard", "127.0.0.1:0")
STARTING = 150.0  # s for a node and its trainer to start beside others that do
FORMS = "document.querySelectorAll('#choose form')"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text(" ".join(random.Random(1).choices(["alpha", "beta", "gamma", "delta"], k=40_000)))
    return file


def page_of(browser: Browser, node: Node) -> Page:
    page = browser.open(node.command_line("open", "--print")["address"])
    page.wait("document.querySelector('#choose').innerText.includes('Join by a link')", within=PATIENCE)
    return page


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(500)  # four starts of a trainer
def test_on_the_page_one_begins_a_run_a_second_joins_by_its_link_and_goes_on_later(
    tmp_path: Path, corpus: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILE)
    with (
        Node(tmp_path / "a", *CHOOSING, corpus=corpus) as first,
        Node(tmp_path / "b", *CHOOSING, corpus=corpus) as second,
        Browser() as browser,
    ):
        for node in (first, second):
            node.wait_for("choosing", within=STARTING)
        assert first.command_line("status")["run"] is None
        page = page_of(browser, first)
        assert "IP address" in page.text("#choose"), "what others will see is said before"
        assert page.js("document.documentElement.scrollWidth <= innerWidth")
        page.js(f"{FORMS}[1].elements.task.value = 'file'; {FORMS}[1].elements.task.dispatchEvent(new Event('change'))")
        page.choose("#choose input[type=file]", file)
        page.js(f"{FORMS}[1].requestSubmit()")
        page.wait(
            "document.querySelector('#choose').hidden && document.querySelector('#run').innerText.includes('by-page')"
        )
        link = first.wait_for("ready", within=STARTING)["join"]

        page = page_of(browser, second)
        page.js(f"{FORMS}[0].elements.where.value = {link[:-1]!r}; {FORMS}[0].requestSubmit()")
        page.wait("document.querySelector('#choose [role=alert]').innerText.includes('cut off')")
        page.js(f"{FORMS}[0].elements.where.value = {link!r}; {FORMS}[0].requestSubmit()")
        page.wait("document.querySelector('#run').innerText.includes('by-page')", within=STARTING)
        assert second.wait_for("ready", within=STARTING)["run_id"] == first.ready["run_id"]
        until(lambda: second.command_line("status")["run"]["members"] == 2, within=STARTING)

        second.end()
        second.start()
        second.wait_for("choosing", within=STARTING)
        page = page_of(browser, second)
        page.js("[...document.querySelectorAll('#choose button')].find((one) => one.innerText === 'Go on').click()")
        assert second.wait_for("ready", within=STARTING)["run_id"] == first.ready["run_id"]
        assert not [error for error in page.errors if "status of 400" not in error]
    assert "Traceback" not in first.log() + second.log()


def test_nobody_chooses_for_a_node_that_has_a_run_or_none_to_have(tmp_path: Path) -> None:
    with Node(tmp_path / "home", "--role", "watch", "--no-upnp", corpus=None) as node:
        node.wait_for("ready")
        assert node.command_line("status")["choosing"] is False
    for arguments, code, says in (
        (("--choose", "--run", "ab" * 32), USAGE, "leave out one of the two"),
        (("--choose", "--no-dashboard", "--port", "0", "--listen", "127.0.0.1", "--no-mdns"), CONFIG, "--dashboard"),
    ):
        refused = swarmnode("run", *arguments, "--data-dir", tmp_path / "other")
        assert refused.returncode == code and says in refused.stderr


def test_open_offers_on_a_terminal_to_start_a_node_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    home, browser = tmp_path / "home", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n')
    browser.chmod(0o755)
    settings = {"PORT": "0", "LISTEN": "127.0.0.1", "MDNS": "false", "UPNP": "false", "DASHBOARD": "127.0.0.1:0"}
    given = environment(DISPLAY=":9", BROWSER=str(browser), **{f"SWARMNODE_{key}": it for key, it in settings.items()})
    assert swarmnode("open", "--data-dir", home).returncode == NOT_RUNNING, "a script is not asked"
    assert not home.exists()
    ours, theirs = pty.openpty()
    program = [str(PROGRAM), "open", "--data-dir", str(home)]
    log = (tmp_path / "log").open("w")
    node = subprocess.Popen(program, stdin=theirs, stdout=log, stderr=log, env=given, start_new_session=True)
    try:
        os.write(ours, b"\n")
        until(lambda: (tmp_path / "arguments").exists() and (tmp_path / "arguments").read_text().strip() != "")
        assert (tmp_path / "arguments").read_text().strip() == (home / "dashboard.html").as_uri()
        os.killpg(node.pid, signal.SIGINT)  # as a terminal does
        began = time.monotonic()
        assert node.wait(PATIENCE) == OK
        assert time.monotonic() - began < 15
    finally:
        if node.poll() is None:
            os.killpg(node.pid, signal.SIGKILL)
    said = (tmp_path / "log").read_text()
    assert "No run yet. Choose one on the node's page" in said and "others see" in said, said
    assert "stopped in order" in said and "Traceback" not in said, said
