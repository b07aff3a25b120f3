"""Pictures of the page, of the report and of `swarmnode top` for the documentation, of real swarms of eight nodes.

Page and report are taken on a desktop and a phone, in light and dark: page-known.png to page-known-phone-dark.png.

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

import numpy as np
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
SIZES = {"": (1280, 1120), "-phone": (390, 844)}  # by what they add to the name of a picture
SCHEMES = {"": "light", "-dark": "dark"}
REPORT = "open"  # of which swarm
TOP = ("known", 100, 40)  # of which swarm; characters, lines
SHOWN = 4  # which node: the first one begins before the others are there
SELECT = "document.querySelector('#nodes select')"
TAKEN_AT = 0.75  # of the rounds
TOLD = """
(() => {
  const columns = [...document.querySelectorAll('#rounds .mark')].map((mark) => Number(mark.getAttribute('x')));
  return [0, 8].includes(columns.filter((x) => x === Math.max(...columns)).length);
})()
"""  # whether all nodes told of the last round, where rounds are of all
SETTLED = 3.0  # s until what the page asks for beside the stream is there
DRAWN = 0.5  # s until it is drawn in another size or scheme
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
            wait_for_round(homes[SHOWN][1], int(TAKEN_AT * rounds), swarm)
            if kind == TOP[0]:
                take_top(homes[SHOWN][1])
            with served(homes, folder, "127.0.0.1:0") as address:
                page = browser.open(address)
                page.wait(f"document.querySelectorAll('#nodes option').length > {SHOWN}", within=60)
                page.js(f"{SELECT}.value = {SHOWN}; {SELECT}.onchange()")
                page.wait(f"document.querySelector('#own h2').innerText.endsWith('node {SHOWN} gave')", within=60)
                page.wait("document.querySelectorAll('#swarm .node').length > 4", within=60)
                time.sleep(SETTLED)
                page.wait(TOLD, within=60)
                take_all(page, f"page-{kind}")
            swarm.wait(WITHIN)
            if kind == REPORT:
                report = browser.open((folder / "report" / "index.html").as_uri())
                time.sleep(SETTLED)
                take_all(report, "page-report")
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
            page = browser.open(address, width=SIZES[""][0], height=560)
            page.wait("!document.querySelector('#choose').hidden", within=60)
            time.sleep(SETTLED)
            shrink(take(page, "page-choose"))
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
    client = ControlClient(home)
    status, peers, rounds = (client.call(method) for method in ("status", "peers", "history"))
    if os.getuid() == 0:
        status["warnings"] = []
    screen = top.screen({"status": status, **peers, **rounds}, *TOP[1:], colour=True)
    console = Console(record=True, width=TOP[1], file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen), no_wrap=True, crop=True)
    drawn = console.export_svg(title="swarmnode top", code_format=re.sub(r"@font-face {{.*?}}", "", FORMAT, flags=re.S))
    (DOCS / "top.svg").write_text(drawn)


def take_all(page: Page, name: str) -> None:
    """In each size and scheme."""
    taken = []
    for of_size, size in SIZES.items():
        page.resize(*size)
        for of_scheme, scheme in SCHEMES.items():
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            time.sleep(DRAWN)
            taken.append(take(page, f"{name}{of_size}{of_scheme}"))
    for file in taken:
        shrink(file)


def take(page: Page, name: str) -> Path:
    if os.getuid() == 0:  # of which a live page warns; elsewhere nobody sees that
        page.js("document.querySelector('#alerts').hidden = document.querySelector('#link').className === 'live'")
    page.screenshot(DOCS / f"{name}.png")
    return DOCS / f"{name}.png"


def shrink(file: Path) -> None:
    """To a third of its size: the 256 colours that are seen most stay, others become the nearest of these."""
    with Image.open(file) as taken:
        pixels = np.asarray(taken.convert("RGB")).astype(int) @ (1 << 16, 1 << 8, 1)  # (height, width)
    numbers, places, counts = np.unique(pixels, return_inverse=True, return_counts=True)
    colours = numbers[:, None] >> (16, 8, 0) & 255  # (colours, 3)
    kept = colours[np.argsort(-counts)[:256]]
    nearest = np.square(colours[:, None] - kept).sum(axis=-1).argmin(axis=1).astype(np.uint8)
    picture = Image.fromarray(nearest[places.reshape(pixels.shape)], mode="P")
    picture.putpalette(kept.astype(np.uint8).tobytes())
    picture.save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
