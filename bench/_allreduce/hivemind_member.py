"""One member of a group of hivemind averagers, for `bench/allreduce.py`, which writes commands to it: JSON lines.

A process of its own, for hivemind and py-libp2p both register the schema `crypto.proto`, and it imports nothing of
ours, so that it also runs in an environment that has only hivemind.

`prepare` makes an averager and `group` finds the others, both before the clock starts: what `round` times is the
all-reduce alone, from the trigger to the result.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

import hivemind
import numpy as np
import torch
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization
from hivemind.utils.timed_storage import get_dht_time

COMPRESSIONS = {"fp32": NoCompression, "fp16": Float16Compression, "int8": Uniform8BitQuantization}
SCHEDULED = 3.0  # seconds that members have to find each other
PATIENCE = 120.0  # seconds


def answer(**figures: object) -> None:
    print(json.dumps(figures), flush=True)


def main() -> None:
    index, count = int(sys.argv[1]), int(sys.argv[2])
    dht = averager = control = None
    values = torch.zeros(0)
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "start":
                peers = command["addresses"]
                dht = hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=peers, start=True)
                answer(addresses=[str(address) for address in dht.get_visible_maddrs()])
            case "prepare":
                if averager is not None:
                    averager.shutdown()
                values = torch.from_numpy(
                    np.random.default_rng(index).standard_normal(command["parameters"], np.float32)
                )
                averager = hivemind.DecentralizedAverager(
                    [values.clone()],
                    dht,
                    prefix=f"bench_{command['turn']}",
                    target_group_size=count,
                    min_group_size=count,
                    min_matchmaking_time=SCHEDULED,
                    request_timeout=SCHEDULED / 2,
                    compression=COMPRESSIONS[command["codec_name"]](),
                    start=True,
                )
                answer(prepared=True)
            case "group":
                with averager.get_tensors() as (tensor,):
                    tensor.copy_(values)
                soon = get_dht_time() + SCHEDULED
                control = averager.step(scheduled_time=soon, wait=False, require_trigger=True, timeout=PATIENCE)
                until = time.monotonic() + PATIENCE
                while control.stage != AveragingStage.AWAITING_TRIGGER and time.monotonic() < until:
                    time.sleep(0.05)
                answer(grouped=control.stage == AveragingStage.AWAITING_TRIGGER)
            case "round":
                began = time.perf_counter()
                control.allow_allreduce()
                gathered = control.result(PATIENCE)
                answer(seconds=time.perf_counter() - began, members=len(gathered))
            case "hash":
                with averager.get_tensors() as (tensor,):
                    answer(hash=hashlib.sha256(tensor.numpy().tobytes()).hexdigest())
            case "end":
                break
    for part in (averager, dht):
        if part is not None:
            part.shutdown()


if __name__ == "__main__":
    main()
