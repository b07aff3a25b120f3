"""What a device makes of the product: training beside a plain torch loop, the parts of an exchange, judging, audits.

    python bench/device.py                                        # the 124 M shape, on a GPU where there is one
    python bench/device.py --layers 2 --width 64 --heads 2 --vocabulary 512 --context 64 --batch 2 --steps 3

Random tokens, since only time counts. One JSON object:

training  tokens/s of `InnerLoop` and of a plain loop of the same model (`torch.optim.AdamW(fused=True)` and `Muon`,
          autocast, clip_grad_norm_), in turns in one process, the medians of the repeats, and the share of either in
          the device's peak: 6 FLOP a parameter that is multiplied and 12 L C T for attention, a token. The peak is the
          maker's (dense) where it stands in PEAKS, and the best of matrix products in the same run (`measured_tflops`).
exchange  ms of each part for a vector of all parameters: copy from and to the device, the difference, int8 by the
          product's codec and by the same in torch on the device, whether their bytes are equal, a TCP connection over
          loopback, and the outer step. `device_saves_ms`: what encoding and decoding on the device would save.
judging   ms for the loss of the sequences that a judge draws, and for that with its gradient.
audit     ms of a replayed step beside a trained one, and how far it ends from where it ended before, as a share of the
          way: of equal steps on one device.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarmnode.training import worker
from swarmnode.training.codecs import codec
from swarmnode.training.codecs.base import Codec
from swarmnode.training.gpt import GPT
from swarmnode.training.inner import InnerLoop, layout_of
from swarmnode.training.open_step import SEQUENCES
from swarmnode.training.optimizer import hidden_matrices
from swarmnode.training.outer import OuterState, outer_step
from swarmnode.training.runspec import RunSpec, parse_runspec

# Dense bfloat16 TFLOP/s by the maker's data sheets.
PEAKS = {"H100 PCIe": 756.0, "H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0, "RTX 4090": 165.0}
INT8 = 1024  # elements of a block, as in training/codecs/int8.py
NEVER = lambda: False  # noqa: E731


class RandomTokens:
    """The task of predicting noise: any model of the product's, and no data to wait for."""

    def __init__(self, spec: RunSpec, vocabulary: int, device: str) -> None:
        torch.manual_seed(spec.run.seed)
        self.model = GPT(spec.model, vocabulary).to(device)
        self.tokens_per_sample = spec.model.context
        self._vocabulary, self._device = vocabulary, device

    def draw(self, samples: int, generator: torch.Generator) -> Tensor:
        shape = samples, self.tokens_per_sample + 1
        return torch.randint(self._vocabulary, shape, generator=generator).to(self._device)

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model.loss(batch) / math.log(2)
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10, help="inner steps of a measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--precision", default="bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(measure(parser.parse_args())))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    model = {name: getattr(options, name) for name in ("layers", "width", "heads", "context")}
    inner = {"batch": options.batch, "steps": 10**6, "warmup": 0}
    inner |= {"optimizer": options.optimizer, "precision": options.precision}
    spec = parse_runspec({"run": {"name": "device"}, "model": model, "inner": inner}, source="bench")
    task = RandomTokens(spec, options.vocabulary, options.device)
    vector = torch.zeros(layout_of(task.model).parameters, device=options.device)
    loop = InnerLoop(spec, task, peer_id="bench", vector=vector, keep=False)
    cuda = options.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else f"cpu, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "options": vars(options),
        "parameters": vector.numel(),
        "training": training(options, spec, task, loop),
        "exchange": exchange(vector, options.repeats),
        "judging": judging(task, loop, options.repeats),
        "audit": audit(loop, options.steps),
    }


# --- training ---------------------------------------------------------------------------------------------------------


def training(options: argparse.Namespace, spec: RunSpec, task: RandomTokens, loop: InnerLoop) -> dict[str, Any]:
    plain = Plain(spec, RandomTokens(spec, options.vocabulary, options.device))
    rates: dict[str, list[float]] = {"product": [], "plain": []}
    memory: dict[str, float] = {}
    tokens = options.steps * options.batch * options.context
    for repeat in range(options.repeats + 1):  # the first to warm up
        for name in rates:
            if options.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            if name == "product":
                loop.train(round=repeat, steps=options.steps, seconds=math.inf, between=NEVER)
            else:
                plain.train(options.steps)
            wait_for(options.device)
            rates[name].append(tokens / (time.perf_counter() - began))
            if options.device == "cuda":
                memory[f"{name}_peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    product, beside = (statistics.median(told[1:]) for told in rates.values())
    flop = flop_of_token(task.model, spec)
    name = torch.cuda.get_device_name() if options.device == "cuda" else ""
    peak = next((tflops for part, tflops in PEAKS.items() if part in name), None)
    measured = peak_of_products(options.device)
    return {
        "tokens_per_s": round(product),
        "plain_tokens_per_s": round(beside),
        "ratio": round(product / beside, 3),
        "ratio_worst": round(min(a / b for a, b in zip(rates["product"][1:], rates["plain"][1:], strict=True)), 3),
        "gflop_per_token": round(flop / 1e9, 4),
        "peak_tflops": peak,
        "share_of_peak": round(product * flop / peak / 1e12, 4) if peak else None,
        "plain_share_of_peak": round(beside * flop / peak / 1e12, 4) if peak else None,
        "measured_tflops": round(measured / 1e12, 3),
        "share_of_measured": round(product * flop / measured, 4),
        **memory,
    }


class Plain:
    """The loop that everybody writes: torch's own optimizer, autocast as the run has it, clipping."""

    def __init__(self, spec: RunSpec, task: RandomTokens) -> None:
        self._task, self._inner = task, spec.inner
        self._bf16 = spec.inner.precision == "bf16"
        hidden = hidden_matrices(task.model) if spec.inner.optimizer == "muon" else set()
        rest = [parameter for parameter in task.model.parameters() if parameter not in hidden]
        groups = [
            {"params": [p for p in rest if (p.dim() >= 2) == matrices], "weight_decay": decay}
            for matrices, decay in ((True, spec.inner.weight_decay), (False, 0.0))
        ]
        groups = [group for group in groups if group["params"]]
        self._optimizers = [torch.optim.AdamW(groups, lr=spec.inner.lr, betas=(0.9, 0.95), fused=True)]
        if hidden:
            rate, decay = spec.inner.muon_lr, spec.inner.weight_decay
            muon = torch.optim.Muon(list(hidden), lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            self._optimizers.append(muon)
        self._generator = torch.Generator()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            batch = self._task.draw(self._inner.batch, self._generator)
            with torch.autocast(batch.device.type, torch.bfloat16, enabled=self._bf16):
                loss = self._task.loss(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._task.model.parameters(), self._inner.clip)
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad()
            loss.item()


def flop_of_token(model: torch.nn.Module, spec: RunSpec) -> float:
    """Floating-point operations that training on one token takes (PaLM, 2204.02311, appendix B)."""
    embeddings = {
        p for module in model.modules() if isinstance(module, torch.nn.Embedding) for p in module.parameters()
    }
    multiplied = sum(p.numel() for p in model.parameters() if p.dim() == 2 and p not in embeddings)
    if getattr(model, "head", None) is None:  # the embedding is the head as well
        multiplied += model.tokens.weight.numel()
    return 6 * multiplied + 12 * spec.model.layers * spec.model.width * spec.model.context


def peak_of_products(device: str) -> float:
    """FLOP/s of the fastest of some products of square matrices, in bfloat16 on a GPU and float32 on a CPU."""
    cuda, best = device == "cuda", 0.0
    for size in (4096, 8192) if cuda else (512,):
        a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
        ms = timed(lambda a=a: a @ a, device, 10)
        best = max(best, 2 * size**3 / (ms / 1e3))
    return best


# --- an exchange ------------------------------------------------------------------------------------------------------


def exchange(vector: Tensor, repeats: int) -> dict[str, Any]:
    device, size = vector.device.type, vector.numel()
    usual = codec("int8")
    shared = torch.frombuffer(mmap.mmap(-1, 4 * size), dtype=torch.float32)  # like the memory of daemon and trainer
    told: dict[str, Any] = {"mb": round(4 * size / 1e6, 1)}
    if device == "cuda":
        told["copy_from_device_unpinned"] = timed(lambda: shared.copy_(vector), device, repeats)
        worker._pin(shared)
    told["copy_from_device"] = timed(lambda: shared.copy_(vector), device, repeats)
    told["copy_to_device"] = timed(lambda: vector.copy_(shared), device, repeats)
    start = np.random.default_rng(1).standard_normal(size, np.float32) * np.float32(1e-3)
    delta, local = np.empty_like(start), shared.numpy()
    told["difference"] = timed(lambda: np.subtract(start, local, out=delta), "cpu", repeats)
    raw, decoded = memoryview(bytearray(usual.encoded_size(size))), np.empty_like(start)
    told["encode_int8"] = timed(lambda: usual.encode(delta, raw), "cpu", repeats)
    told["wire_loopback"] = timed(lambda: over_loopback(raw), "cpu", repeats)
    told["decode_int8"] = timed(lambda: usual.decode(raw, size, decoded), "cpu", repeats)
    state = OuterState.start(start)
    told["outer_step"] = timed(lambda: outer_step(state, decoded, lr=0.7, momentum=0.9), "cpu", repeats)
    there = torch.from_numpy(delta).to(device)
    scales, integers = encode_int8(there)
    told["encode_int8_device"] = timed(lambda: encode_int8(there), device, repeats)
    told["decode_int8_device"] = timed(lambda: decode_int8(scales, integers, size), device, repeats)
    coded = torch.empty(len(raw), dtype=torch.uint8, pin_memory=device == "cuda")
    told["copy_coded_from_device"] = timed(
        lambda: coded[: integers.numel()].copy_(integers.view(torch.uint8)), device, repeats
    )
    told["device_saves_ms"] = told["encode_int8"] + told["decode_int8"] - told["copy_coded_from_device"] * 2
    told["device_saves_ms"] -= told["encode_int8_device"] + told["decode_int8_device"]
    equal = same_bytes(usual, delta, scales, integers)
    return {name: round(value, 3) for name, value in told.items()} | {"bytes_equal": equal}


def encode_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """What training/codecs/int8.py makes of finite `values` (n,), bit for bit: scales (blocks,) and integers (n,)."""
    blocks = torch.nn.functional.pad(values, (0, -len(values) % INT8)).view(-1, INT8)
    bits = (blocks.abs().amax(dim=1) / values.new_tensor(127.0)).view(torch.int32)  # by a number a GPU multiplies
    smallest = torch.tensor(2.0**-120).view(torch.int32).item()
    largest = (torch.finfo(torch.float32).max / torch.tensor(127.0)).view(torch.int32).item() & ~0x7F
    bits = torch.where(bits < smallest, 0, (bits + 0x7F) & ~0x7F).clamp(max=largest)
    scales = bits.view(torch.float32)
    inverse = torch.where(bits > 0, 1 / scales, 0.0)
    integers = (blocks * inverse[:, None]).round().to(torch.int8)
    return scales, integers.view(-1)[: len(values)]


def decode_int8(scales: Tensor, integers: Tensor, size: int) -> Tensor:
    """The values (size,) that these stand for."""
    whole = torch.nn.functional.pad(integers, (0, -size % INT8)).view(-1, INT8)
    return (whole * scales[:, None]).view(-1)[:size]


def same_bytes(usual: Codec, values: np.ndarray, scales: Tensor, integers: Tensor) -> bool:
    """Whether the product's codec makes the same bytes, and the same values of them."""
    raw = usual.encode(values)
    theirs = scales.cpu().numpy().tobytes() + integers.cpu().numpy().tobytes()
    decoded = decode_int8(scales, integers, values.size).cpu().numpy()
    return theirs == bytes(raw) and decoded.tobytes() == usual.decode(raw, values.size).tobytes()


def over_loopback(raw: memoryview) -> None:
    """Send these bytes over a TCP connection, and receive them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    thread = threading.Thread(target=sender.sendall, args=(raw,))
    into = memoryview(bytearray(len(raw)))
    with sender, receiver:
        thread.start()
        while into:
            into = into[receiver.recv_into(into) :]
        thread.join()


# --- judging and audits -----------------------------------------------------------------------------------------------


def judging(task: RandomTokens, loop: InnerLoop, repeats: int) -> dict[str, Any]:
    drawn = task.draw(SEQUENCES, torch.Generator().manual_seed(1))

    def loss() -> float:
        with torch.no_grad():
            return float(task.loss(drawn))

    device = drawn.device.type
    return {
        "sequences": SEQUENCES,
        "loss_ms": round(timed(loss, device, repeats), 3),
        "gradient_ms": round(timed(lambda: loop.slope(drawn), device, repeats), 3),
    }


def audit(loop: InnerLoop, steps: int) -> dict[str, Any]:
    start = loop.state()
    began = time.perf_counter()
    loop.train(round=10**5, steps=steps, seconds=math.inf, between=NEVER)
    trained = time.perf_counter() - began
    end = loop.state()
    began = time.perf_counter()
    with loop.replayed(start, peer_id="bench", round=10**5, step=0, steps=steps) as replayed:
        took = time.perf_counter() - began
        way = np.linalg.norm(end.parameters - start.parameters)
        far = np.linalg.norm(end.parameters - replayed.parameters)
    return {
        "steps": steps,
        "trained_ms_per_step": round(1e3 * trained / steps, 3),
        "replayed_ms_per_step": round(1e3 * took / steps, 3),
        "distance": float(far / way),
    }


def timed(work: Callable[[], object], device: str, repeats: int) -> float:
    """Median ms of `work`, after one run to warm up."""
    work()
    took = []
    for _ in range(repeats):
        wait_for(device)
        began = time.perf_counter()
        work()
        wait_for(device)
        took.append(1e3 * (time.perf_counter() - began))
    return statistics.median(took)


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
