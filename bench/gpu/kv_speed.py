"""KV that stays on the GPU: packing with a checksum, and handover to another process on the same
GPU. Sizes of an 8B Llama."""

from __future__ import annotations

import json
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial

import torch

from baton.types import KvLayout
from baton_kernels.gpu.kv_pack import kv_pack_summed, kv_unpack_summed
from baton_kernels.kv_pack import Runs
from baton_kernels.word_sum import key_of
from bench.gpu.setting import Result, Setting, time_ms

KV_HEADS, DIM, BLOCK_SIZE = 8, 128, 16
_WORDS = DIM * 2 // 8
_NUM_HANDOFFS = 9
_PATIENCE_S = 60.0


def _pack(is_unpack: bool, setting: Setting) -> Result:
    num_tokens, num_layers = setting.pick(8192, 32), setting.pick(32, 2)
    shape = (num_tokens // BLOCK_SIZE, num_layers, 2, KV_HEADS, BLOCK_SIZE, _WORDS)
    make = partial(torch.randint, -(1 << 62), 1 << 62, device=setting.device)
    pool = make(shape, generator=setting.generator())
    payload = make((pool.numel(),), generator=setting.generator())
    order = torch.randperm(len(pool), generator=setting.generator(), device=setting.device)
    table, runs = order.to(torch.int32), Runs(0, num_tokens, 0, num_layers, BLOCK_SIZE)
    function = kv_unpack_summed if is_unpack else kv_pack_summed
    ms = time_ms(lambda: function(pool, table, runs, payload, key_of(1)), setting)
    return {"ms": ms, "bytes": 16.0 * payload.numel()}


def hand_over(setting: Setting) -> Result:
    """Median time from ticket to confirmed commit with both processes on one GPU: the data crosses
    its memory four times, two of them at once. A dry run uses shared memory."""
    from baton.types import Sample, WorkerIdentity
    from engine.kv.range import KvRange
    from engine.kv.tensors.paged import TorchKvPool
    from kv_transfer.device_memory import device_memory_of
    from kv_transfer.handshake import SenderConfig
    from kv_transfer.send_connection import Finish, Send
    from kv_transfer.sender import SendDone, Sender
    from kv_transfer.transport.connector import make_connector

    num_tokens, num_layers = setting.pick(8192, 32), setting.pick(32, 2)
    layout = KvLayout("bench", num_layers, KV_HEADS, DIM, "bfloat16", BLOCK_SIZE)
    blocks = tuple(range(num_tokens // BLOCK_SIZE))
    pool = TorchKvPool(layout, len(blocks), setting.device)
    transport = "shm" if setting.is_dry else "cuda_ipc"
    dones: queue.SimpleQueue[SendDone] = queue.SimpleQueue()
    connect = make_connector(transport, memory=device_memory_of(pool))
    config = SenderConfig(WorkerIdentity("p0", 1), pool, connect, time.monotonic)
    sender = Sender(config, dones.put)

    def run(ticket: bytes) -> None:
        sender.begin("k", ticket)
        sender.submit(Send("k", blocks, KvRange(0, num_tokens, 0, num_layers)))
        sender.submit(Finish("k", num_tokens, (Sample(1),), time.monotonic()))
        done = dones.get(timeout=_PATIENCE_S)
        if done.error:
            raise done.error

    try:
        ms = _median_ms(run, layout, transport, setting)
    finally:
        sender.close()
    num_bytes = float(num_tokens * layout.token_bytes)
    return {
        "ms": ms,
        "bytes": 4.0 * num_bytes,
        "kv_gb_per_s": num_bytes / ms / 1e6,
        "transport": transport,
    }


def _median_ms(
    run: Callable[[bytes], None], layout: KvLayout, transport: str, setting: Setting
) -> float:
    """Median time in ms to hand over all blocks to a receiver in another process, which prints its
    tickets. Excludes the first handover."""
    num_blocks = setting.pick(8192, 32) // BLOCK_SIZE
    command = [sys.executable, "-m", "bench.gpu.kv_peer", "--device", str(setting.device)]
    command += ["--transport", transport, "--num-blocks", str(num_blocks)]
    command += ["--layout", json.dumps(asdict(layout))]
    times = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(1 + setting.pick(_NUM_HANDOFFS, 1)):
            ticket = bytes.fromhex(process.stdout.readline())
            start = time.perf_counter()
            run(ticket)
            times.append((time.perf_counter() - start) * 1e3)
        assert process.stdin is not None
        process.stdin.close()
        process.stdout.read()
    return statistics.median(times[1:])


ITEMS: Mapping[str, Callable[[Setting], Result]] = {
    "kv_pack with its checksum 8K tokens": partial(_pack, False),
    "kv_unpack with its checksum 8K tokens": partial(_pack, True),
    "cuda_ipc 8K tokens, two processes": hand_over,
}
