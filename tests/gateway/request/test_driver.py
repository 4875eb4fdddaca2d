"""One request's way through the gateway, over fake workers, under a virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import (
    BatonError,
    ClientStalled,
    DeadlineExceeded,
    EngineFault,
    HandoffFailed,
    InvalidRequest,
    NoWorkers,
    Overloaded,
    WorkerLost,
)
from baton.events import Tokens
from baton.types import BlockCounts, Sample, WorkerLoad
from baton.v1 import sampling_pb2
from gateway.intake.request import TextOptions
from gateway.routing.dispatcher import Dispatcher
from tests.support.fake_workers import expected_output, expected_outputs, text_of
from tests.support.gateway_world import Chunk, Client, World, in_world, make_spec


def test_a_request_passes_both_tiers_and_comes_out_whole() -> None:
    async def test(world: World) -> None:
        spec = make_spec("a")
        client = await world.generate(spec)
        assert client.token_ids == expected_output(spec)
        assert client.text == text_of(expected_output(spec))
        assert client.last.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
        assert client.last.usage.prompt_tokens == 5
        assert client.last.usage.completion_tokens == 8
        timing = client.last.timing
        assert (timing.prefill_worker, timing.decode_worker) == ("p0:1", "d0:1")
        assert timing.transfer_bytes == 100
        assert timing.prefill_ms == pytest.approx(5.0)
        assert timing.time_to_first_token_ms == pytest.approx(5.0)
        assert timing.total_ms == pytest.approx(5.0 + timing.decode_ms)
        assert timing.decode_ms > 10.0 * 6
        assert timing.num_resumes == 0
        # The first token comes from the prefill worker, before the KV is there.
        assert list(client.chunks[0].token_ids) == expected_output(spec)[:1]

    in_world(test)


@pytest.mark.parametrize("num_choices", [1, 3])
def test_tokens_gather_while_requests_are_refused_and_first_and_last_ones_do_not(
    num_choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(world: World) -> None:
        took_s: dict[bool, tuple[float, float]] = {}
        num_chunks: dict[bool, int] = {}
        for is_refusing in (False, True):
            monkeypatch.setattr(Dispatcher, "is_refusing", is_refusing)
            spec = make_spec(f"a-{is_refusing}", max_tokens=40, num_choices=num_choices)
            begin_s = asyncio.get_running_loop().time()
            client = await world.generate(spec, Client())
            assert client.outputs() == expected_outputs(spec)
            took_s[is_refusing] = client.times_s[0] - begin_s, client.times_s[-1] - begin_s
            num_chunks[is_refusing] = len(client.chunks)
        assert took_s[True] == pytest.approx(took_s[False])
        # Steps take 10 ms.
        assert num_chunks[False] > 30 * num_choices
        assert num_chunks[True] <= num_chunks[False] / 3

    in_world(test)


def test_one_wanted_token_needs_no_decode_worker() -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", max_tokens=1)
        client = await world.generate(spec)
        assert client.token_ids == expected_output(spec)
        assert world.decodes[0].num_opens == 0
        assert client.last.timing.decode_worker == ""

    in_world(test)


def test_without_a_prefill_worker_the_decode_worker_does_it_all() -> None:
    async def test(world: World) -> None:
        spec = make_spec("a")
        client = await world.generate(spec)
        assert client.token_ids == expected_output(spec)
        assert client.last.timing.prefill_worker == ""

    in_world(test, num_prefills=0)


def test_a_colocated_decode_worker_needs_no_prefill_worker() -> None:
    async def test(world: World) -> None:
        spec = make_spec("a")
        assert (await world.generate(spec)).token_ids == expected_output(spec)
        assert world.prefills[0].num_prefills == 0

    in_world(test, max_local_prefill_tokens=200)


def test_an_output_that_ends_with_the_prefill_leaves_nothing_on_the_decode_worker() -> None:
    async def test(world: World) -> None:
        world.prefills[0].finish_early = True
        client = await world.generate(make_spec("a"))
        assert len(client.token_ids) == 1
        assert client.last.finish_reason == sampling_pb2.FINISH_REASON_STOP

    in_world(test)


def test_tokens_of_the_decode_worker_wait_for_the_first_one() -> None:
    async def test(world: World) -> None:
        world.prefills[0].answer_delay_s = 0.035  # some steps later than the commit
        spec = make_spec("a")
        client = await world.generate(spec)
        assert client.token_ids == expected_output(spec)

    in_world(test)


def test_an_output_can_end_before_the_first_token_is_told() -> None:
    async def test(world: World) -> None:
        world.prefills[0].answer_delay_s = 1.0
        spec = make_spec("a")
        client = await world.generate(spec)
        assert client.token_ids == expected_output(spec)
        assert len(client.chunks) == 1

    in_world(test)


class DirectClient(Client):
    """Takes each chunk at once, in the callback that brought it; fails at the chunk `fails_at`."""

    fails_at = -1

    def write(self, chunk: Chunk) -> None:  # type: ignore[override]
        if len(self.chunks) == self.fails_at:
            raise LookupError("a fault in the form of the answer")
        self.chunks.append(chunk)


def test_a_piece_that_cannot_be_written_ends_its_request_alone() -> None:
    async def test(world: World) -> None:
        broken = DirectClient()
        broken.fails_at = 3
        others = [
            asyncio.create_task(world.generate(make_spec(f"o{i}"), DirectClient()))
            for i in range(3)
        ]
        with pytest.raises(LookupError, match="form of the answer"):
            await world.generate(make_spec("broken", max_tokens=60), broken)
        for number, other in enumerate(others):
            assert (await other).token_ids == expected_output(make_spec(f"o{number}"))
        assert len(broken.chunks) == 3

    in_world(test)


@pytest.mark.parametrize("after_s", [0.0, 0.004, 0.008, 0.012, 0.03, 0.05, 0.07, 0.2])
@pytest.mark.parametrize("queued_behind", [0, 9])
def test_a_cancel_in_any_state_frees_everything(after_s: float, queued_behind: int) -> None:
    async def test(world: World) -> None:
        others = [
            asyncio.create_task(world.generate(make_spec(f"o{i}"))) for i in range(queued_behind)
        ]
        request = asyncio.create_task(
            world.generate(make_spec("a", arrival_ns=1, max_tokens=60), Client(read_s=0.001))
        )
        await asyncio.sleep(after_s)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        for number, other in enumerate(others):
            assert (await other).token_ids == expected_output(make_spec(f"o{number}"))

    in_world(test)


@pytest.mark.parametrize("after_s", [0.003, 0.008, 0.05])
def test_a_cancel_reaches_both_tiers_at_once(after_s: float) -> None:
    async def test(world: World) -> None:
        request = asyncio.create_task(world.generate(make_spec("a", [1] * 6, max_tokens=60)))
        await asyncio.sleep(after_s)
        assert world.decodes[0].num_sequences == 1
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await asyncio.sleep(1e-6)  # far less than a step
        assert world.decodes[0].num_sequences == 0
        assert world.prefills[0].num_in_flight == 0

    in_world(test)


def test_a_deferred_sequence_waits_at_its_old_rank() -> None:
    async def test(world: World) -> None:
        decode = world.decodes[0]
        # Somebody else takes all memory, and the gateway does not know yet.
        taken, decode._num_free = decode._num_free, 0
        spec = make_spec("a")
        request = asyncio.create_task(world.generate(spec))
        await asyncio.sleep(0.05)
        assert decode.num_deferrals == 1, "one try per load report"
        assert not request.done()
        decode._num_free = taken
        decode._report()
        assert (await request).token_ids == expected_output(spec)

    in_world(test)


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", max_tokens=30)
        client = Client()
        request = asyncio.create_task(world.generate(spec, client))
        for _ in range(5):
            await asyncio.sleep(0.05)
            world.decodes[0].preempt_all()
        await request
        assert client.token_ids == expected_output(spec)
        assert client.text == text_of(expected_output(spec))
        assert client.last.timing.num_resumes == 5, "preemptions are not limited"
        lengths = [len(opened.output_token_ids) for opened in world.decodes[0].specs]
        assert lengths == sorted(set(lengths)), "each placement goes on from where the last one was"

    in_world(test)


@pytest.mark.parametrize("after_s", [0.001, 0.004, 0.008, 0.012, 0.03, 0.05])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_stream_outlives_a_worker(after_s: float, victim: str) -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", max_tokens=12)
        client = Client()
        request = asyncio.create_task(world.generate(spec, client))
        await asyncio.sleep(after_s)
        (world.prefills if victim == "prefill" else world.decodes)[0].go_down()
        await request
        assert client.token_ids == expected_output(spec)
        assert client.text == text_of(expected_output(spec))

    in_world(test, num_prefills=2, num_decodes=2)


@pytest.mark.parametrize("tier", ["prefill", "decode"])
def test_refusals_by_workers_that_drain_count_for_nothing(tier: str) -> None:
    """However many there are: they are no failures. Nobody is asked again before he has reported
    his load."""

    async def test(world: World) -> None:
        workers = world.prefills if tier == "prefill" else world.decodes
        for worker in workers[:-1]:
            worker.is_draining = True
        last = f"{'p' if tier == 'prefill' else 'd'}{len(workers) - 1}:1"
        world.fleet.report(last, WorkerLoad(is_draining=True))
        client = Client()
        request = asyncio.create_task(world.generate(make_spec("a"), client))
        await asyncio.sleep(0.05)
        assert not client.chunks
        for number, link in enumerate(worker.links[-1] for worker in workers):
            assert len(link.specs) == (number < len(workers) - 1), "each was asked once"
        world.fleet.report(last, WorkerLoad(blocks=BlockCounts(64, 0, 0)))
        await request
        assert client.token_ids == expected_output(make_spec("a"))
        assert client.last.timing.num_resumes == 0

    in_world(test, num_prefills=6, num_decodes=6)


def test_the_only_decode_worker_may_come_back() -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", max_tokens=20)
        request = asyncio.create_task(world.generate(spec))
        await asyncio.sleep(0.08)
        world.decodes[0].go_down()
        await asyncio.sleep(5.0)
        world.decodes[0].come_up()
        assert (await request).token_ids == expected_output(spec)

    in_world(test)


def test_a_decode_worker_that_stays_away_ends_the_stream() -> None:
    async def test(world: World) -> None:
        request = asyncio.create_task(world.generate(make_spec("a", max_tokens=20)))
        await asyncio.sleep(0.08)
        world.decodes[0].go_down()
        with pytest.raises(WorkerLost) as caught:
            await request
        assert caught.value.request_id == "a"
        with pytest.raises(NoWorkers):
            await world.generate(make_spec("b"))

    in_world(test)


def test_failures_are_outlived_three_times() -> None:
    async def test(world: World, num_failures: int) -> None:
        spec = make_spec("a", max_tokens=30)
        request = asyncio.create_task(world.generate(spec))
        for _ in range(num_failures):
            await asyncio.sleep(0.05)
            world.decodes[0].fail("HANDOFF_FAILED", is_retriable=True)
        if num_failures > 3:
            with pytest.raises(HandoffFailed):
                await request
        else:
            client = await request
            assert client.token_ids == expected_output(spec)
            assert client.last.timing.num_resumes == num_failures

    in_world(lambda world: test(world, 3))
    in_world(lambda world: test(world, 4))


@pytest.mark.parametrize("reason", ["ENGINE_FAULT", "a reason from the future"])
def test_a_fault_of_the_request_is_not_tried_again(reason: str) -> None:
    async def test(world: World) -> None:
        request = asyncio.create_task(world.generate(make_spec("a", max_tokens=30)))
        await asyncio.sleep(0.05)
        world.decodes[0].fail(reason, is_retriable=False)
        with pytest.raises(EngineFault):
            await request

    in_world(test)


def test_equal_tokens_that_come_twice_are_sent_once() -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", max_tokens=20)
        output = expected_output(spec)
        client = Client()
        request = asyncio.create_task(world.generate(spec, client))
        await asyncio.sleep(0.08)
        world.decodes[0].emit_all(Tokens(1, tuple(map(Sample, output[1:3]))))
        await request
        assert client.token_ids == output

    in_world(test)


@pytest.mark.parametrize("event", [Tokens(1, (Sample(96),)), Tokens(19, (Sample(1),))])
def test_a_changed_token_or_a_gap_is_a_fault(event: Tokens) -> None:
    async def test(world: World) -> None:
        client = Client()
        request = asyncio.create_task(world.generate(make_spec("a", max_tokens=20), client))
        await asyncio.sleep(0.08)
        world.decodes[0].emit_all(event)
        with pytest.raises(EngineFault):
            await request
        assert (
            client.token_ids
            == expected_output(make_spec("a", max_tokens=20))[: len(client.token_ids)]
        )

    in_world(test)


def test_a_slow_client_gets_fewer_and_longer_chunks() -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", max_tokens=60)
        client = await world.generate(spec, Client(read_s=0.2))
        assert client.token_ids == expected_output(spec)
        assert len(client.chunks) < 8

    in_world(test)


def test_a_client_that_stops_reading_is_let_go() -> None:
    async def test(world: World) -> None:
        with pytest.raises(ClientStalled):
            await world.generate(make_spec("a", max_tokens=60), Client(read_s=100.0))
        assert asyncio.get_running_loop().time() < 31.0

    in_world(test)


@pytest.mark.parametrize("timeout_s", [0.0, 0.004, 0.01, 0.05])
def test_a_deadline_is_kept_in_any_state(timeout_s: float) -> None:
    async def test(world: World) -> None:
        started_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded) as caught:
            await world.generate(make_spec("a", max_tokens=60), timeout_s=timeout_s)
        assert asyncio.get_running_loop().time() == pytest.approx(started_s + timeout_s)
        assert caught.value.request_id == "a"

    in_world(test)


def test_a_deadline_is_kept_while_the_client_does_not_read() -> None:
    async def test(world: World) -> None:
        with pytest.raises(DeadlineExceeded):
            await world.generate(make_spec("a"), Client(read_s=100.0), timeout_s=1.0)

    in_world(test)


def test_an_opening_without_an_answer_is_tried_elsewhere() -> None:
    async def test(world: World) -> None:
        for decode in world.decodes:
            decode.is_mute = True
        request = asyncio.create_task(world.generate(make_spec("a")))
        await asyncio.sleep(1.0)
        for decode in world.decodes:
            decode.is_mute = False
        client = await request
        assert client.token_ids == expected_output(make_spec("a"))
        assert client.last.timing.num_resumes == 1

    in_world(test, num_decodes=2)


def test_a_full_queue_says_when_to_come_back() -> None:
    async def test(world: World) -> None:
        running = []
        for number in range(11):  # eight that run, three that wait
            spec = make_spec(f"r{number}", max_tokens=50)
            running.append(asyncio.create_task(world.generate(spec)))
            await asyncio.sleep(0.01)
        with pytest.raises(Overloaded) as caught:
            await world.generate(make_spec("late"))
        assert (caught.value.retry_after_s or 0) >= 1.0
        await asyncio.gather(*running)

    in_world(test, max_queue_size=3)


def test_what_no_worker_can_hold_is_refused_and_holds_nobody_up() -> None:
    async def test(world: World) -> None:
        big = asyncio.create_task(world.generate(make_spec("big", prompt=[1] * 100, max_tokens=2)))
        small = asyncio.create_task(world.generate(make_spec("small", arrival_ns=1)))
        with pytest.raises(InvalidRequest):
            await big
        assert (await small).token_ids == expected_output(make_spec("small"))

    in_world(test, num_blocks=20)


@pytest.mark.parametrize("tokens_per_step", [1, 3, 50])
@pytest.mark.parametrize("read_s", [0.0, 0.05])
def test_a_stop_string_ends_the_output_at_the_token_that_completes_it(
    tokens_per_step: int, read_s: float
) -> None:
    async def test(world: World) -> None:
        world.decodes[0].tokens_per_step = tokens_per_step
        spec = make_spec("a", max_tokens=60)
        output = expected_output(spec)
        text = text_of(output)
        client = Client(read_s=read_s)
        await world.generate(spec, client, text=TextOptions(stop=("never", text[10:13])))
        assert client.token_ids == output[:13]
        assert client.text == text[:10]
        assert client.last.stop_cause.stop == text[10:13]
        assert client.last.finish_reason == sampling_pb2.FINISH_REASON_STOP
        assert client.last.usage.completion_tokens == 13

    in_world(test)


def test_a_stop_token_is_named_and_has_no_text() -> None:
    async def test(world: World) -> None:
        free = expected_output(make_spec("a", max_tokens=30))
        stop = free[7]
        spec = make_spec("a", max_tokens=30, stop_token_ids=frozenset((stop,)))
        output = expected_output(spec)
        client = await world.generate(
            spec, text=TextOptions(user_stop_token_ids=frozenset((stop,)))
        )
        assert client.token_ids == output
        assert client.text == text_of(output[:-1])
        assert client.last.stop_cause.stop_token_id == stop

    in_world(test)


def test_an_error_of_the_client_s_stream_frees_everything() -> None:
    class BrokenError(BatonError):
        pass

    def break_it(chunk: Chunk) -> None:
        if chunk.token_index >= 3:
            raise BrokenError("the client is gone")

    async def test(world: World) -> None:
        with pytest.raises(BrokenError):
            await world.generate(make_spec("a", max_tokens=60), Client(on_chunk=break_it))

    in_world(test)
