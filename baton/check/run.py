"""Runs the same requests through one process and through two tiers of several shapes, and compares
all tokens."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from baton.check.requests import MAX_TOKENS, CheckRequest, draw_requests, with_adapters
from baton.client import AsyncClient
from baton.config import ServeOptions
from baton.supervisor import Cluster

#: By request: the tokens of all its choices, concatenated.
Outputs = tuple[tuple[int, ...], ...]
#: By request: the tokens of each of its choices.
Choices = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """A way to serve the model: name, options, and number of concurrent requests."""

    name: str
    options: Mapping[str, object]
    concurrency: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Comparison of one shape's outputs. first_difference: (request, token index) or None."""

    shape: Shape
    num_equal: int
    num_requests: int
    num_tokens: int
    num_handed_over: int
    """Requests with a KV transfer between the tiers; the decode worker had the other prompts
    cached."""
    seconds: float
    first_difference: tuple[int, int] | None

    @property
    def is_equal(self) -> bool:
        return self.num_equal == self.num_requests


#: The reference: one process, one request at a time, no prefix cache.
REFERENCE = Shape("one process", {"colocated": True, "enable_prefix_caching": False}, 1)


def split_shapes(
    transports: Sequence[str], degrees: Mapping[str, int] = MappingProxyType({})
) -> tuple[Shape, ...]:
    """Two-tier shapes: each transport twice, with equal and different block sizes, small chunks,
    and several workers.

    degrees: of parallelism of the tiers, by option.
    """
    mixes = itertools.cycle([(16, 16, 2048, 1), (32, 8, 64, 1), (8, 32, 160, 2)])
    return tuple(
        _shape(transport, degrees, *next(mixes)) for _ in range(2) for transport in transports
    )


def _shape(
    transport: str,
    degrees: Mapping[str, int],
    prefill_block: int,
    decode_block: int,
    chunk: int,
    num_workers: int,
) -> Shape:
    shared = "".join(
        f", {name.removesuffix('_size').replace('_', ' ')}" + ("" if size is True else f" {size}")
        for name, size in degrees.items()
        if size is True or size > 1
    )
    return Shape(
        name=(
            f"{transport}, blocks {prefill_block}->{decode_block}, chunk {chunk}, "
            f"{num_workers}+{num_workers} workers{shared}"
        ),
        options={
            "kv_transport": transport,
            "prefill_block_size": prefill_block,
            "decode_block_size": decode_block,
            "max_num_batched_tokens": chunk,
            "num_prefill_workers": num_workers,
            "num_decode_workers": num_workers,
            **degrees,
        },
        concurrency=32,
    )


async def check(
    options: Mapping[str, object],
    shapes: Sequence[Shape],
    *,
    num_requests: int,
    seed: int,
    on_verdict: Callable[[Verdict], None],
    is_long: bool = False,
) -> bool:
    """Return whether every shape's outputs equal the reference's. options: for all clusters; a
    shape's own override them. is_long: prompts up to the model's length."""
    requests, expected = await reference(options, num_requests, seed, is_long=is_long)
    is_equal = True
    for shape in shapes:
        verdict = await check_shape(options, shape, requests, expected)
        on_verdict(verdict)
        is_equal = is_equal and verdict.is_equal
    return is_equal


async def check_shape(
    options: Mapping[str, object],
    shape: Shape,
    requests: Sequence[CheckRequest],
    expected: Choices,
) -> Verdict:
    """Run the requests in a cluster of this shape. expected: see reference."""
    start = time.monotonic()
    async with cluster_of(options, shape) as cluster, AsyncClient(cluster.address) as client:
        choices, num_handed_over = await _run_all(client, requests, shape.concurrency)
    seconds = time.monotonic() - start
    return _compare(shape, _flat(expected), _flat(choices), num_handed_over, seconds)


async def reference(
    options: Mapping[str, object],
    num_requests: int,
    seed: int,
    max_tokens: int = MAX_TOKENS,
    *,
    is_long: bool = False,
) -> tuple[tuple[CheckRequest, ...], Choices]:
    """Draw requests of at most `max_tokens` per choice, and run them in one process, one at a
    time."""
    async with cluster_of(options, REFERENCE) as cluster, AsyncClient(cluster.address) as client:
        model = await client.model()
        requests = draw_requests(
            *(num_requests, model.vocab_size, model.max_model_len, seed, max_tokens),
            is_long=is_long,
        )
        adapters = [each.name for each in await client.models() if each.parent]
        requests = with_adapters(requests, adapters, seed)
        choices, _ = await _run_all(client, requests, REFERENCE.concurrency)
    return requests, choices


def cluster_of(options: Mapping[str, object], shape: Shape) -> Cluster:
    """The cluster of a shape, not started; the shape's options override others."""
    return Cluster(ServeOptions.model_validate({"port": 0, **options, **shape.options}))


async def _run_all(
    client: AsyncClient, requests: Sequence[CheckRequest], concurrency: int
) -> tuple[Choices, int]:
    """Return the outputs in the order of the requests, and the number of KV transfers."""
    places = asyncio.Semaphore(concurrency)

    async def run(request: CheckRequest) -> tuple[tuple[tuple[int, ...], ...], bool]:
        async with places:
            done = await client.generate(request.prompt, request.params, model=request.model)
            tokens = tuple(choice.token_ids for choice in done.choices)
            return tokens, done.timing.transfer_bytes > 0

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(request)) for request in requests]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the first failure has cancelled the others
    results = [task.result() for task in tasks]
    return tuple(tokens for tokens, _ in results), sum(moved for _, moved in results)


def _flat(choices: Choices) -> Outputs:
    return tuple(tuple(itertools.chain.from_iterable(each)) for each in choices)


def _compare(
    shape: Shape, expected: Outputs, outputs: Outputs, num_handed_over: int, seconds: float
) -> Verdict:
    different = [
        index
        for index, pair in enumerate(zip(expected, outputs, strict=True))
        if pair[0] != pair[1]
    ]
    return Verdict(
        shape=shape,
        num_equal=len(expected) - len(different),
        num_requests=len(expected),
        num_tokens=sum(map(len, outputs)),
        num_handed_over=num_handed_over,
        seconds=seconds,
        first_difference=(
            (different[0], _first_difference(expected[different[0]], outputs[different[0]]))
            if different
            else None
        ),
    )


def _first_difference(expected: Sequence[int], actual: Sequence[int]) -> int:
    pairs = zip(expected, actual, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))
