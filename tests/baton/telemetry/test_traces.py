"""Traces of real requests through the services of all three kinds, as a collector sees them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import grpc.aio
import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from baton.client import AsyncClient, ChatMessage, SamplingParams
from baton.client.requests import generate_request
from baton.errors import BatonError, DeadlineExceeded
from baton.v1 import inference_pb2_grpc
from tests.support.live_tiers import BOX_MODEL, LiveSystem, live_system
from tests.support.metrics_page import fetch_metrics, free_ports
from tests.support.otlp_receiver import OtlpReceiver, SeenSpan

pytestmark = pytest.mark.slow

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
SLOW = {"oracle_step_ms": 5.0, "max_num_batched_tokens": 64}

#: Spans of the gateway that cover what goes on elsewhere.
OUTER = {"await prefill", "stream"}


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def coverage(root: SeenSpan, children: Iterable[SeenSpan]) -> float:
    """Share of `root` during which at least one of `children` lasts."""
    covered_ns, end_ns = 0, root.start_ns
    for span in sorted(children, key=lambda span: span.start_ns):
        start_ns = max(span.start_ns, end_ns)
        end_ns = max(end_ns, min(span.end_ns, root.end_ns))
        covered_ns += max(0, end_ns - start_ns)
    return covered_ns / (root.end_ns - root.start_ns)


async def test_each_request_is_one_trace_over_all_processes(collector: OtlpReceiver) -> None:
    async with live_system(1, 2, worker_options=SLOW) as system:
        prompts = [[index, *range(150)] for index in range(4)]
        await asyncio.gather(*(system.client.generate(p, greedy(40)) for p in prompts))
    traces = collector.traces()
    assert len(traces) == 4
    for spans in traces.values():
        (root,) = [span for span in spans if not span.parent_id]
        children = [span for span in spans if span is not root]
        assert {s.service for s in spans} == {"baton-gateway", "baton-prefill", "baton-decode"}
        ids = {span.span_id for span in spans}
        assert all(span.parent_id in ids for span in children)
        # The moments between two spans are short, and on a busy machine not so short; those that
        # are between processes are missing without the gateway's spans around others' work.
        assert coverage(root, children) >= 0.8
        assert coverage(root, [s for s in children if s.name not in OUTER]) >= 0.5
        check_spans(root, children)


def check_spans(root: SeenSpan, children: list[SeenSpan]) -> None:
    names = [span.name for span in children]
    assert root.name == "text_completion oracle"
    assert set(names) == {
        "tokenize",
        "queue",
        "reserve",
        "await prefill",
        "stream",
        "prefill queue",
        "prefill",
        "prefill chunk",
        "send",
        "transfer",
        "commit",
        "decode",
    }
    (prefill,) = [span for span in children if span.name == "prefill"]
    chunks = [span for span in children if span.name == "prefill chunk"]
    assert len(chunks) >= 3
    assert {span.parent_id for span in chunks} == {prefill.span_id}
    assert sum(chunk.attributes["baton.num_tokens"] for chunk in chunks) == 151
    (transfer,) = [span for span in children if span.name == "transfer"]
    states = [name for name, _ in transfer.events]
    assert states == ["offered", "reserved", "receiving", "committed"]
    moments = [at_ns for _, at_ns in transfer.events]
    assert moments == sorted(moments)
    assert [name for name, _ in root.events] == [
        "queued",
        "placed",
        "offered",
        "prefilled",
        "committed",
        "finished",
    ] or "committed" in [name for name, _ in root.events]
    assert root.attributes["gen_ai.usage.input_tokens"] == 151
    assert root.attributes["gen_ai.usage.output_tokens"] == 40
    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    assert not any(span.is_error for span in (root, *children))


async def _generate_with(
    system: LiveSystem, metadata: tuple[tuple[str, str], ...], num_tokens: int = 3
) -> None:
    prompt = [*range(1, num_tokens + 1)]
    request = generate_request(
        prompt, greedy(4), model="", priority=0, cache_salt="", add_special_tokens=True
    )
    async with grpc.aio.insecure_channel(system.gateway) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, metadata=metadata)
        while await call.read() is not grpc.aio.EOF:
            pass


async def test_a_clients_trace_goes_on_in_every_process(collector: OtlpReceiver) -> None:
    async with live_system() as system:
        await _generate_with(system, (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"),))
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    assert {span.service for span in collector.spans} >= {"baton-gateway", "baton-decode"}
    (root,) = [span for span in collector.spans if span.name.startswith("text_completion")]
    assert root.parent_id.hex() == PARENT_ID


async def test_the_clients_own_span_is_the_parent(collector: OtlpReceiver) -> None:
    flags = TraceFlags(TraceFlags.SAMPLED)
    parent = SpanContext(int(TRACE_ID, 16), int(PARENT_ID, 16), False, flags)
    async with live_system() as system:
        with use_span(NonRecordingSpan(parent)):
            await system.client.generate([1, 2, 3], greedy(4))
    (root,) = [span for span in collector.spans if span.name.startswith("text_completion")]
    assert (root.trace_id.hex(), root.parent_id.hex()) == (TRACE_ID, PARENT_ID)


async def test_a_tracestate_goes_with_the_trace_to_every_process(collector: OtlpReceiver) -> None:
    context = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"), ("tracestate", "a=1:x,b@c=2"))
    async with live_system() as system:
        await _generate_with(system, context, num_tokens=50)
    assert {span.service for span in collector.spans} >= {
        "baton-gateway",
        "baton-prefill",
        "baton-decode",
    }
    assert {span.trace_state for span in collector.spans} == {"a=1:x,b@c=2"}


async def test_what_a_client_does_not_sample_is_told_by_nobody(collector: OtlpReceiver) -> None:
    async with live_system() as system:
        await _generate_with(system, (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-00"),))
    assert collector.spans == []


@pytest.mark.parametrize("broken", ["", "nonsense", f"00-{'0' * 32}-{PARENT_ID}-01"])
async def test_a_broken_traceparent_begins_a_new_trace(
    collector: OtlpReceiver, broken: str
) -> None:
    async with live_system() as system:
        await _generate_with(system, (("traceparent", broken),))
    assert len(collector.traces()) == 1


@pytest.mark.parametrize(
    ("sampler", "argument", "num_traces"),
    [("always_off", "", 0), ("parentbased_traceidratio", "0", 0), ("always_on", "", 3)],
)
async def test_the_sampler_of_the_environment_decides(
    collector: OtlpReceiver,
    monkeypatch: pytest.MonkeyPatch,
    sampler: str,
    argument: str,
    num_traces: int,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    async with live_system() as system:
        for index in range(3):
            await system.client.generate([index, *range(40)], greedy(3))
    assert len(collector.traces()) == num_traces


async def test_a_trace_survives_preemption(collector: OtlpReceiver) -> None:
    # Slow, so that all have come before the first is done, on a busy machine, too.
    options = {**SLOW, "num_gpu_blocks_override": 40, "max_model_len": 150, "swap_space": 0.0}
    async with live_system(decode_options=options) as system:
        prompts = [[index, *range(20)] for index in range(8)]
        await asyncio.gather(*(system.client.generate(p, greedy(60)) for p in prompts))
    traces = collector.traces()
    assert len(traces) == len(prompts)
    preempted = [
        spans for spans in traces.values() if "preempted" in {e for s in spans for e, _ in s.events}
    ]
    assert preempted
    for spans in preempted:
        (root,) = [span for span in spans if not span.parent_id]
        assert "resumed" in {event for event, _ in root.events}
        assert coverage(root, [span for span in spans if span is not root]) >= 0.95
        assert len([span for span in spans if span.name == "decode"]) >= 2


async def test_a_request_that_fails_is_marked_in_every_span_that_it_ended(
    collector: OtlpReceiver,
) -> None:
    forever = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)
    async with live_system(worker_options={"oracle_step_ms": 5.0}) as system:
        with pytest.raises(DeadlineExceeded):
            await system.client.generate(list(range(20)), forever, timeout_s=0.4)
        await system.until_quiet()
    (spans,) = collector.traces().values()
    (root,) = [span for span in spans if not span.parent_id]
    (decode,) = [span for span in spans if span.name == "decode"]
    assert root.is_error
    assert root.attributes["error.type"] in {"DEADLINE_EXCEEDED", "CANCELLED"}
    assert decode.attributes["error.type"] == "CANCELLED"
    assert decode.events[-1][0] == "cancelled"


MARKER = "xyzzyplugh"


async def test_no_text_of_a_user_leaves_by_telemetry(
    collector: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    ports = free_ports(2)
    # Words pass a real model's tokenizer, and a real model answers.
    real = {
        "engine": "torch",
        "model": str(BOX_MODEL),
        "served_model_name": "oracle",
        "dtype": "float32",
        "num_threads": 1,
        "num_gpu_blocks_override": 256,
    }
    async with live_system(
        worker_options=real,
        decode_options={"metrics_port": ports[0], "metrics_compat": "vllm"},
        gateway_options={"metrics_port": ports[1], "metrics_compat": "vllm"},
    ) as system:
        answers, errors = await _talk(system.client)
        pages = [await fetch_metrics(port) for port in ports]
        await system.until_quiet()
    assert {span.name for span in collector.spans} >= {"prefill", "send", "transfer", "decode"}
    assert collector.metric_names
    exported = b"".join(collector.messages)
    told = "\n".join((*pages, *errors, *(record.getMessage() for record in caplog.records)))
    formatted = "\n".join(str(record.__dict__) for record in caplog.records)
    for secret in (MARKER, *(answer for answer in answers if len(answer) >= 8)):
        assert secret.encode() not in exported
        assert secret not in told
        assert secret not in formatted


async def _talk(client: AsyncClient) -> tuple[list[str], list[str]]:
    """Send the marker in every place where a request has text. The answers, and the messages of the
    errors."""
    stop = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=(MARKER,))
    prompts = (f"{MARKER} = 1\n" * 5, [ChatMessage("user", f"{MARKER} " * 3)])
    answers = [(await client.generate(prompt, stop)).text for prompt in prompts]
    assert any(len(answer) >= 8 for answer in answers)
    bad = (
        (f"{MARKER} " * 3000, SamplingParams(max_tokens=4)),
        (MARKER, SamplingParams(max_tokens=4, temperature=float("nan"))),
        (MARKER, SamplingParams(max_tokens=4, stop=(MARKER * 200,))),
        (f"\ud800{MARKER}", SamplingParams(max_tokens=4)),
    )
    messages = []
    for prompt, params in bad:
        with pytest.raises((BatonError, ValueError)) as raised:
            await client.generate(prompt, params)
        messages.append(str(raised.value))
    return answers, messages
