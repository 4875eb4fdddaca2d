"""A KV receiver in a separate process: see kv_speed.py, which starts it.

Standard output: tickets for all of its blocks in hexadecimal, one per line; the next ticket follows
the commit of the one before. Ends when standard input closes.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
import time

import torch

from baton.types import KvLayout, Sampling, SequenceSpec, WorkerIdentity
from engine.kv.tensors.paged import TorchKvPool
from kv_transfer.handshake import ReceiverConfig
from kv_transfer.ticket import TicketCommitted, TicketEvent
from kv_transfer.transport.listeners import open_receiver


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--transport", required=True)
    parser.add_argument("--num-blocks", type=int, required=True)
    parser.add_argument("--layout", required=True, help="a KvLayout as JSON")
    options = parser.parse_args()
    told = json.loads(options.layout)
    lists = {name: tuple(told[name]) for name in ("parts", "windowed_layers")}
    layout = KvLayout(**{**told, **lists})
    pool = TorchKvPool(layout, options.num_blocks, torch.device(options.device))
    events: queue.SimpleQueue[TicketEvent | None] = queue.SimpleQueue()
    running = open_receiver(
        ReceiverConfig(WorkerIdentity("d0", 1), pool),
        events.put,
        time.monotonic,
        transports=(options.transport,),
    )
    num_tokens = options.num_blocks * layout.block_size

    def offer() -> None:
        spec = SequenceSpec("r", (0,) * num_tokens, Sampling())
        ticket = running.tickets.offer(spec, tuple(range(options.num_blocks)), 0, num_tokens)
        print(ticket.data.hex(), flush=True)

    def await_end() -> None:
        sys.stdin.read()
        events.put(None)

    threading.Thread(target=await_end, daemon=True).start()
    offer()
    while event := events.get():
        if not isinstance(event, TicketCommitted):
            raise SystemExit(f"not committed: {event}")
        running.tickets.release(event.ticket_id)
        offer()
    running.close()


if __name__ == "__main__":
    main()
