"""What a client may ask of an output's choice, through real services: each against the oracle's own
answer."""

from __future__ import annotations

import asyncio

import pytest

from baton.client import BeamSearch, SamplingParams
from baton.types import BeamParams, EarlyStopping, FinishReason, Sampling
from engine.oracle import oracle_tokens
from gateway.intake.tokenizer import load_tokenizer
from tests.support.live_tiers import BOX_MODEL, ONLY_DECODES, has_crossed, live_system
from tests.support.oracle_reference import oracle_beams, oracle_prompt_logprobs

VOCAB = 1000
PROMPT = [*range(30), 5, 6, 7]
#: Many, so that beams end at many lengths.
STOPS = frozenset(range(0, VOCAB, 7))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("n", [1, 2, 8])
async def test_each_choice_is_a_request_of_its_own(n: int) -> None:
    sampling = Sampling(temperature=0.8, seed=11, max_tokens=9)
    params = SamplingParams(n=n, temperature=0.8, seed=11, max_tokens=9, ignore_eos=True)
    async with live_system(decode_options=ONLY_DECODES) as system:
        done = await system.client.generate(PROMPT, params)
        assert has_crossed(done)
        assert len(done.choices) == n
        for choice in done.choices:
            wanted = oracle_tokens(PROMPT, sampling, VOCAB, choice.index)
            assert list(choice.token_ids) == wanted
            assert choice.finish_reason is FinishReason.LENGTH
        assert done.usage.completion_tokens == 9 * n
        assert done.usage.prompt_tokens == len(PROMPT)
        await system.until_quiet()


@pytest.mark.slow
async def test_the_best_of_several_are_returned() -> None:
    params = SamplingParams(
        n=2, best_of=5, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, logprobs=0
    )
    alone = SamplingParams(n=5, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, logprobs=0)
    async with live_system(decode_options=ONLY_DECODES) as system:
        best, every = await asyncio.gather(
            system.client.generate(PROMPT, params), system.client.generate(PROMPT, alone)
        )
        assert has_crossed(best)
        means = {
            choice.token_ids: sum(one.logprob for one in choice.logprobs) / 6
            for choice in every.choices
        }
        ranked = sorted(means, key=lambda tokens: -means[tokens])
        assert [choice.token_ids for choice in best.choices] == ranked[:2]
        scores = [choice.score for choice in best.choices]
        assert scores == pytest.approx([means[tokens] for tokens in ranked[:2]])
        await system.until_quiet()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beam", "ours"),
    [
        (BeamSearch(1), BeamParams(1)),
        (BeamSearch(4), BeamParams(4)),
        (BeamSearch(4, 2.0, "never"), BeamParams(4, 2.0, EarlyStopping.NEVER)),
        (BeamSearch(3, -1.0, True), BeamParams(3, -1.0, EarlyStopping.ALWAYS)),
    ],
)
async def test_a_beam_search_finds_what_one_process_finds(
    beam: BeamSearch, ours: BeamParams
) -> None:
    returned = BeamParams(ours.width, ours.length_penalty, ours.early_stopping, ours.width)
    params = SamplingParams(
        n=beam.width,
        beam_search=beam,
        max_tokens=8,
        min_tokens=1,
        ignore_eos=True,
        stop_token_ids=sorted(STOPS)[:60],
    )
    sampling = Sampling(
        max_tokens=8, min_tokens=1, stop_token_ids=frozenset(sorted(STOPS)[:60]), beam=returned
    )
    wanted = oracle_beams(PROMPT, sampling, VOCAB)
    async with live_system(decode_options=ONLY_DECODES) as system:
        done = await system.client.generate(PROMPT, params)
        assert has_crossed(done)
        assert [choice.token_ids for choice in done.choices] == [h.token_ids for h in wanted]
        assert [choice.score for choice in done.choices] == [h.score for h in wanted]
        assert [choice.finish_reason for choice in done.choices] == [h.finish for h in wanted]
        await system.until_quiet()


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("max_local_prefill_tokens", [0, 1000])
async def test_a_prompt_is_echoed_and_scored(max_local_prefill_tokens: int) -> None:
    """Whichever tier computes it."""
    sampling = Sampling(max_tokens=3, prompt_logprobs=2)
    params = SamplingParams(
        n=2, temperature=0.0, max_tokens=3, prompt_logprobs=2, echo=True, ignore_eos=True
    )
    small_steps = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
    where = {"max_local_prefill_tokens": max_local_prefill_tokens}
    async with live_system(worker_options=small_steps, decode_options=where) as system:
        # Cached prefixes cannot tell log probabilities: asked again, all are there again.
        for _ in range(2):
            done = await system.client.generate(PROMPT, params)
            assert has_crossed(done) == (max_local_prefill_tokens == 0)
            assert done.prompt_logprobs == oracle_prompt_logprobs(PROMPT, sampling, VOCAB)
            assert done.prompt_token_ids == tuple(PROMPT)
            prompt_text = await system.client.detokenize(PROMPT, skip_special_tokens=True)
            for choice in done.choices:
                assert list(choice.token_ids) == oracle_tokens(PROMPT, sampling, VOCAB)
                assert choice.text.startswith(prompt_text)
                assert len(choice.text) > len(prompt_text)
        text = await system.client.generate("a (b)", params)
        assert text.text.startswith("a (b)")
        assert len(text.prompt_logprobs) == text.usage.prompt_tokens - 1
        await system.until_quiet()


@pytest.mark.slow
async def test_bad_words_do_not_come() -> None:
    tokenizer = load_tokenizer(str(BOX_MODEL))
    plain = Sampling(max_tokens=12)
    output = oracle_tokens(PROMPT, plain, VOCAB)
    # Words of one token each that the output would have, told as text.
    words = [
        word
        for token_id in output
        if (word := tokenizer.decode([token_id], False))
        and any(ways == (token_id,) for ways in (await tokenizer.encode_word_variants([word]))[0])
    ]
    assert words
    ways = tuple(
        dict.fromkeys(ids for w in await tokenizer.encode_word_variants(words) for ids in w)
    )
    possible = tuple(ids for ids in ways if max(ids) < VOCAB)
    wanted = oracle_tokens(PROMPT, Sampling(max_tokens=12, bad_words=possible), VOCAB)
    assert wanted != output
    params = SamplingParams(temperature=0.0, max_tokens=12, bad_words=words, ignore_eos=True)
    async with live_system(decode_options=ONLY_DECODES) as system:
        done = await system.client.generate(PROMPT, params)
        assert has_crossed(done)
        assert list(done.token_ids) == wanted
        await system.until_quiet()
