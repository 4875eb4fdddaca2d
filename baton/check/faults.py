"""`baton check --faults`: kills and freezes the workers and gateways that it has started for the
user's model, under streams of every kind, and reports which promises held."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baton.check.doors import Door, SdkDoor, SseDoor
from baton.check.fault_load import (
    FaultResult,
    Load,
    StreamRecord,
    leaked_blocks,
    load_through_faults,
    result_of,
    results_by_fault,
)
from baton.check.process_faults import PROCESS_FAULTS, Fault, Target, TargetT
from baton.check.run import Shape, cluster_of, reference
from baton.client import AsyncClient, SamplingParams

#: Longer than in a plain check, so that faults hit streams in the middle.
MAX_TOKENS = 256
CONCURRENCY = 16
#: Consecutive client retries, enough for a gateway's start.
MAX_RETRIES = 10
#: Prompt lengths, in tokens, that separate the groups of results.
PROMPT_STEPS = (64, 256)

#: Two workers per tier, with different block sizes and small chunks.
SHAPE = Shape(
    "2+2 workers",
    {
        "prefill_block_size": 32,
        "decode_block_size": 8,
        "max_num_batched_tokens": 64,
        "num_prefill_workers": 2,
        "num_decode_workers": 2,
        "drain_timeout_s": 5,
    },
    CONCURRENCY,
)


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """A request. right: the tokens of each choice according to one process, if known."""

    prompt: tuple[int, ...]
    params: SamplingParams
    right: tuple[tuple[int, ...], ...] | None
    model: str = ""


@dataclass(frozen=True, slots=True)
class FaultVerdict:
    """Result for promises 1 to 3 of the README.

    differences: streams with a wrong token.
    disorders: streams with a lost or repeated token, or with output after the end.
    errors: streams that ended with an error. Each is listed with its fault.
    num_leaked_blocks: held 10 s after the last stream.
    results: by fault. by_prompt, by_door: all streams with a fault, by prompt length, and by the
    way in which they were sent.
    """

    num_streams: int
    differences: tuple[str, ...]
    disorders: tuple[str, ...]
    errors: tuple[str, ...]
    num_leaked_blocks: int
    results: tuple[FaultResult, ...]
    by_prompt: tuple[FaultResult, ...]
    by_door: tuple[FaultResult, ...]

    @property
    def has_held(self) -> bool:
        return not (self.differences or self.disorders or self.errors or self.num_leaked_blocks)


async def check_faults(
    options: Mapping[str, object],
    *,
    num_requests: int,
    num_rounds: int,
    max_hours: float,
    seed: int,
    on_fault: Callable[[str, int], None],
    faults: Sequence[Fault[Target]] = PROCESS_FAULTS,
    num_streams: int = 0,
) -> FaultVerdict:
    """Run streams of `num_requests` different requests repeatedly, by all doors, while all faults
    occur in turn, for `num_rounds` rounds and until `num_streams` have ended; no round begins after
    `max_hours` hours. on_fault: receives each ended fault, and the number of affected streams so
    far."""
    known = await known_requests(options, num_requests, seed, MAX_TOKENS)
    async with (
        cluster_of(options, SHAPE) as cluster,
        AsyncClient(cluster.address, max_retries=MAX_RETRIES) as client,
    ):
        end_s = time.monotonic() + max_hours * 3600
        return await run_faults(
            known,
            client,
            faults,
            lambda number: Target(cluster, number % 2, 1 - number % 2),
            doors=(
                SdkDoor(client),
                SseDoor(lambda: cluster.http_address, by_event_id=True),
                SseDoor(lambda: cluster.http_address, by_event_id=False),
            ),
            is_enough=lambda done, num_ended: (
                (done >= num_rounds and num_ended >= num_streams) or time.monotonic() > end_s
            ),
            concurrency=CONCURRENCY,
            seed=seed,
            on_fault=on_fault,
        )


async def known_requests(
    options: Mapping[str, object], num_requests: int, seed: int, max_tokens: int
) -> list[KnownRequest]:
    """Requests of all kinds, with the tokens of one process."""
    requests, outputs = await reference(options, num_requests, seed, max_tokens)
    return [
        KnownRequest(request.prompt, request.params, right, request.model)
        for request, right in zip(requests, outputs, strict=True)
    ]


async def run_faults(
    known: Sequence[KnownRequest],
    client: AsyncClient,
    faults: Sequence[Fault[TargetT]],
    target_of: Callable[[int], TargetT],
    *,
    doors: Sequence[Door] = (),
    is_enough: Callable[[int, int], bool],
    concurrency: int,
    seed: int,
    on_fault: Callable[[str, int], None],
) -> FaultVerdict:
    """Run streams of `known` requests repeatedly, by all doors, while the faults occur in turn.
    target_of: see load_through_faults. is_enough: of rounds and of streams that have ended.
    on_fault: see check_faults."""
    records: list[StreamRecord[KnownRequest]] = []
    rng = random.Random(seed)
    load = Load(client, lambda rng: rng.choice(known), rng, concurrency, records.append, doors)
    num_rounds = await load_through_faults(
        load,
        faults,
        target_of,
        client,
        lambda done: is_enough(done, len(records)),
        lambda fault: on_fault(fault.name, load.num_faulted),
    )
    num_leaked = await leaked_blocks(client)
    for record in records:
        record.compare(record.request.right)
    return _verdict(records, faults, num_rounds, num_leaked)


def _verdict(
    records: Sequence[StreamRecord[KnownRequest]],
    faults: Sequence[Fault[TargetT]],
    num_rounds: int,
    num_leaked: int,
) -> FaultVerdict:
    def all_of(what: Callable[[StreamRecord[KnownRequest]], str]) -> tuple[str, ...]:
        return tuple(
            f"{record.fault} ({record.door}): {what(record)}" for record in records if what(record)
        )

    faulted = [record for record in records if record.fault]
    return FaultVerdict(
        len(records),
        all_of(lambda record: record.difference),
        all_of(lambda record: record.disorder),
        all_of(lambda record: record.error),
        num_leaked,
        tuple(results_by_fault(faults, num_rounds, records)),
        tuple(_by_prompt(faulted)),
        tuple(
            result_of(name, 0, [record for record in faulted if record.door == name])
            for name in sorted({record.door for record in records})
        ),
    )


def _by_prompt(records: Sequence[StreamRecord[KnownRequest]]) -> list[FaultResult]:
    results = []
    bounds = (0, *PROMPT_STEPS)
    for least, most in zip(bounds, (*PROMPT_STEPS, None), strict=True):
        of_length = [
            record
            for record in records
            if least < len(record.request.prompt) <= (most or sys.maxsize)
        ]
        name = f"prompts of {least + 1} to {most}" if most else f"prompts over {least}"
        results.append(result_of(f"{name} tokens", 0, of_length))
    return results
