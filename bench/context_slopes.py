"""Cost of each part of the host by context length, and its slope.

    python -m bench.context_slopes [--lengths 1024 ...] [--model MODEL] [--json FILE]

A step with new tokens, an event or a chunk must cost the same at every length: its slope, the
exponent p of time ~ length^p, is 0. What reads a whole prompt once (opening, hashing, conversion)
has the slope 1 and is given as time per token. The engine is a stub, because attention reads the
whole context in each step. With --model, decode steps and the last chunk of a prompt are timed on a
real model, too, up to its length.

Exit status 1 if a part of the host is steeper: an exponent above 0.25 for what must be flat, or
above 1.25 for what reads the prompt once. The margin is for the noise of the shortest lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from baton.types import KvSource, Sampling, SequenceSpec
from baton.v1 import inference_pb2
from baton.wire import sequence_from_proto, sequence_to_proto
from bench.host_rig import decode_core, draw_spec, prefill_core
from bench.machine import document_of, now, publish
from bench.stub_engine import BLOCK_SIZE, VOCAB_SIZE, StubEngine
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelChoice
from engine.interface import Engine
from engine.kv.layout import whole_blocks
from engine.kv.pool import BlockPool
from gateway.intake.rules import ModelFacts
from gateway.intake.validator import check_request
from gateway.routing.history import prefix_digests
from worker_core.admission import CoreLimits
from worker_core.commands import Open
from worker_core.speculation.interface import DraftRequest, Proposal, Speculation
from worker_core.speculation.ngram import NgramProposer

LENGTHS = tuple(1 << power for power in range(10, 21, 2))

#: Parts that read the whole prompt once.
PER_PROMPT = frozenset(
    {"open", "find a prefix", "check at the gateway", "route", "to the wire", "from the wire"}
)

_MARGIN = 0.25

_CHUNK = 512
_NUM_SPARE_BLOCKS = 32
_NUM_STEPS = 25


@dataclass(frozen=True, slots=True)
class Slope:
    """Seconds of CPU of a part by context length in tokens."""

    part: str
    seconds: Mapping[int, float]

    @property
    def exponent(self) -> float:
        """Least squares of log(time) over log(length)."""
        points = [(math.log(n), math.log(max(s, 1e-9))) for n, s in self.seconds.items()]
        mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
        square = sum((x - mean_x) ** 2 for x, _ in points)
        return sum((x - mean_x) * (y - mean_y) for x, y in points) / square if square else 0.0


def too_steep(slopes: Sequence[Slope]) -> list[str]:
    """Lines on parts of the host that cost more than they may."""
    found = []
    for slope in slopes:
        bound = int(slope.part in PER_PROMPT) + _MARGIN
        if slope.exponent > bound:
            found.append(
                f"{slope.part}: slope {slope.exponent:.2f}, at most {bound:.2f} is allowed"
            )
    return found


class _Lookup:
    """A Speculation that always drafts what prompt lookup finds."""

    max_num_drafts = 4

    def __init__(self) -> None:
        self._proposer = NgramProposer()

    def is_due(self, key: Hashable) -> bool:  # noqa: ARG002
        return True

    def plan(
        self,
        requests: Sequence[DraftRequest],
        num_rows: int,  # noqa: ARG002
        max_num_drafts: int,  # noqa: ARG002
    ) -> list[Proposal]:
        return self._proposer.propose(requests)

    def record(self, key: Hashable, token_ids: Sequence[int]) -> None:
        pass

    def on_step_end(self, num_rows: int, num_drafts: int) -> None:
        pass

    def forget(self, key: Hashable) -> None:
        self._proposer.forget(key)


class Rig:
    """A core with one sequence of `num_tokens` tokens, and room for another."""

    def __init__(
        self,
        engine: Engine,
        num_tokens: int,
        speculation: Speculation | None = None,
        *,
        queues_prompts: bool = False,
    ) -> None:
        num_blocks = engine.spec.num_blocks
        block_size = engine.spec.layout.block_size
        self.pool = BlockPool(num_blocks, whole_blocks(block_size), secret=bytes(32))
        spec = draw_spec(1, num_tokens)
        prompt = tuple(token_id % engine.spec.vocab_size for token_id in spec.prompt_token_ids)
        self.spec = dataclasses.replace(spec, prompt_token_ids=prompt)
        limits = CoreLimits(4, _CHUNK)
        if queues_prompts:
            self.core = prefill_core(engine, self.pool, limits, [])
        else:
            self.core, _ = decode_core(engine, self.pool, limits, [], speculation=speculation)

    def open(self, handle: int, spec: SequenceSpec) -> None:
        self.core.step([Open(0, handle, spec, KvSource.LOCAL)])

    def prefill(self) -> float:
        """Compute the prompt after its first chunk, of _CHUNK tokens as all; seconds of the
        last."""
        last_s = 0.0
        for _ in range(self.spec.num_tokens // _CHUNK - 1):
            last_s = seconds(lambda: self.core.step(()))
        if not self.core.step(()).load.num_running:
            raise RuntimeError("the sequence does not run")
        return last_s

    def step_s(self) -> float:
        return typical(lambda: self.core.step(()))


def host_parts(num_tokens: int) -> Iterator[tuple[str, float]]:
    """Yield each part of the host with its seconds for a prompt of num_tokens tokens."""
    num_blocks = num_tokens // BLOCK_SIZE + _NUM_SPARE_BLOCKS
    most = num_tokens + 8192

    def rig(speculation: Speculation | None = None, *, queues_prompts: bool = False) -> Rig:
        engine = StubEngine(num_blocks, max_model_len=most)
        return Rig(engine, num_tokens, speculation, queues_prompts=queues_prompts)

    plain = rig()
    yield "open", seconds(lambda: plain.open(1, plain.spec))
    yield "last chunk of a prompt", plain.prefill()
    yield "decode", plain.step_s()
    queueing = rig(queues_prompts=True)
    queueing.open(1, queueing.spec)
    queueing.prefill()
    tail = (7,) * (2 * BLOCK_SIZE * _NUM_SPARE_BLOCKS)
    prompt = queueing.spec.prompt_token_ids + tail
    queueing.open(2, dataclasses.replace(queueing.spec, prompt_token_ids=prompt, arrival_ns=2))
    yield "decode while a cached prompt waits for blocks", queueing.step_s()
    drafting = rig(_Lookup())
    drafting.open(1, drafting.spec)
    drafting.prefill()
    yield "decode with drafts", drafting.step_s()
    penalised = rig()
    sampling = Sampling(max_tokens=most, repetition_penalty=1.1)
    penalised.open(1, dataclasses.replace(penalised.spec, sampling=sampling))
    penalised.prefill()
    yield "decode with penalties", penalised.step_s()
    yield from request_parts(plain)


def request_parts(rig: Rig) -> Iterator[tuple[str, float]]:
    """Yield the parts that read a prompt once."""
    spec, pool = (
        rig.spec,
        BlockPool(rig.pool.num_blocks, whole_blocks(BLOCK_SIZE), secret=bytes(32)),
    )
    lease = pool.lease(spec.prefix_key, spec.token_ids, spec.num_tokens)
    if lease is None:
        raise RuntimeError("the pool is too small")
    lease.index(spec.token_ids, spec.num_tokens)
    lease.release()
    find = typical(lambda: pool.num_cached_tokens(spec.prefix_key, spec.token_ids), 3)
    yield "find a prefix", find
    request = inference_pb2.GenerateRequest()
    request.prompt.token_ids.ids.extend(spec.prompt_token_ids)
    most = 2 * spec.num_tokens
    facts = ModelFacts("m", VOCAB_SIZE, most, most, frozenset(), False, 1, 1)
    check = typical(lambda: asyncio.run(check_request(request, facts)), 3)
    yield "check at the gateway", check
    yield "route", typical(lambda: prefix_digests(spec.token_ids, b"t" * 16, bytes(16)), 3)
    yield "to the wire", typical(lambda: sequence_to_proto(spec).SerializeToString(), 3)
    message = sequence_to_proto(spec)
    yield "from the wire", typical(lambda: sequence_from_proto(message), 3)


def model_parts(engine: Engine, backend: str, num_tokens: int) -> Iterator[tuple[str, float]]:
    """Yield the parts of steps on a real model: attention reads the context, so a chunk and a step
    have the slope 1 from some length on."""
    rig = Rig(engine, num_tokens)
    rig.open(1, rig.spec)
    yield f"{backend}: last chunk of a prompt", rig.prefill()
    yield f"{backend}: decode", typical(lambda: rig.core.step(()), 5)


def measure(
    lengths: Sequence[int], parts: Callable[[int], Iterator[tuple[str, float]]]
) -> list[Slope]:
    """Measure all parts at each length."""
    found: dict[str, dict[int, float]] = {}
    for num_tokens in lengths:
        for part, taken_s in parts(num_tokens):
            found.setdefault(part, {})[num_tokens] = taken_s
    return [Slope(part, by_length) for part, by_length in found.items()]


def table(slopes: Sequence[Slope]) -> str:
    """One row per part: microseconds at each length, or nanoseconds per token, and the slope."""
    lengths = list(slopes[0].seconds)
    heads = [f"{n // 1024}K" if n < 1 << 20 else f"{n >> 20}M" for n in lengths]
    rows = [["part", "unit", *heads, "slope"], ["---"] * (len(lengths) + 3)]
    for slope in slopes:
        is_read = slope.part in PER_PROMPT
        times = [s / n * 1e9 if is_read else s * 1e6 for n, s in slope.seconds.items()]
        unit = "ns/token" if is_read else "us"
        rows.append([slope.part, unit, *(f"{t:,.0f}" for t in times), f"{slope.exponent:.2f}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process, nearly independent of other load."""
    begin_s = time.process_time()
    work()
    return time.process_time() - begin_s


def typical(work: Callable[[], object], num_times: int = _NUM_STEPS) -> float:
    """Median of seconds."""
    return median(seconds(work) for _ in range(num_times))


def _load(model: str, backend: str, longest: int) -> Engine:
    from engine.load import load_engine

    cache = CacheConfig(BLOCK_SIZE, num_blocks=longest // BLOCK_SIZE + 64)
    choice = ModelChoice(model, max_model_len=longest + 256, attention_backend=backend)
    return load_engine(EngineConfig(choice, cache, device=DeviceConfig(num_threads=1)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--model", help="folder or GGUF file; its context bounds the lengths")
    parser.add_argument("--attention-backend", nargs="+", default=["auto"], help="of the model")
    parser.add_argument("--model-lengths", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    started = now()
    # Discarded: pays the one-time costs of the process.
    measure([1024], host_parts)
    slopes = measure(arguments.lengths, host_parts)
    wrong = too_steep(slopes)
    tables = [table(slopes)]
    own: list[Slope] = []
    for backend in arguments.attention_backend if arguments.model else ():
        engine = _load(arguments.model, backend, max(arguments.model_lengths))
        own += measure(arguments.model_lengths, partial(model_parts, engine, backend))
    if own:
        tables.append(table(own))
        slopes += own
    data = {each.part: {"exponent": each.exponent, **each.seconds} for each in slopes}
    text = "\n\n".join(tables)
    publish(document_of("bench.context_slopes", started, data), arguments.json, lambda _: text)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
