"""A daemon that is made up, to try the page in a browser: it serves the page, and what it answers a test says."""

from __future__ import annotations

import json
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import swarmnode.node.dashboard

PAGE = Path(swarmnode.node.dashboard.__file__).parent / "page"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
KINDS = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
PEERS = [f"12D3KooWmadeUpPeerThatIsAsLongAsARealOneIsHere0000{number}" for number in range(8)]
STAGES = {"commit": 4.0, "reveal": 1.0, "judge": 2.0}  # s of an open round, beside those of its training


class FakeDaemon:
    """Serves the page, and answers as the daemon of PEERS[0] does in a run of eight."""

    def __init__(self) -> None:
        self.round = 5
        self.began = time.time()
        self.agent = "swarmnode/0.1.0"
        self.warnings: list[str] = []
        self.holds: list[dict[str, Any]] = []
        self.groups: dict[str, Any] = {}
        self.ways: dict[str, dict[str, Any]] = {}  # by peer: what is otherwise than of most
        self.scored: dict[str, dict[str, Any]] = {}  # the same of scores, those of its peers alone
        self.open = False  # whether rounds are those of an open run
        self.caps = {"cpu": {"value": 100.0, "unit": "%"}, "not_on_battery": {"value": False, "unit": ""}}
        self.called: list[str] = []
        self.run_id = "ab" * 32
        self.declines = ""  # why it does not pause
        self.asked_without_token = 0
        self.gone = False  # it closes connections without a word
        self.frozen = False  # a second node is there, which answers nothing …
        self.ahead = 0  # … or, if it is so many rounds ahead, its history
        self.by_rollouts = False  # whether rounds are those of a run by rollouts
        self.closed = threading.Event()
        self.streams: list[queue.Queue[tuple[str, Any] | None]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def parse_request(self) -> bool:
                understood = super().parse_request()
                self.close_connection |= fake.gone
                return understood and not fake.gone

            def answer(self, body: bytes, kind: str = "application/json", status: int = 200) -> None:
                self.send_response(status)
                told = {"Content-Type": kind, "Content-Length": str(len(body)), "Content-Security-Policy": CSP}
                for name, value in told.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                if self.path.startswith("/api") and self.headers.get("Authorization") != "Bearer secret":
                    fake.asked_without_token += 1
                    self.answer(b"{}", status=401)
                elif self.path == "/api/nodes":
                    names = ("home", "frozen")[: 1 + fake.frozen]
                    told = [{"node": n, "name": name, "peer_id": PEERS[n]} for n, name in enumerate(names)]
                    self.answer(json.dumps(told).encode())
                elif self.path == "/api/nodes/0/live":
                    self.stream()
                else:
                    file = PAGE / (self.path.strip("/") or "index.html")
                    self.answer(file.read_bytes(), KINDS[file.suffix])

            def stream(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                events: queue.Queue[tuple[str, Any] | None] = queue.Queue(maxsize=100)
                events.put(("view", fake.view()))
                fake.streams.append(events)
                try:
                    while (event := events.get()) is not None:
                        self.wfile.write(f"event: {event[0]}\ndata: {json.dumps(event[1])}\n\n".encode())
                        self.wfile.flush()
                except OSError:
                    pass
                finally:
                    fake.streams.remove(events)
                    self.close_connection = True

            def do_POST(self) -> None:
                params = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                second = self.path.startswith("/api/nodes/1/")
                if second and not fake.ahead:
                    fake.closed.wait(300)
                result = fake.call(self.path.rpartition("/")[2], params, ahead=fake.ahead * second)
                if result is None:
                    error = {"exit_code": 1, "message": fake.declines or "there is none"}
                    self.answer(json.dumps({"error": error}).encode(), status=400)
                else:
                    self.answer(json.dumps(result).encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.origin = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def push(self, name: str, data: Any) -> None:
        for stream in list(self.streams):
            stream.put((name, data))

    def cut(self) -> None:
        """End the streams."""
        for stream in list(self.streams):
            stream.put(None)

    def close(self) -> None:
        self.cut()
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()

    def call(self, method: str, params: dict[str, Any], ahead: int) -> Any:
        self.called.append(method)
        if self.declines and method == "pause":
            return None
        match method:
            case "history":
                return {"rounds": [self.kept(number) for number in range(params["since"], self.round + ahead)]}
            case "scores" if self.scored:
                usual = {"score": 0.9, "low": 0.8, "high": 1.0, "weight": 0.9, "rounds": 4}
                usual |= {"probation": False, "contained": False, "reasons": ["it helped in 4 rounds"]}
                told = [
                    {**usual, **more, "peer_id": peer, "me": peer == PEERS[0]} for peer, more in self.scored.items()
                ]
                return {"round": self.round, "judged": True, "more": False, "peers": told}
            case "rollouts_ls":
                return {"groups": [{"id": group} for group in self.groups]}
            case "rollouts_pool":
                return {"authors": [{"author": PEERS[1], "learned": 7, "refused": {"unlikely": 2}}]}
            case "rollouts_stats":
                return {"reward_by_task": {"gym/lcm": [[0, 0.25], [1, 0.75]], "gym/gcd": [[1, 1.0]]}}
            case "rollouts_show":
                return self.groups[params["id"]]
            case "caps":
                self.caps |= {key: {"value": value, "unit": self.caps[key]["unit"]} for key, value in params.items()}
                return {"caps": self.caps, "holds": [], "disk_used": 0}
            case "metrics":
                told = {"received": {"/swarmnode/bulk/3": 4_000_000, "other": 900}, "sent": {"/swarmnode/bulk/3": 6e6}}
                return {
                    "metrics": [
                        {
                            "name": f"swarmnode_{way}_bytes_total",
                            "samples": [{"labels": {"protocol": of}, "value": value} for of, value in ways.items()],
                        }
                        for way, ways in told.items()
                    ]
                }
            case "pause" | "stop":
                return {}
        return None

    def told(self, number: int) -> dict[str, Any]:
        """A round as an event tells it."""
        late = PEERS[7:] if number == 4 else []
        counted = [peer for peer in PEERS if peer not in late]
        stages = STAGES if self.open else {} if self.by_rollouts else {"exchange": 1.5}
        return {
            **{"event": "round", "time": self.began + 13.0 * number, "round": number},
            **{"loss": 8.0 - 0.1 * number, "accuracy": 0.05 * number},
            **{"outcome": "Completed", "seconds": 12.5},
            **{"compute_seconds": 3.0 if self.open else 9.0, "tokens": 4096, "bytes_in": 9_000, "bytes_out": 8_000},
            **{f"{stage}_seconds": seconds for stage, seconds in stages.items()},
            **{"members": 8, "missing": late, "why": dict.fromkeys(late, "not connected"), "counted": counted},
            **({"verdicts": dict.fromkeys(counted, "accepted")} if self.open else {}),
            **({"loss": None, "reward": 0.1 * number} if self.by_rollouts else {}),
        }

    def kept(self, number: int) -> dict[str, Any]:
        """The same round as the history has it: before it was looked at, a node remembers its own part only."""
        told = self.told(number)
        if self.open:
            for name in ("event", "counted", "verdicts", "compute_seconds", *(f"{stage}_seconds" for stage in STAGES)):
                del told[name]
            told |= {"trained_s": 3.0, **{f"{stage}_s": seconds for stage, seconds in STAGES.items()}, "waited_s": 2.5}
            return {**told, "why": dict.fromkeys(told["missing"], "late"), "own": "accepted"}
        return {**told, "counted": None, "own": "accepted"} if number == 0 else told

    def view(self, peers: int = 7) -> dict[str, Any]:
        by_rollouts = bool(self.groups)
        run = {
            **{"run_id": self.run_id, "name": "a run", "round": self.round, "rounds": 40, "phase": "training"},
            **{"members": 8, "parameters": 851_968, "codec": "int8", "loss": 8.0 - 0.1 * (self.round - 1)},
            **{"loss_unit": "bits per byte", "missing": [], "next_round_s": 3.0, "round_seconds": 12.5},
            **{"tokens_per_second": 327.0, "compute_share": 0.72, "round_age_s": 1.0, "arriving": None},
            "data": None if by_rollouts else {"source": "local"},
        }
        status = {
            **{"version": "0.1.0", "peer_id": PEERS[0], "uptime_s": 100.0, "role": "train", "paused": bool(self.holds)},
            **{"join": "swarmnode join /ip4/192.0.2.7/tcp/4077", "reachability": "public", "run": run},
            "peers": {"connected": peers, "direct": peers, "relayed": 0},
            "traffic": {"bytes_in": 5_000_000, "bytes_out": 7_000_000, "rate_in": 1000.0, "rate_out": 2000.0},
            "holds": self.holds,
            **{"trainer": None, "problems": self.warnings, "warnings": self.warnings},
        }
        near = [
            {
                **{"peer_id": peer, "address": "", "path": "direct", "relay": None, "inbound": True, "age_s": 60.0},
                **{"rtt_ms": 12.0, "agent": self.agent, "member": True, "standing": "good", "round": self.round},
                **self.ways.get(peer, {}),
            }
            for peer in PEERS[1 : 1 + peers]
        ]
        return {"status": status, "peers": {"peers": near, "kept_out": []}}
