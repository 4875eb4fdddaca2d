"""What the first token waited for: the parts add up, whatever happens to the request, and a
bypassed split is reported."""

from __future__ import annotations

import asyncio
import itertools
import logging
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.client import SamplingParams
from baton.telemetry import Phase, RequestEvent, no_telemetry
from baton.telemetry.rate_limit import RateLimit
from baton.types import FinishReason
from baton.v1 import inference_pb2
from gateway.intake.request import TextOptions, ValidatedRequest
from gateway.request.driver import RequestDriver, outputs_of
from gateway.routing.fleet import WorkerState
from gateway.telemetry.recorder import WARN_INTERVAL_S, GatewayRecorder
from gateway.telemetry.timing import Timeline
from tests.support.gateway_world import Client, gateway_world, make_spec
from tests.support.live_tiers import live_system
from tests.support.virtual_loop import run_virtual

moments = st.lists(
    st.tuples(st.sampled_from(list(Phase)), st.floats(0, 10, allow_nan=False)), max_size=12
)


def parts_of(message: inference_pb2.TimeToFirstToken) -> float:
    return float(sum(value for _, value in message.ListFields()))


@given(moments, st.floats(0, 10), st.floats(0, 20_000))
def test_parts_add_up_whatever_the_phases(
    steps: list[tuple[Phase, float]], last_s: float, reported_ms: float
) -> None:
    timeline, now_s = Timeline(100.0), 100.0
    for phase, wait_s in steps:
        now_s += wait_s
        timeline.enter(phase, now_s)
    now_s += last_s
    timeline.on_prefilled(reported_ms, now_s)
    timeline.on_tokens(now_s)
    timeline.on_token_sent(now_s)
    timeline.on_token_sent(now_s + 5)
    proto = timeline.to_proto(now_s + 5)
    assert parts_of(proto.first_token) == pytest.approx(proto.time_to_first_token_ms, abs=1e-6)
    assert all(value >= -1e-9 for _, value in proto.first_token.ListFields())
    spans = list(timeline.intervals(now_s + 5))
    assert spans[0][1] == 100.0
    assert spans[-1][2] == now_s + 5
    assert all(a[2] == b[1] for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("num_choices", [1, 2, 5])
def test_time_per_token_is_that_of_one_choice(num_choices: int) -> None:
    async def main() -> None:
        async with gateway_world() as world:
            now_s = asyncio.get_running_loop().time()
            for num_returned, is_streamed in ((num_choices, True), (1, num_choices == 1)):
                spec = make_spec("a", max_tokens=11, num_choices=num_choices)
                request = ValidatedRequest(spec, TextOptions(), num_returned=num_returned)
                timeline = Timeline(now_s)
                outputs, write = outputs_of(request, world.deps.decodings), Client().write
                driver = RequestDriver(world.deps, request, outputs, write, now_s + 600, timeline)
                await driver.run()
                assert timeline.num_output_tokens == 11 * num_choices
                mean_s = timeline.time_per_token_s()
                assert mean_s == (pytest.approx(0.01, rel=0.2) if is_streamed else None)

    run_virtual(main())


def test_parts_of_a_request_that_met_everything() -> None:
    """Queued behind others, preempted and resumed, over workers with queues."""

    async def main() -> None:
        async with gateway_world(num_decodes=1, num_blocks=24) as world:
            specs = [
                make_spec(f"r{i}", range(10, 22), max_tokens=30, arrival_ns=i) for i in range(6)
            ]
            clients = await asyncio.gather(*(world.generate(spec) for spec in specs))
            timings = [client.last.timing for client in clients]
            for timing in timings:
                total_ms = timing.time_to_first_token_ms
                assert parts_of(timing.first_token) == pytest.approx(total_ms, abs=1e-6)
                assert timing.first_token.transfer_exposed_ms == 0.0
            assert any(timing.num_resumes for timing in timings)
            assert any(timing.first_token.queue_ms > 0 for timing in timings)
            assert all(timing.first_token.prefill_ms > 0 for timing in timings)

    run_virtual(main())


@pytest.mark.slow
async def test_parts_of_real_services_name_the_prefill() -> None:
    async with live_system(worker_options={"oracle_step_ms": 20.0}) as system:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        for prompt in (list(range(64)), [1], [*range(64), 7]):
            timing = (await system.client.generate(prompt, params)).timing
            parts = timing.first_token
            total_ms = (
                parts.tokenize_ms
                + parts.queue_ms
                + parts.reserve_ms
                + parts.prefill_ms
                + parts.transfer_exposed_ms
                + parts.first_step_ms
            )
            assert total_ms == pytest.approx(timing.time_to_first_token_ms, abs=0.01)
            assert parts.prefill_ms >= 20.0


def test_a_prompt_computed_in_the_wrong_tier_is_noticed() -> None:
    async def main() -> None:
        async with gateway_world(num_prefills=1, max_local_prefill_tokens=4) as world:

            async def bypassed(request_id: str, num_tokens: int) -> int:
                now_s = asyncio.get_running_loop().time()
                timeline = Timeline(now_s)
                spec = make_spec(request_id, range(num_tokens))
                request = ValidatedRequest(spec, TextOptions())
                outputs, write = outputs_of(request, world.deps.decodings), Client().write
                driver = RequestDriver(world.deps, request, outputs, write, now_s + 600, timeline)
                await driver.run()
                return timeline.num_bypassed_tokens

            assert await bypassed("a", 12) == 0, "handed over"
            world.fleet.leave("p0:1", WorkerState.UNREACHABLE, "gone")
            assert await bypassed("b", 12) == 12, "prefill workers were named, and none was ready"
            assert await bypassed("c", 4) == 0, "short enough for the decode worker"

    run_virtual(main())


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_bypasses_are_reported_but_not_with_every_request(caplog: pytest.LogCaptureFixture) -> None:
    clock = _Clock()
    recorder = GatewayRecorder(no_telemetry(), clock)

    def request(num_bypassed_tokens: int) -> None:
        with recorder.recording((), "m", is_chat=False) as record:
            record.timeline.num_bypassed_tokens = num_bypassed_tokens
            record.timeline.finish = FinishReason.LENGTH

    with caplog.at_level(logging.WARNING):
        request(0)
        assert not caplog.records
        for _ in range(5):
            request(100)
        clock.now_s += WARN_INTERVAL_S
        request(300)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("1 requests")
    assert second.startswith("5 requests")
    assert "300 tokens" in second


def test_a_rate_limit_counts_all_that_it_held_back() -> None:
    clock = _Clock()
    limit = RateLimit(1.0, clock)
    taken = []
    for _ in range(40):
        clock.now_s += 0.1
        taken.append(limit.take())
    reported = [number for number in taken if number]
    assert 3 <= len(reported) <= 4
    assert sum(reported) <= 40
    assert taken[0] == 1


def test_a_cancelled_request_ends_with_that_event() -> None:
    clock = _Clock()
    recorder = GatewayRecorder(no_telemetry(), clock)
    with suppress(asyncio.CancelledError), recorder.recording((), "m", is_chat=True) as record:
        raise asyncio.CancelledError
    assert [event for event, _ in record.timeline.events] == [RequestEvent.CANCELLED]
