"""What requests do to logits is what transformers' logits processors do, one by one and in their
order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types import BeamParams, Sampling
from engine.interface import SampleRow
from engine.sampling.edits import edit
from engine.sampling.sampler import NothingAllowedError, draw

VOCAB = 11
TOKEN = st.integers(0, VOCAB - 1)


def random_logits(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator) * 3


def mask_of(allowed: set[int]) -> bytes:
    bits = np.zeros(VOCAB, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


SAMPLINGS = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.6]),
    logit_bias=st.dictionaries(TOKEN, st.floats(-5, 5, width=32), max_size=3),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.frozensets(TOKEN, max_size=3),
    bad_words=st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=5).map(tuple),
)
TEXTS = st.tuples(
    st.lists(TOKEN, min_size=1, max_size=5).map(tuple), st.lists(TOKEN, max_size=5).map(tuple)
)
MASKS = st.none() | st.sets(TOKEN)


def row_of(
    sampling: Sampling, text: tuple[tuple[int, ...], tuple[int, ...]], allowed: set[int] | None
) -> SampleRow:
    prompt, output = text
    mask = None if allowed is None else mask_of(allowed)
    return SampleRow(0, sampling, prompt + output, len(prompt), allowed=mask)


def theirs(logits: torch.Tensor, row: SampleRow, allowed: set[int] | None) -> torch.Tensor:
    """Scores [1, vocab] after transformers' processors, in the order of its generate."""
    from transformers import (
        LogitsProcessorList,
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        PrefixConstrainedLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
    )

    s = row.sampling
    stops = sorted(s.stop_token_ids)
    steps: list[Any] = []
    if s.logit_bias:
        steps.append(SequenceBiasLogitsProcessor([[[t], b] for t, b in s.logit_bias.items()]))
    if s.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    if s.bad_words:
        steps.append(NoBadWordsLogitsProcessor([list(word) for word in s.bad_words]))
    if s.min_tokens and stops:
        steps.append(MinNewTokensLengthLogitsProcessor(row.num_prompt_tokens, s.min_tokens, stops))
    if allowed:
        steps.append(PrefixConstrainedLogitsProcessor(lambda *_: sorted(allowed), 1))
    ids: Any = torch.tensor([row.token_ids])
    scores: Any = logits.clone()
    return LogitsProcessorList(steps)(ids, scores)


def without_bans(sampling: Sampling) -> Sampling:
    return replace(sampling, bad_words=(), min_tokens=0)


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 1000), sampling=SAMPLINGS, text=TEXTS, allowed=MASKS)
def test_edits_are_transformers(
    seed: int, sampling: Sampling, text: tuple[tuple[int, ...], ...], allowed: set[int] | None
) -> None:
    logits = random_logits(1, seed)
    row = asked = row_of(sampling, (text[0], text[1]), allowed)
    if allowed == set():
        assert edit(logits, [row]).isneginf().all()
        return
    bans = theirs(logits, row, None)[0].isneginf()
    if allowed is not None and all(bans[token] for token in allowed):
        # The mask alone holds, here and there; there all that it allows is as likely.
        assert theirs(logits, row, allowed)[0].isneginf().sum() == VOCAB - len(allowed)
        row = row_of(without_bans(sampling), (text[0], text[1]), allowed)
    wanted = theirs(logits, row, allowed)
    torch.testing.assert_close(edit(logits, [asked]), wanted, rtol=0, atol=1e-6)


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.lists(st.tuples(SAMPLINGS, TEXTS, MASKS), min_size=1, max_size=5),
)
def test_a_row_is_edited_as_if_it_were_alone(
    seed: int, rows: list[tuple[Sampling, tuple[tuple[int, ...], tuple[int, ...]], set[int] | None]]
) -> None:
    made = [row_of(*entry) for entry in rows]
    logits = random_logits(len(made), seed)
    before = logits.clone()
    together = edit(logits, made)
    alone = [edit(logits[i : i + 1], [row]) for i, row in enumerate(made)]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(logits, before)


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    sampling=SAMPLINGS,
    text=TEXTS,
    allowed=MASKS,
    temperature=st.sampled_from([0.0, 0.5, 2.0]),
    top_k=st.sampled_from([0, 3]),
)
def test_a_forbidden_token_is_never_chosen(
    seed: int,
    sampling: Sampling,
    text: tuple[tuple[int, ...], tuple[int, ...]],
    allowed: set[int] | None,
    temperature: float,
    top_k: int,
) -> None:
    options = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=0.9,
        seed=seed,
        logit_bias=sampling.logit_bias,
        bad_words=sampling.bad_words,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
    )
    row = row_of(options, text, allowed)
    plain = row_of(Sampling(temperature=temperature, seed=seed), text, None)
    logits = random_logits(3, seed)
    left = ~edit(logits[1:2], [row])[0].isneginf()
    if not left.any():
        with pytest.raises(NothingAllowedError) as caught:
            draw(logits, [plain, row, plain]).samples()
        assert caught.value.rows == (1,)
        return
    assert left[draw(logits, [plain, row, plain]).samples()[1].token_id]


@pytest.mark.parametrize("num_bytes", [0, 1, 2, 40])
def test_masks_shorter_or_longer_than_the_vocabulary(num_bytes: int) -> None:
    """What a mask does not tell of is forbidden; bits past the vocabulary mean nothing."""
    row = SampleRow(0, Sampling(), (0,), 1, allowed=b"\xff" * num_bytes)
    left = (~edit(random_logits(1, 0), [row])[0].isneginf()).tolist()
    assert left == [token < num_bytes * 8 for token in range(VOCAB)]


def test_a_bad_word_may_begin_in_the_prompt() -> None:
    logits = torch.tensor([[0.0, 5.0, 3.0]])
    options = Sampling(bad_words=((0, 2, 1),))

    def chosen(*token_ids: int) -> int:
        row = SampleRow(0, options, token_ids, num_prompt_tokens=1)
        return draw(logits, [row]).samples()[0].token_id

    assert chosen(0, 2) == 2
    assert chosen(1, 0, 2) == 2
    assert chosen(2) == 1
    assert chosen(2, 0) == 1


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    asked=st.lists(st.tuples(TOKEN, st.integers(0, VOCAB + 1)), min_size=1, max_size=4),
)
def test_scored_rows_tell_the_models_own_probabilities(
    seed: int, asked: list[tuple[int, int]]
) -> None:
    """Whatever their requests forbid."""
    logits = random_logits(len(asked), seed)
    wanted = logits.log_softmax(-1)
    rows = [
        SampleRow(0, Sampling(prompt_logprobs=count, bad_words=((token,),)), (0,), 1, 0, b"", token)
        for token, count in asked
    ]
    for i, one in enumerate(draw(logits, rows).samples()):
        token, count = asked[i]
        told = one.logprobs
        assert told is not None
        assert one.token_id == told.token_id == token
        assert told.logprob == pytest.approx(float(wanted[i, token]), abs=1e-5)
        best = wanted[i].topk(min(count, VOCAB))
        assert [t for t, _ in told.top] == best.indices.tolist()
        assert [v for _, v in told.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert draw(logits[i : i + 1], rows[i : i + 1]).samples() == [one]


@settings(deadline=None)
@given(seed=st.integers(0, 1000), allowed=st.sets(TOKEN, min_size=1), width=st.integers(1, 6))
def test_beam_rows_offer_the_likeliest_allowed(seed: int, allowed: set[int], width: int) -> None:
    """With the probabilities that they have among all tokens, as transformers scores beams."""
    logits = random_logits(2, seed)
    options = Sampling(
        beam=BeamParams(width), stop_token_ids=frozenset({0, 1}), min_tokens=1, temperature=1.0
    )
    row = SampleRow(0, options, (0,), 1, allowed=mask_of(allowed))
    drawn = SampleRow(0, Sampling(temperature=1.0, seed=seed), (0,), 1)
    left = allowed - {0, 1} or allowed
    one = draw(logits, [drawn, row]).samples()[1]
    assert one.logprobs is not None
    values = logits.log_softmax(-1)[1].tolist()
    wanted = sorted(left, key=lambda token: -values[token])[: width + 2]
    assert [token for token, _ in one.logprobs.top] == wanted
    assert [v for _, v in one.logprobs.top] == pytest.approx([values[t] for t in wanted], abs=1e-5)
    assert one.token_id == wanted[0]
