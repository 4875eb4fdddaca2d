"""The draft model drafts what it would say next, whatever happened to its state before."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types import Sampling
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.layout import whole_blocks
from engine.kv.pool import BlockPool
from engine.oracle import OracleEngine, OracleOptions, oracle_tokens
from worker_core.speculation.draft_model import DraftModelProposer
from worker_core.speculation.interface import DraftRequest

VOCAB = 50


def proposer_of(
    num_blocks: int = 64,
    max_num_batched_tokens: int = 256,
    poison_token_id: int = -1,
    max_model_len: int = 4096,
) -> tuple[DraftModelProposer, BlockPool]:
    options = OracleOptions(
        num_blocks=num_blocks,
        block_size=4,
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        poison_token_id=poison_token_id,
    )
    pool = BlockPool(num_blocks, whole_blocks(4), secret=bytes(32), enable_prefix_caching=False)
    engine = OracleEngine(options)
    return DraftModelProposer(engine, pool, max_num_batched_tokens, lambda: 0.0), pool


def request_of(
    key: int,
    token_ids: Sequence[int],
    max_num_drafts: int = 4,
    sampling: Sampling = Sampling(),  # noqa: B008, frozen
    num_prompt_tokens: int = 3,
) -> DraftRequest:
    return DraftRequest(key, token_ids, num_prompt_tokens, max_num_drafts, sampling)


def drafts_of(
    proposer: DraftModelProposer, requests: Sequence[DraftRequest]
) -> list[tuple[int, ...]]:
    return [proposal.token_ids for proposal in proposer.propose(requests)]


def right(request: DraftRequest) -> tuple[int, ...]:
    """What the draft model, alone and undisturbed, says after the sequence, penalties and seed as
    they are."""
    num_output = len(request.token_ids) - request.num_prompt_tokens
    tokens = list(request.token_ids)
    # An oracle's next token is a function of the prefix: forced along a path, it gives the same as
    # by itself.
    engine = OracleEngine(OracleOptions(num_blocks=1, block_size=512, vocab_size=VOCAB))
    for _ in range(request.max_num_drafts):
        row = SampleRow(len(tokens) - 1, request.sampling, tokens, request.num_prompt_tokens)
        tokens.append(
            engine.forward(Batch((SequenceSlice(tokens, 0, [0], (row,)),)))[0][0].token_id
        )
    return tuple(tokens[request.num_prompt_tokens + num_output :])


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from([8, 12, 64]), st.sampled_from([5, 256]))
def test_drafts_are_the_draft_models_own_whatever_was_accepted(
    seed: int, num_blocks: int, budget: int
) -> None:
    """Sequences grow by accepted and by other tokens, in any order, with blocks for all of them or
    for few."""
    rng = random.Random(seed)
    proposer, pool = proposer_of(num_blocks, budget)
    texts = [[rng.randrange(VOCAB) for _ in range(3)] for _ in range(3)]
    samplings = [Sampling(), Sampling(temperature=1.0, seed=seed), Sampling(presence_penalty=1.0)]
    for _ in range(8):
        keys = rng.sample(range(3), rng.randint(1, 3))
        requests = [request_of(key, texts[key], rng.randint(1, 4), samplings[key]) for key in keys]
        for request, drafts in zip(requests, drafts_of(proposer, requests), strict=True):
            assert drafts in ((), right(request))
            kept = drafts[: rng.randint(0, len(drafts))]
            texts[keys[requests.index(request)]] += [*kept, rng.randrange(VOCAB)]
        pool.check_integrity()
    for key in range(3):
        proposer.forget(key)
    assert pool.counts().leased == 0


def test_a_long_prompt_is_caught_up_piece_by_piece() -> None:
    proposer, _ = proposer_of(max_num_batched_tokens=16)
    request = request_of(0, list(range(40)))
    assert drafts_of(proposer, [request]) == [()]
    assert drafts_of(proposer, [request]) == [()]
    assert drafts_of(proposer, [request]) == [right(request)]


def test_when_blocks_run_out_the_sequence_drafted_for_longest_ago_loses_its_own() -> None:
    proposer, pool = proposer_of(num_blocks=7)
    for key in (0, 1, 0, 2):
        request = request_of(key, [key] * 8, 2)
        assert drafts_of(proposer, [request]) == [right(request)]
        pool.check_integrity()
    assert pool.counts().leased == 6
    proposer.forget(1)  # lost already
    assert pool.counts().leased == 6
    proposer.forget(0)
    assert pool.counts().leased == 3


def test_sequences_of_one_call_do_not_take_each_others_blocks() -> None:
    proposer, pool = proposer_of(num_blocks=5)
    requests = [request_of(key, [key] * 8, 2) for key in range(2)]
    assert drafts_of(proposer, requests) == [right(requests[0]), ()]
    pool.check_integrity()


def test_drafts_end_at_the_draft_models_length() -> None:
    proposer, _ = proposer_of(num_blocks=16, max_model_len=12)
    lengths = [9, 10, 12, 13, 20]
    estimates = proposer.estimate([request_of(0, [1] * length) for length in lengths])
    assert [estimate.num_drafts for estimate in estimates] == [4, 3, 1, 0, 0]
    request = request_of(0, [1] * 12, 1)
    assert drafts_of(proposer, [request]) == [right(request)]


def test_a_fault_of_the_draft_model_costs_drafts_and_nothing_else() -> None:
    proposer, pool = proposer_of(poison_token_id=7)
    well, ill = request_of(0, [1, 2, 3]), request_of(1, [7, 8, 9])
    drafts = drafts_of(proposer, [well, ill])
    assert drafts == [right(well), ()]
    proposer.forget(0)
    assert pool.counts().leased == 0


def test_the_draft_model_of_a_target_with_the_same_weights_is_always_right() -> None:
    proposer, _ = proposer_of()
    sampling = Sampling(temperature=0.8, seed=5, max_tokens=12, logprobs=3)
    output = oracle_tokens([4, 5, 6], sampling, VOCAB)
    request = request_of(0, [4, 5, 6], 12, sampling)
    assert list(drafts_of(proposer, [request])[0]) == output
