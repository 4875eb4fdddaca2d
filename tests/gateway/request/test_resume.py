"""A request that says what an earlier stream of it sent goes on behind that, as if nothing had
happened."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.types import FinishReason, Sample, SequenceSpec
from gateway.intake.decoding import Decoding
from gateway.intake.request import ChoiceSoFar, TextOptions, ValidatedRequest
from gateway.long_work import LONG_PIECE
from gateway.output.output import ChoiceOutput
from gateway.request.driver import resumed_outputs_of
from tests.support.fake_workers import prompt_logprobs_of, text_of
from tests.support.gateway_world import Chunk, Client, World, in_world, make_spec
from tests.support.virtual_loop import run_virtual


def so_far_of(chunks: list[Chunk]) -> dict[int, ChoiceSoFar]:
    """What a client that got these has."""
    found: dict[int, ChoiceSoFar] = {}
    for chunk in chunks:
        before = found.get(chunk.choice, ChoiceSoFar((), 0, has_ended=False))
        found[chunk.choice] = ChoiceSoFar(
            (*before.token_ids, *chunk.token_ids),
            before.num_chars + len(chunk.text),
            has_ended=bool(chunk.finish_reason),
        )
    return found


def check_cuts(
    spec: SequenceSpec, text: TextOptions | None = None, echo_text: str | None = None
) -> None:
    """Whichever piece is the last that came, both streams together are one that did not break."""

    async def test(world: World) -> None:
        whole = await world.generate(spec, text=text, echo_text=echo_text)
        for num_chunks in range(1, len(whole.chunks)):
            begun = whole.chunks[:num_chunks]
            rest = await world.generate(
                spec, text=text, echo_text=echo_text, resume_from=so_far_of(begun)
            )
            both = Client([*begun, *rest.chunks])
            assert both.outputs() == whole.outputs()
            for choice in range(spec.num_choices):
                ours, wanted = both.of_choice(choice), whole.of_choice(choice)
                assert ours.text == wanted.text
                assert ours.last.finish_reason == wanted.last.finish_reason
                assert ours.last.stop_cause == wanted.last.stop_cause
            usage = both.chunks[-1].usage
            assert usage.completion_tokens == whole.chunks[-1].usage.completion_tokens
            assert usage.prompt_tokens == len(spec.prompt_token_ids)

    in_world(test, num_decodes=2)


@pytest.mark.parametrize("num_choices", [1, 3])
def test_any_cut(num_choices: int) -> None:
    check_cuts(make_spec("a", max_tokens=9, num_choices=num_choices, seed=5))


def test_text_that_waits_for_a_stop_string() -> None:
    async def find(world: World) -> None:
        texts.append((await world.generate(spec)).text)

    texts: list[str] = []
    spec = make_spec("a", max_tokens=20, seed=3)
    in_world(find)
    (text,) = texts
    check_cuts(spec, TextOptions(stop=(text[12:18],)))
    check_cuts(spec, TextOptions(stop=(text[12:18],), is_stop_included=True))
    check_cuts(spec, TextOptions(stop=(f"{text[3:9]}?",)))


def test_what_comes_with_the_first_piece_comes_once() -> None:
    spec = make_spec("a", max_tokens=4, num_choices=2, prompt_logprobs=0)

    async def test(world: World) -> None:
        whole = await world.generate(spec, echo_text="so: ")
        for num_chunks in range(1, len(whole.chunks)):
            begun = whole.chunks[:num_chunks]
            rest = await world.generate(spec, echo_text="so: ", resume_from=so_far_of(begun))
            both = [*begun, *rest.chunks]
            logprobs = [entry for chunk in both for entry in chunk.prompt_logprobs]
            assert len(logprobs) == len(prompt_logprobs_of(spec))
            assert sum(chunk.text.startswith("so: ") for chunk in both) == 2

    in_world(test)


def test_a_stop_string_among_what_came_ends_the_choice() -> None:
    """No client of ours asks for that: it would have had the end with it."""

    async def test(world: World) -> None:
        spec = make_spec("a", max_tokens=20)
        text = (await world.generate(spec)).text
        so_far = {0: ChoiceSoFar(tuple((await world.generate(spec)).token_ids[:9]), 0, False)}
        got = await world.generate(spec, text=TextOptions(stop=(text[1:3],)), resume_from=so_far)
        assert got.last.stop_cause.stop == text[1:3]

    in_world(test)


@pytest.mark.slow
def test_a_long_earlier_output_is_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    resume = ChoiceOutput.resume

    def counted(output: ChoiceOutput, token_ids: Sequence[int], num_chars: int) -> None:
        steps.append(len(token_ids))
        resume(output, token_ids, num_chars)

    async def others(size: int) -> None:
        steps.append(0 if size >= LONG_PIECE else -1)

    monkeypatch.setattr(ChoiceOutput, "resume", counted)
    monkeypatch.setattr("gateway.long_work.let_others_run", others)
    token_ids = tuple(range(97)) * 300
    so_far = ChoiceSoFar(token_ids, len(text_of(token_ids)) - 3, has_ended=False)
    spec = make_spec("a", max_tokens=2 * len(token_ids))
    request = ValidatedRequest(spec, TextOptions(), resume_from={0: so_far})
    decodings = dict.fromkeys((False, True), Decoding(text_of))
    (output,) = run_virtual(resumed_outputs_of(request, decodings))
    assert output.token_ids == list(token_ids)
    output.add(len(token_ids), [Sample(5)], FinishReason.LENGTH)
    piece = output.take()
    assert piece is not None
    assert piece.text == text_of((*token_ids, 5))[so_far.num_chars :]
    assert max(steps) <= 4096
    assert steps[1::2] == [0] * (len(steps) // 2)
    assert len(steps) == 15
