"""A real browser for tests: chromium without a screen, steered over its debugging protocol (CDP).

    with Browser() as browser:
        page = browser.open("http://127.0.0.1:4080/#token")
        page.wait("document.title.includes('round 3')")

Each call blocks. What the page asked the network for and what went wrong in it is in `requests` and `errors`.
"""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, Message, Request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt install chromium)")
QUIET = ("no-first-run", "disable-background-networking", "disable-component-update", "disable-sync", "mute-audio")
START_WITHIN = 30.0  # s


class Browser:
    """One chromium with a profile of its own; gone at the end of the block."""

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None
        self._profile = Path(tempfile.mkdtemp(prefix="chromium-"))
        options = ["--headless=new", "--no-sandbox", "--remote-debugging-port=0", f"--user-data-dir={self._profile}"]
        options += [f"--{each}" for each in QUIET]
        options += ["--enable-precise-memory-info", "--js-flags=--expose-gc", "--hide-scrollbars"]
        self._process = subprocess.Popen(
            [CHROMIUM, *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        told = self._profile / "DevToolsActivePort"
        give_up = time.monotonic() + START_WITHIN
        while not told.exists() or "\n" not in told.read_text():
            if time.monotonic() > give_up or self._process.poll() is not None:
                self.__exit__()
                raise RuntimeError("chromium did not start")
            time.sleep(0.05)
        self._port = int(told.read_text().split("\n")[0])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """A new tab that shows `url`; below 600 px it is a phone."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        connection.request("PUT", "/json/new?about:blank")
        target = json.load(connection.getresponse())["webSocketDebuggerUrl"]
        page = Page(self._port, target.partition(str(self._port))[2])
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=url)
        return page


class Page:
    """One tab."""

    def __init__(self, port: int, path: str) -> None:
        self.requests: list[str] = []  # URLs
        self.errors: list[str] = []  # exceptions that nobody caught, and what the browser refused, as by the CSP
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._websocket = WSConnection(ConnectionType.CLIENT)
        self._socket.sendall(self._websocket.send(Request(host=f"127.0.0.1:{port}", target=path)))
        self._text = ""  # of a message that has not come whole
        self._held: deque[dict[str, Any]] = deque()  # messages that nobody has looked at
        self._last = 0  # id of the last request
        while not isinstance(next(self._receive(), None), AcceptConnection):
            pass

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a CDP method. Raises RuntimeError."""
        self._last += 1
        sent = json.dumps({"id": self._last, "method": method, "params": params})
        self._socket.sendall(self._websocket.send(Message(data=sent)))
        while True:
            message = self._message()
            if message.get("id") == self._last:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return dict(message["result"])
            self._note(message)

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is awaited. Raises RuntimeError."""
        told = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{expression}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def wait(self, expression: str, within: float = 10.0) -> float:
        """Wait until an expression is true, which may throw before; the seconds that it took. Raises AssertionError."""
        began = time.monotonic()
        while not self.js(f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"):
            if time.monotonic() > began + within:
                raise AssertionError(f"not within {within:g} s: {expression}\n{self.errors}\n{self.text()[:3000]}")
            time.sleep(0.01)
        return time.monotonic() - began

    def text(self, selector: str = "body") -> str:
        """What is to be read there."""
        return str(self.js(f"document.querySelector({json.dumps(selector)}).innerText"))

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def hide(self, hidden: bool = True) -> None:
        """Let the page believe that its tab was put into the background, or brought back."""
        state = "hidden" if hidden else "visible"
        told = {"hidden": json.dumps(hidden), "visibilityState": json.dumps(state)}
        for name, value in told.items():
            self.js(f"Object.defineProperty(document, '{name}', {{configurable: true, get: () => {value}}})")
        self.js("document.dispatchEvent(new Event('visibilitychange'))")

    def choose(self, selector: str, file: Path) -> None:
        """Give a file to the input there, as its picker does."""
        found = self.call("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")["result"]
        self.call("DOM.setFileInputFiles", files=[str(file)], objectId=found["objectId"])

    def heap(self) -> int:
        """Bytes of JavaScript's heap after a collection."""
        self.call("HeapProfiler.collectGarbage")
        return int(self.call("Runtime.getHeapUsage")["usedSize"])

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """What is seen as a PNG; with `whole` all of the page, however long."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(picture))

    def _message(self) -> dict[str, Any]:
        while True:
            for event in self._receive():
                if isinstance(event, Message):
                    self._text += str(event.data)
                    if event.message_finished:
                        text, self._text = self._text, ""
                        self._held.append(json.loads(text))
            if self._held:
                return self._held.popleft()

    def _receive(self) -> Any:
        if not self._held:
            self._websocket.receive_data(self._socket.recv(1 << 20))
        return self._websocket.events()

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:600])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
