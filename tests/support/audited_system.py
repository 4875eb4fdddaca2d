"""A whole system that serves requests under an audit hook; prints what it should not have done, one
JSON per line.

python -m tests.support.audited_system, in a process of its own: a hook stays for good.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(
    f"{ROOT / folder}/"
    for folder in (
        "baton",
        "gateway",
        "prefill_svc",
        "decode_svc",
        "worker_core",
        "engine",
        "kv_transfer",
        "kernels",
    )
)
WATCHED = frozenset({"pickle.find_class", "marshal.loads", "exec", "compile"})
DONE = "all requests were served"


class Watch:
    """The hook, and what it saw."""

    def __init__(self) -> None:
        self.is_serving = False
        self.seen: list[dict[str, Any]] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:  # noqa: ARG002, as hooks are called
        if event in WATCHED and self._is_wrong(event, sys._getframe(1)):
            self.seen.append({"event": event, "where": _where(sys._getframe(1))})

    def _is_wrong(self, event: str, caller: FrameType) -> bool:
        """Pickles: ever. Text or marshalled code: by our own code, or by anybody for a request.
        Imports are Python's."""
        if event == "pickle.find_class":
            return True
        if _is_importing(caller):
            return caller.f_code.co_filename.startswith(OURS)
        return self.is_serving or caller.f_code.co_filename.startswith(OURS)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _where(frame: FrameType | None) -> list[str]:
    found = []
    while frame is not None and len(found) < 8:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return found


async def serve_some(watch: Watch) -> bool:
    """Whether real services served all requests, over a real KV channel, from a real checkpoint."""
    from baton.client import AsyncClient, StructuredOutput
    from tests.support.live_tiers import BOX_MODEL, decode_worker, gateway, prefill_worker

    options = {"model": str(BOX_MODEL), "engine": "torch", "num_threads": 1, "max_model_len": 128}
    common = {**options, "num_gpu_blocks_override": 64, "max_num_seqs": 4, "kv_transport": "tcp"}
    async with (
        prefill_worker(worker_id="p0", **common) as prefill,
        decode_worker(worker_id="d0", max_local_prefill_tokens=0, **common) as decode,
        gateway([prefill], [decode], served_model_name=str(BOX_MODEL)) as front,
        AsyncClient(front, max_retries=0) as client,
    ):
        watch.is_serving = True
        digits = StructuredOutput(regex="[0-9]{1,3}")
        done = (
            await client.generate("import os\nimport sys\n", max_tokens=8, stop=["\n\n\n"]),
            await client.generate(
                "def f():", max_tokens=4, n=2, seed=1, temperature=1.0, logprobs=2
            ),
            await client.generate("x = ", max_tokens=4, structured_output=digits),
        )
        watch.is_serving = False
    return all(choice.token_ids for completion in done for choice in completion.choices)


def main() -> None:
    watch = Watch()
    sys.addaudithook(watch)
    is_served = asyncio.run(serve_some(watch))
    for entry in watch.seen:
        print(json.dumps(entry))
    if is_served:
        print(DONE)


if __name__ == "__main__":
    main()
