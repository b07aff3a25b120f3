"""Strangers on the wire: raw TCP before any handshake, and authenticated peers who break the rules of streams."""

from __future__ import annotations

import os
import pickle
import socket
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import trio
from harness import Adversary
from victim import Blob, new_identity

from swarmnode.node.host.network import HostSettings, Libp2pNetwork
from swarmnode.protocols.calls import frames, rpc
from swarmnode.protocols.frames import frame
from swarmnode.protocols.network import NetworkError, Stream
from swarmnode.protocols.wire import encode

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


def place(address: str) -> tuple[str, int]:
    parts = address.split("/")
    return parts[2], int(parts[4])


async def raw(address: str) -> trio.SocketStream:
    return await trio.open_tcp_stream(*place(address))


@asynccontextmanager
async def authenticated() -> AsyncIterator[Libp2pNetwork]:
    """A peer with a handshake behind it, that may do what it likes."""
    network = Libp2pNetwork(new_identity(), HostSettings(listen=(LOOPBACK,)))
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        yield network
        nursery.cancel_scope.cancel()


async def stream_to(network: Libp2pNetwork, address: str, protocol: str = rpc.PROTOCOL) -> Stream:
    return await network.open_stream(await network.connect(address), protocol)


def call(number: int, method: str, body: Blob, timeout: float = 60.0) -> bytes:
    return frame(encode(frames.Frame(frames.CALL, number, method, timeout, encode(body))))


class Quiet(Adversary):
    """Shows what the machine does to latencies by itself."""

    name = "none: a peer that is connected and says nothing"
    shows = "what the machine does"

    async def attack(self, target: str) -> None:
        async with authenticated() as network:
            await network.connect(target)
            await trio.sleep_forever()


class _Sender(Adversary):
    """Sends `poison` on a stream of calls, again and again; a new stream whenever the victim ends the last."""

    repetitions = 200
    pause = 0.01  # seconds

    @abstractmethod
    def poison(self) -> bytes: ...

    async def attack(self, target: str) -> None:
        async with authenticated() as network:
            for _ in range(self.times(self.repetitions)):
                try:
                    stream = await stream_to(network, target)
                    await stream.send_all(self.poison())
                    await trio.sleep(self.pause)
                    await stream.aclose()
                except NetworkError:
                    await trio.sleep(self.pause)
            await trio.sleep_forever()


class FalseLength(Adversary):
    """Who believes the length collects what comes, on each stream for itself."""

    name = "false length on 24 streams: 2 GiB stated, 32 MiB sent"

    async def attack(self, target: str) -> None:
        async with authenticated() as network, trio.open_nursery() as nursery:
            for _ in range(24):
                nursery.start_soon(self._send, network, target)

    async def _send(self, network: Libp2pNetwork, target: str) -> None:
        with suppress(NetworkError):
            stream = await stream_to(network, target)
            await stream.send_all(b"\xff\xff\xff\xff\x07")
            for _ in range(self.times(32)):
                await stream.send_all(bytes(1 << 20))
        await trio.sleep_forever()


class DeepNesting(_Sender):
    name = "10 000 nested maps"

    def poison(self) -> bytes:
        return frame(b"\x81\xa1a" * 10_000 + b"\xc0")


class TruncatedFrame(_Sender):
    name = "frame cut in the middle, 200 times"
    shows = "that what ends in the middle leaves nothing behind"

    def poison(self) -> bytes:
        whole = call(1, "echo", Blob(b"x" * 4096))
        return whole[: len(whole) // 2]


class PicklePayload(_Sender):
    name = "pickle that runs a command"
    repetitions = 20

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def poison(self) -> bytes:
        class Command:
            def __reduce__(inner) -> Any:
                return (os.system, (f"touch {self.proof}",))

        load = pickle.dumps(Command())
        return frame(load) + call(1, "echo", Blob(load))

    def harm(self, target: str) -> str | None:
        return "the command was executed" if self.proof.exists() else None


class ManyCalls(Adversary):
    name = "10 000 calls at once"
    shows = "that calls are answered side by side without being a danger"

    async def attack(self, target: str) -> None:
        async with authenticated() as network:
            stream = await stream_to(network, target)
            count = self.times(10_000, least=1000)
            await stream.send_all(b"".join(call(n, "sleep", Blob(b"x" * 512)) for n in range(1, count + 1)))
            while await stream.receive_some(1 << 16):
                pass
            await trio.sleep_forever()


class NeverReads(Adversary):
    name = "asks for 32 MiB of answers on each of 16 streams and reads none"

    async def attack(self, target: str) -> None:
        async with authenticated() as network, trio.open_nursery() as nursery:
            for _ in range(16):
                nursery.start_soon(self._ask, network, target)

    async def _ask(self, network: Libp2pNetwork, target: str) -> None:
        with suppress(NetworkError):
            stream = await stream_to(network, target)
            big = Blob(b"x" * (256 << 10))
            for number in range(1, self.times(128) + 1):
                await stream.send_all(call(number, "echo", big))
        await trio.sleep_forever()


class OneByteFrames(Adversary):
    """Makes the victim stop reading, then fills its windows with frames of one byte, which cost most to keep."""

    name = "windows filled with one-byte frames"
    shows = "that what waits is bounded"

    async def attack(self, target: str) -> None:
        async with authenticated() as network, trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(self._fill, network, target)

    async def _fill(self, network: Libp2pNetwork, target: str) -> None:
        try:
            stream = await stream_to(network, target)
            for number in range(1, 25):  # more answers than may wait: the victim reads no more
                await stream.send_all(call(number, "echo", Blob(b"x" * (256 << 10))))
            for _ in range(self.times(200_000)):
                await stream.send_all(b"x")
        except NetworkError:
            pass  # it had enough
        await trio.sleep_forever()


class OverLimits(Adversary):
    """Calls on and on while its calls in progress are more than the victim carries out for one peer."""

    name = "a peer over its limits: slowed, refused, disconnected, let back"
    seconds = 10.0
    victim = ("--hasty",)

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def attack(self, target: str) -> None:
        self.seen = []
        async with authenticated() as network:
            stream = await stream_to(network, target)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._call_on_and_on, stream)
                with suppress(NetworkError):
                    await self._watch(stream)
                nursery.cancel_scope.cancel()
            self._note("disconnected")
            while True:
                with suppress(NetworkError), trio.move_on_after(1):
                    stream = await stream_to(network, target)
                    await stream.send_all(call(1, "echo", Blob()))
                    if await stream.receive_some(1 << 16):
                        self._note("let back")
                        await trio.sleep_forever()
                await trio.sleep(0.05)

    async def _call_on_and_on(self, stream: Stream) -> None:
        number = 0
        with suppress(NetworkError):
            while True:
                calls = range(number + 1, number + 65)
                number += 64
                await stream.send_all(b"".join(call(n, "sleep", Blob(b"x" * 512)) for n in calls))

    async def _watch(self, stream: Stream) -> None:
        """Note what the answers tell, until there are no more."""
        fastest = answers = 0.0
        since = trio.current_time()
        while got := await stream.receive_some(1 << 16):
            answers += len(got)
            if b"refuses the peer" in got:
                self._note("refused")
            if (passed := trio.current_time() - since) >= 0.2:
                fastest = max(fastest, answers / passed)
                if answers / passed < fastest / 5:
                    self._note("slowed")
                since, answers = trio.current_time(), 0.0

    def _note(self, rung: str) -> None:
        if rung not in self.seen:
            self.seen.append(rung)

    def harm(self, target: str) -> str | None:
        if self.seen == ["slowed", "refused", "disconnected", "let back"]:
            return None
        return f"it was {', '.join(self.seen) or 'never slowed'}"


class ManyStreams(Adversary):
    name = "1000 streams, left open"

    async def attack(self, target: str) -> None:
        async with authenticated() as network, trio.open_nursery() as nursery:
            for _ in range(self.times(1000)):
                nursery.start_soon(self._open, network, target)
                await trio.sleep(0.001)

    async def _open(self, network: Libp2pNetwork, target: str) -> None:
        try:
            stream = await stream_to(network, target)
            await stream.send_all(b"\x80")  # the beginning of a length
        except NetworkError:
            await trio.sleep_forever()


class ManyConnections(Adversary):
    name = "1000 silent connections"

    async def attack(self, target: str) -> None:
        held = []
        for _ in range(self.times(1000)):
            try:
                held.append(await raw(target))
            except OSError:
                await trio.sleep(0.01)
        await trio.sleep_forever()


class RenewedSilence(Adversary):
    """Connections that say nothing, as many as the victim takes twice over, opened again as soon as it hangs up."""

    name = "128 silent connections from one address, renewed at once, and newcomers from there"
    shows = "that none of the newcomers is kept out"
    seconds = 5.0
    sockets = 128

    def __init__(self) -> None:
        self.came = self.let_in = 0

    async def attack(self, target: str) -> None:
        self.came = self.let_in = 0
        async with trio.open_nursery() as nursery:
            for _ in range(self.sockets):
                nursery.start_soon(self._renew, target)
            await trio.sleep(0.3)
            while True:
                self.came += 1
                async with authenticated() as newcomer:
                    with suppress(NetworkError):
                        stream = await stream_to(newcomer, target)
                        await stream.send_all(call(1, "echo", Blob()))
                        self.let_in += bool(await stream.receive_some(1 << 16))
                await trio.sleep(0.1)

    async def _renew(self, target: str) -> None:
        while True:
            try:
                async with await raw(target) as silent:
                    while await silent.receive_some(1 << 12):
                        pass
            except (OSError, trio.BrokenResourceError):
                await trio.sleep(0.01)

    def harm(self, target: str) -> str | None:
        if self.came < 2:
            return "no newcomer came to its end"
        kept_out = self.came - 1 - self.let_in  # the last one was interrupted
        return f"{kept_out} of {self.came - 1} newcomers kept out" if kept_out > 0 else None


class Slowloris(Adversary):
    name = "200 handshakes, one byte a second"

    async def attack(self, target: str) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(self.times(200)):
                nursery.start_soon(self._drip, target)

    async def _drip(self, target: str) -> None:
        while True:
            try:
                stream = await raw(target)
                for byte in b"\x13/multistream/1.0.0\n" * 10:
                    await stream.send_all(bytes([byte]))
                    await trio.sleep(1)
            except (OSError, trio.BrokenResourceError):
                await trio.sleep(0.1)


class GarbageBeforeHandshake(Adversary):
    name = "500 connections that begin with garbage"
    shows = "that they leave nothing behind"

    async def attack(self, target: str) -> None:
        for number in range(self.times(500)):
            try:
                async with await raw(target) as stream:
                    greeting = b"\x13/multistream/1.0.0\n\x07/noise\n" if number % 2 else b""
                    await stream.send_all(greeting + os.urandom(4096))
                    await trio.sleep(0.005)
            except (OSError, trio.BrokenResourceError):
                await trio.sleep(0.005)
        await trio.sleep_forever()


class ReplayedFrames(Adversary):
    """Records the bytes of a session in which `count` was called once, and plays them again, 50 times."""

    name = "a recorded session and its frames, played again"
    shows = "that no call is carried out twice, as Noise promises both"
    seconds = 5.0

    def __init__(self) -> None:
        self.executed: int | None = None  # until it has asked

    async def attack(self, target: str) -> None:
        self.executed, recorded = None, bytearray()
        frames = call(1, "count", Blob(), timeout=2.0)
        async with trio.open_nursery() as nursery, authenticated() as network:
            listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
            port = listener.socket.getsockname()[1]
            nursery.start_soon(self._relay, listener, target, recorded, nursery)
            stream = await stream_to(network, f"/ip4/127.0.0.1/tcp/{port}/p2p/{target.rpartition('/')[2]}")
            await stream.send_all(frames)
            first = (await stream.receive_some(1 << 16))[-1]
            session = bytes(recorded)
            for _ in range(self.times(50)):
                try:
                    async with await raw(target) as again:
                        await again.send_all(session)
                        await trio.sleep(0.02)
                except (OSError, trio.BrokenResourceError):
                    await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
        async with authenticated() as network:
            stream = await stream_to(network, target)
            await stream.send_all(call(1, "count", Blob(), timeout=2.0))
            self.executed = (await stream.receive_some(1 << 16))[-1] - first - 1  # but this call
        await trio.sleep_forever()

    async def _relay(self, listener: trio.SocketListener, target: str, recorded: bytearray, nursery: Any) -> None:
        near, far = await listener.accept(), await raw(target)
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        async def copy(source: trio.SocketStream, sink: trio.SocketStream, into: bytearray | None) -> None:
            async for piece in source:
                if into is not None:
                    into += piece
                await sink.send_all(piece)

        nursery.start_soon(copy, near, far, recorded)
        nursery.start_soon(copy, far, near, None)

    def harm(self, target: str) -> str | None:
        if self.executed is None:
            return "it came not so far as to ask how many calls were carried out"
        return f"{self.executed} calls of another session carried out" if self.executed > 0 else None


def everyone(proof: Path) -> list[Adversary]:
    """All of the group; `proof` is a file that an executed payload would make."""
    before = [Quiet(), Slowloris(), GarbageBeforeHandshake(), ManyConnections(), RenewedSilence()]
    frames = [FalseLength(), TruncatedFrame(), DeepNesting(), PicklePayload(proof), ReplayedFrames()]
    unread = [ManyStreams(), NeverReads(), OneByteFrames()]
    return [*before, *frames, *unread, ManyCalls(), OverLimits()]
