"""Several outputs of one request: choices, the best of them, searches; over fake workers, under a
virtual clock."""

from __future__ import annotations

import asyncio
import math

import pytest

from baton.errors import ClientStalled, DeadlineExceeded, EngineFault, HandoffFailed, InvalidRequest
from baton.types import BeamParams
from gateway.intake.request import TextOptions
from tests.support.fake_workers import (
    expected_outputs,
    logprobs_of,
    prompt_logprobs_of,
    scores_of,
    text_of,
)
from tests.support.gateway_world import Client, World, in_world, make_spec


@pytest.mark.parametrize("num_choices", [2, 5, 8])
def test_choices_share_one_prefill_and_one_place(num_choices: int) -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", num_choices=num_choices)
        client = await world.generate(spec)
        outputs = client.outputs()
        assert outputs == expected_outputs(spec)
        assert len(set(map(tuple, outputs))) == num_choices
        for choice, output in enumerate(outputs):
            assert client.of_choice(choice).text == text_of(output)
        assert client.chunks[-1].usage.completion_tokens == sum(map(len, outputs))
        assert client.chunks[-1].usage.prompt_tokens == 5
        assert client.chunks[-1].timing.transfer_bytes == 100
        assert world.prefills[0].num_prefills == world.decodes[0].num_opens == 1
        first = {chunk.choice for chunk in client.chunks[:num_choices]}
        assert first == set(range(num_choices)), "all first tokens come before any second one"

    in_world(test)


def test_choices_of_one_token_need_no_decode_worker() -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", num_choices=3, max_tokens=1)
        assert (await world.generate(spec)).outputs() == expected_outputs(spec)
        assert world.decodes[0].num_opens == 0

    in_world(test)


def test_without_a_prefill_worker_the_decode_worker_does_it_all() -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", num_choices=4)
        assert (await world.generate(spec)).outputs() == expected_outputs(spec)

    in_world(test, num_prefills=0)


@pytest.mark.parametrize("tokens_per_step", [1, 3, 50])
@pytest.mark.parametrize("read_s", [0.0, 0.02])
def test_slow_and_fast_clients_and_workers(tokens_per_step: int, read_s: float) -> None:
    async def test(world: World) -> None:
        world.decodes[0].tokens_per_step = tokens_per_step
        spec = make_spec("a", num_choices=3, max_tokens=20)
        client = await world.generate(spec, Client(read_s=read_s))
        assert client.outputs() == expected_outputs(spec)
        usage = client.chunks[-1].usage
        assert usage.draft_tokens == 2 * usage.accepted_tokens
        assert bool(usage.accepted_tokens) == (tokens_per_step > 1)

    in_world(test)


def test_more_choices_than_places_are_refused_and_hold_nobody_up() -> None:
    async def test(world: World) -> None:
        many = asyncio.create_task(world.generate(make_spec("many", num_choices=9)))
        few = asyncio.create_task(world.generate(make_spec("few", num_choices=8, arrival_ns=1)))
        with pytest.raises(InvalidRequest, match="at most 8"):
            await many
        assert len((await few).outputs()) == 8

    in_world(test, max_num_seqs=8)


def test_choices_wait_for_places_for_all_of_them() -> None:
    async def test(world: World) -> None:
        specs = [make_spec(f"r{i}", num_choices=5, arrival_ns=i) for i in range(3)]
        clients = await asyncio.gather(*(world.generate(spec) for spec in specs))
        for spec, client in zip(specs, clients, strict=True):
            assert client.outputs() == expected_outputs(spec)
        assert world.decodes[0].num_deferrals == 0, "the gateway counts places"

    in_world(test, max_num_seqs=8)


@pytest.mark.parametrize("after_s", [0.001, 0.004, 0.006, 0.008, 0.011, 0.03, 0.05, 0.09])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("answer_delay_s", [0.0, 0.02])
def test_streams_outlive_a_worker(after_s: float, victim: str, answer_delay_s: float) -> None:
    async def test(world: World) -> None:
        for prefill in world.prefills:
            prefill.answer_delay_s = answer_delay_s
        spec = make_spec("a", num_choices=4, max_tokens=12)
        client = Client()
        request = asyncio.create_task(world.generate(spec, client))
        await asyncio.sleep(after_s)
        (world.prefills if victim == "prefill" else world.decodes)[0].go_down()
        await request
        assert client.outputs() == expected_outputs(spec)

    in_world(test, num_prefills=2, num_decodes=2)


@pytest.mark.parametrize("reason_at", range(12))
def test_choices_are_placed_anew_one_by_one(reason_at: int) -> None:
    """Each is preempted alone, at a moment of its own, and a failure of the worker comes on top."""

    async def test(world: World) -> None:
        spec = make_spec("a", num_choices=4, max_tokens=20)
        request = asyncio.create_task(world.generate(spec))
        for moment in range(12):
            await asyncio.sleep(0.012)
            if moment == reason_at:
                for decode in world.decodes:
                    decode.fail("HANDOFF_FAILED", is_retriable=True)
            for decode in world.decodes:
                decode.preempt(moment % 4)
        client = await request
        assert client.outputs() == expected_outputs(spec)
        assert client.chunks[-1].timing.num_resumes >= 4
        alone = [s for decode in world.decodes for s in decode.specs if s.num_choices == 1]
        assert {opened.choice for opened in alone} == {0, 1, 2, 3}
        assert all(opened.output_token_ids for opened in alone)

    in_world(test, num_decodes=2)


def test_a_choice_that_is_preempted_leaves_the_others_where_they_are() -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", num_choices=4, max_tokens=20)
        request = asyncio.create_task(world.generate(spec))
        await asyncio.sleep(0.05)
        world.decodes[0].preempt(2)
        assert (await request).outputs() == expected_outputs(spec)
        _, again = world.decodes[0].specs
        assert (again.choice, again.num_choices) == (2, 1)

    in_world(test)


def test_memory_that_runs_out_preempts_and_all_end() -> None:
    async def test(world: World) -> None:
        specs = [
            make_spec(f"r{i}", num_choices=3, max_tokens=24, arrival_ns=i, seed=i) for i in range(4)
        ]
        clients = await asyncio.gather(*(world.generate(spec) for spec in specs))
        for spec, client in zip(specs, clients, strict=True):
            assert client.outputs() == expected_outputs(spec)
        assert world.decodes[0].num_preemptions > 0

    in_world(test, num_blocks=20)


def test_failures_are_counted_for_each_choice_alone() -> None:
    async def test(world: World, num_failures: int) -> None:
        spec = make_spec("a", num_choices=2, max_tokens=40)
        client = Client()
        request = asyncio.create_task(world.generate(spec, client))
        for _ in range(num_failures):
            await asyncio.sleep(0.05)
            world.decodes[0].fail("HANDOFF_FAILED", is_retriable=True)
        if num_failures > 3:
            with pytest.raises(HandoffFailed):
                await request
            assert not any(chunk.HasField("usage") for chunk in client.chunks)
        else:
            await request
            assert client.outputs() == expected_outputs(spec)

    in_world(lambda world: test(world, 3))
    in_world(lambda world: test(world, 4))


def test_one_choice_s_fault_ends_all_at_once() -> None:
    async def test(world: World) -> None:
        request = asyncio.create_task(world.generate(make_spec("a", num_choices=3, max_tokens=90)))
        await asyncio.sleep(0.05)
        world.decodes[0].fail("ENGINE_FAULT", is_retriable=False, choice=1)
        with pytest.raises(EngineFault) as caught:
            await request
        assert caught.value.request_id == "a"
        await asyncio.sleep(1e-6)
        assert world.decodes[0].num_sequences == 0

    in_world(test)


@pytest.mark.parametrize("after_s", [0.0, 0.004, 0.006, 0.008, 0.012, 0.03, 0.05, 0.07])
def test_a_cancel_in_any_state_frees_everything_at_once(after_s: float) -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", num_choices=4, max_tokens=60)
        request = asyncio.create_task(world.generate(spec, Client(read_s=0.0003)))
        await asyncio.sleep(after_s)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await asyncio.sleep(1e-6)
        assert world.decodes[0].num_sequences == 0
        assert world.prefills[0].num_in_flight == 0

    in_world(test)


@pytest.mark.parametrize("after_s", [0.03, 0.06, 0.061])
def test_a_cancel_while_choices_wait_for_places_frees_everything(after_s: float) -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", num_choices=4, max_tokens=60)
        request = asyncio.create_task(world.generate(spec))
        await asyncio.sleep(0.03)
        world.decodes[0].is_mute = True
        world.decodes[0].preempt_all()
        await asyncio.sleep(after_s)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    in_world(test)


@pytest.mark.parametrize("timeout_s", [0.0, 0.004, 0.01, 0.05])
def test_a_deadline_is_kept_in_any_state(timeout_s: float) -> None:
    async def test(world: World) -> None:
        started_s = asyncio.get_running_loop().time()
        spec = make_spec("a", num_choices=3, max_tokens=60)
        with pytest.raises(DeadlineExceeded):
            await world.generate(spec, timeout_s=timeout_s)
        assert asyncio.get_running_loop().time() == pytest.approx(started_s + timeout_s)

    in_world(test)


def test_a_client_that_stops_reading_is_let_go_once() -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", num_choices=3, max_tokens=60)
        with pytest.raises(ClientStalled):
            await world.generate(spec, Client(read_s=100.0))
        assert asyncio.get_running_loop().time() < 31.0

    in_world(test)


@pytest.mark.parametrize("at", [0, 1, 9])
@pytest.mark.parametrize("answer_delay_s", [0.0, 0.03])
def test_a_stop_string_ends_its_choice_alone(at: int, answer_delay_s: float) -> None:
    """Even the first token may do it, when the decode worker does not know the choices apart
    yet."""

    async def test(world: World) -> None:
        world.prefills[0].answer_delay_s = answer_delay_s
        spec = make_spec("a", num_choices=3, max_tokens=30)
        whole = expected_outputs(spec)
        stop = text_of(whole[0][at : at + 1])
        ends = [text_of(output).find(stop) for output in whole]
        request = asyncio.create_task(world.generate(spec, text=TextOptions(stop=(stop,))))
        client = await request
        for choice, (output, end) in enumerate(zip(whole, ends, strict=True)):
            part = client.of_choice(choice)
            assert part.token_ids == (output if end < 0 else output[: end + 1])
            assert part.last.stop_cause.stop == ("" if end < 0 else stop)

    in_world(test)


def test_a_choice_that_ended_is_gone_from_the_decode_worker_while_others_go_on() -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", num_choices=3, max_tokens=60)
        first = text_of(expected_outputs(spec)[0][:1])
        request = asyncio.create_task(world.generate(spec, text=TextOptions(stop=(first,))))
        await asyncio.sleep(0.007)
        assert world.decodes[0].num_sequences == 3, "one as yet, they cannot be ended apart"
        await asyncio.sleep(0.004)
        assert world.decodes[0].num_sequences == 2
        decode = world.fleet.workers["d0:1"]
        assert decode.num_in_flight == 2
        await request

    in_world(test)


# The best of several


def test_the_best_of_several_are_told_when_all_have_ended() -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", num_choices=6, max_tokens=12)
        client = await world.generate(spec, num_returned=2)
        whole = expected_outputs(spec)
        means = [math.fsum(logprobs_of(t).logprob for t in o) / len(o) for o in whole]
        ranked = sorted(range(6), key=lambda choice: -means[choice])
        assert client.outputs() == [whole[choice] for choice in ranked[:2]]
        assert len(client.chunks) == 2
        scores = [chunk.score for chunk in client.chunks]
        assert scores == pytest.approx([means[choice] for choice in ranked[:2]])
        assert not any(chunk.logprobs for chunk in client.chunks), "nobody asked for them"
        assert client.chunks[-1].usage.completion_tokens == sum(map(len, whole))

    in_world(test)


def test_the_best_of_several_outlive_preemptions_and_lost_workers() -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", num_choices=3, max_tokens=20, logprobs=0)
        undisturbed = (await world.generate(spec, num_returned=1)).outputs()
        request = asyncio.create_task(world.generate(spec, num_returned=1))
        await asyncio.sleep(0.03)
        for decode in world.decodes:
            decode.preempt(1)
        await asyncio.sleep(0.03)
        world.decodes[0].go_down()
        client = await request
        assert client.outputs() == undisturbed
        assert len(client.chunks[0].logprobs) == len(undisturbed[0])

    in_world(test, num_decodes=2)


# Searches


def test_the_outputs_of_a_search_are_choices_with_scores() -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", num_choices=3, beam=BeamParams(4, num_returned=3))
        client = await world.generate(spec)
        assert client.outputs() == expected_outputs(spec)
        assert len(client.chunks) == 3
        assert [client.of_choice(i).last.score for i in range(3)] == scores_of(spec)
        assert client.chunks[-1].timing.prefill_worker == "p0:1"
        assert client.chunks[-1].timing.prefill_ms == pytest.approx(5.0)

    in_world(test)


def test_a_search_for_one_token_needs_its_decode_worker() -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", num_choices=2, beam=BeamParams(2, num_returned=2), max_tokens=1)
        assert (await world.generate(spec)).outputs() == expected_outputs(spec)

    in_world(test)


@pytest.mark.parametrize("after_s", [0.001, 0.004, 0.008, 0.03, 0.05])
@pytest.mark.parametrize("fault", ["kill", "preempt"])
def test_a_search_begins_again_when_its_worker_is_lost(after_s: float, fault: str) -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", num_choices=2, beam=BeamParams(4, num_returned=2), max_tokens=12)
        request = asyncio.create_task(world.generate(spec))
        await asyncio.sleep(after_s)
        world.decodes[0].go_down() if fault == "kill" else world.decodes[0].preempt_all()
        client = await request
        assert client.outputs() == expected_outputs(spec)
        opened = [spec for decode in world.decodes for spec in decode.specs]
        assert not any(spec.output_token_ids for spec in opened)

    in_world(test, num_decodes=2, num_prefills=2)


@pytest.mark.parametrize("after_s", [0.001, 0.004, 0.008, 0.05])
def test_a_search_that_is_given_up_leaves_nothing(after_s: float) -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", num_choices=2, beam=BeamParams(4, num_returned=2), max_tokens=12)
        request = asyncio.create_task(world.generate(spec))
        await asyncio.sleep(after_s)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    in_world(test)


# What is told of the prompt


@pytest.mark.parametrize("num_prefills", [0, 1])
def test_a_prompt_of_one_token_has_nothing_to_score(num_prefills: int) -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", (7,), prompt_logprobs=3)
        client = await world.generate(spec)
        assert client.outputs() == expected_outputs(spec)
        assert not any(chunk.prompt_logprobs for chunk in client.chunks)

    in_world(test, num_prefills=num_prefills)


@pytest.mark.parametrize("num_prefills", [0, 1])
@pytest.mark.parametrize("num_choices", [1, 3])
def test_the_prompt_s_text_and_log_probabilities_come_once(
    num_prefills: int, num_choices: int
) -> None:
    async def test(world: World) -> None:
        spec = make_spec("a", num_choices=num_choices, max_tokens=20, prompt_logprobs=0)
        request = asyncio.create_task(world.generate(spec, echo_text="the prompt "))
        await asyncio.sleep(0.06)
        world.decodes[0].go_down()
        client = await request
        assert client.outputs() == expected_outputs(spec)
        for choice, output in enumerate(expected_outputs(spec)):
            part = client.of_choice(choice)
            assert part.text == "the prompt " + text_of(output)
            prompts = [list(chunk.prompt_token_ids) for chunk in part.chunks]
            assert prompts == [[1, 2, 3, 4, 5], *([[]] * (len(prompts) - 1))]
            scored = [
                [position.chosen.token_id for position in chunk.prompt_logprobs]
                for chunk in part.chunks
            ]
            asked = [logprobs.token_id for logprobs in prompt_logprobs_of(spec)]
            assert scored == [asked if choice == 0 else [], *([[]] * (len(scored) - 1))]
        opened = [spec for decode in world.decodes for spec in decode.specs]
        assert [spec.sampling.prompt_logprobs for spec in opened] == [0] + [-1] * num_choices

    in_world(test, num_prefills=num_prefills, num_decodes=2)
