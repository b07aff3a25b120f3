"""Pictures of the page, of the report and of `swarmnode top` for the documentation, of real swarms of eight nodes.

    python docs/screenshots.py [known | open | rollouts | choose]...

Runs a small swarm of each kind on this machine with chromium before it, some 15 minutes in all on two cores, and writes
docs/page-*.png and docs/top.svg. Wants Pillow, which comes with matplotlib.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT as FORMAT
from rich.console import Console
from rich.text import Text

from swarmnode.cli import top
from swarmnode.node.control.client import ControlClient, ControlError, NotRunning
from swarmnode.node.dashboard.server import served

DOCS = Path(__file__).parent
sys.path.append(str(DOCS.parent / "tests" / "support"))
from browser import Browser, Page  # noqa: E402 (after its folder is known)

SMALL = "layers = 2\nheads = 2\nwidth = 64\ncontext = 64\n[inner]\nlr = 1e-3\nwarmup = 20\nbatch = 4\nsteps = 20\n"
RUNS = {
    "known": f'[run]\nname = "byte-lm"\n[task]\nname = "byte-lm"\n[model]\n{SMALL}',
    "open": f'[run]\nname = "byte-lm-open"\ntrust = "open"\n[task]\nname = "byte-lm"\n[model]\n{SMALL}',
    "rollouts": (DOCS.parent / "examples" / "sapo.toml").read_text(),
}
OPTIONS = {
    "known": ("--nodes", "8", "--rounds", "24"),
    "open": ("--nodes", "8", "--rounds", "12", "--attack", "slander:2"),
    "rollouts": ("--nodes", "8", "--rounds", "80"),
}
DESKTOP, PHONE = (1280, 1120), (390, 844)
PICTURES = {  # (name, size, dark)
    "known": (("page-known", DESKTOP, False), ("page-known-phone", PHONE, True)),
    "open": (("page-open", DESKTOP, True), ("page-open-phone", PHONE, False)),
    "rollouts": (("page-rollouts", DESKTOP, False), ("page-rollouts-phone", PHONE, False)),
}
REPORTS = {"open": "page-report"}
TOP = ("known", 100, 40)  # of which swarm; characters, lines
SHOWN = 4  # which node: the first one begins before the others are there
SELECT = "document.querySelector('#nodes select')"
TAKEN_AT = 0.75  # of the rounds
SETTLED = 3.0  # s until what the page asks for beside the stream is there
WITHIN = 580.0  # s until a swarm stands where its picture is taken


def main() -> None:
    for kind in sys.argv[1:] or [*OPTIONS, "choose"]:
        folder = Path(tempfile.mkdtemp(prefix=f"pictures-{kind}-"))
        try:
            if kind == "choose":
                take_choice(folder)
            else:
                pictures_of(kind, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def pictures_of(kind: str, folder: Path) -> None:
    options = OPTIONS[kind]
    nodes, rounds = int(options[1]), int(options[3])
    program = [sys.executable, "-m", "swarmnode", "local"]
    if kind in RUNS:
        (folder / "run.toml").write_text(RUNS[kind])
        program.append(str(folder / "run.toml"))
    program += [*options, "--json", "--data-dir", str(folder / "nodes"), "--report", str(folder / "report")]
    environment = {**os.environ, "XDG_STATE_HOME": str(folder)}
    swarm = subprocess.Popen([*program, "--dashboard", "off"], stdout=subprocess.DEVNULL, env=environment)
    homes = [(f"node {number}", folder / "nodes" / f"node-{number}") for number in range(nodes)]
    try:
        with Browser() as browser:
            if PICTURES[kind]:
                wait_for_round(homes[SHOWN][1], int(TAKEN_AT * rounds), swarm)
                if kind == TOP[0]:
                    take_top(homes[SHOWN][1])
                with served(homes, folder, "127.0.0.1:0") as address:
                    for name, size, dark in PICTURES[kind]:
                        page = browser.open(address, width=size[0], height=size[1], dark=dark)
                        page.wait(f"document.querySelectorAll('#nodes option').length > {SHOWN}", within=60)
                        page.js(f"{SELECT}.value = {SHOWN}; {SELECT}.onchange()")
                        page.wait("document.querySelectorAll('#swarm .node').length > 4", within=60)
                        if os.getuid() == 0:  # of which the page warns; elsewhere nobody sees that
                            page.js("document.querySelector('#alerts').hidden = true")
                        take(page, name)
            swarm.wait(WITHIN)
            if kind in REPORTS:
                report = (folder / "report" / "index.html").as_uri()
                take(browser.open(report, width=1280, height=1120 if kind == "open" else 730), REPORTS[kind])
    finally:
        swarm.terminate()
        swarm.wait()


def take_choice(folder: Path) -> None:
    """The page of a node that has no run."""
    listens = ["--listen", "127.0.0.1", "--port", "0", "--no-mdns", "--no-upnp", "--dashboard", "127.0.0.1:0"]
    program = [sys.executable, "-m", "swarmnode", "run", "--choose", "--data-dir", str(folder), *listens]
    node = subprocess.Popen(program, stdout=subprocess.DEVNULL)
    try:
        address, give_up = "", time.monotonic() + WITHIN
        while not address and time.monotonic() < give_up:
            time.sleep(0.5)
            asked = [sys.executable, "-m", "swarmnode", "open", "--print", "--data-dir", str(folder)]
            address = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
        with Browser() as browser:
            page = browser.open(address, width=DESKTOP[0], height=560)
            page.wait("!document.querySelector('#choose').hidden", within=60)
            if os.getuid() == 0:
                page.js("document.querySelector('#alerts').hidden = true")
            take(page, "page-choose")
    finally:
        node.terminate()
        node.wait()


def wait_for_round(home: Path, round: int, swarm: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + WITHIN
    while time.monotonic() < give_up and swarm.poll() is None:
        try:
            if ((ControlClient(home).call("status")["run"] or {}).get("round") or 0) >= round:
                return
        except (NotRunning, ControlError):
            pass
        time.sleep(0.5)
    raise SystemExit(f"the swarm did not come to round {round}")


def take_top(home: Path) -> None:
    """The screen of `swarmnode top`, without the web font that rich would fetch."""
    snapshot = next(top._snapshots(ControlClient(home)))
    if os.getuid() == 0:
        snapshot["status"]["warnings"] = []
    screen = top.screen(snapshot, *TOP[1:], colour=True)
    console = Console(record=True, width=TOP[1], file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen), no_wrap=True, crop=True)
    drawn = console.export_svg(title="swarmnode top", code_format=re.sub(r"@font-face {{.*?}}", "", FORMAT, flags=re.S))
    (DOCS / "top.svg").write_text(drawn)


def take(page: Page, name: str) -> None:
    time.sleep(SETTLED)
    file = DOCS / f"{name}.png"
    page.screenshot(file)
    with Image.open(file) as picture:  # a third of the size, and no colour changes that an eye sees
        picture.convert("RGB").quantize(256, kmeans=2, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
