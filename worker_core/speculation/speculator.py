"""Drafts for steps: chooses sequences and lengths, and learns from the results.

In each step plan() gives drafts, the core verifies them, record() gets the tokens of each sequence,
and on_step_end() ends it. Costs and chances are learned from these. Drafts that cost no time are
compared even if the step does not verify them, so that a sequence on which they become right is
noticed for free; drafts that cost time are made now and then as trials."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from baton.config import DecodeOptions
from baton.errors import ConfigError
from engine.checkpoint import HeadFiles, resolve_checkpoint
from engine.interface import Engine, EngineSpec
from engine.kv.layout import whole_blocks
from engine.kv.pool import BlockPool
from worker_core.build import build_decode_engine, draft_head_files
from worker_core.speculation.draft_lengths import (
    LATER,
    Acceptance,
    Candidate,
    DraftCurve,
    Rates,
    StepPrices,
    choose_lengths,
    rounded,
)
from worker_core.speculation.draft_model import DraftModelProposer, check_specs, check_tokenizers
from worker_core.speculation.head import HeadProposer
from worker_core.speculation.interface import (
    NO_PROPOSAL,
    DraftRequest,
    Estimate,
    Proposal,
    Proposer,
    Speculation,
    rows_of_places,
)
from worker_core.speculation.medusa import MedusaProposer
from worker_core.speculation.ngram import NgramProposer

if TYPE_CHECKING:
    from engine.torch.engine import TorchEngine


def build_speculation(
    options: DecodeOptions, engine: Engine, clock: Callable[[], float]
) -> Speculation | None:
    """What the options name, for a target that is loaded; None for no drafts. Takes as long as
    loading a draft model; raises StartupError."""
    most, widths = options.num_speculative_tokens, options.tree_widths
    match speculative_method(options, engine.spec):
        case "ngram":
            return Speculator(NgramProposer(), most, clock)
        case "draft":
            return Speculator(_draft_model(options, engine, clock), most, clock)
        case "eagle" | "mtp":
            return Speculator(_head(options, engine, clock), most, clock, widths)
        case "medusa":
            return Speculator(_medusa(options, engine, clock), most, clock, widths)
        case _:
            return None


def speculative_method(options: DecodeOptions, spec: EngineSpec) -> str:
    """Which one "auto" stands for. Raises ConfigError if another is asked for than can be had."""
    method, cannot_rewind = options.speculative_method, spec.groups.cannot_rewind
    is_sparse = ":" in options.attention_backend
    if method == "auto":
        is_ahead = options.async_scheduling or spec.numerics.device == "cuda"
        if spec.is_pipelined and options.async_scheduling is None:
            is_ahead = True
        return "none" if is_ahead or cannot_rewind or is_sparse else "ngram"
    if is_sparse and method != "none":
        why = (
            f"--attention-backend={options.attention_backend} reads a part of the context, and "
            "drafts would be verified with all of it; give none"
        )
        raise ConfigError.of("speculative_method", method, why)
    if cannot_rewind and method != "none":
        raise ConfigError.of(
            "speculative_method",
            method,
            f"{spec.model} has {cannot_rewind} to where a draft was not accepted; give none",
        )
    return method


def _draft_model(
    options: DecodeOptions, target: Engine, clock: Callable[[], float]
) -> DraftModelProposer:
    draft_options = options.model_copy(
        update={
            "model": options.speculative_model,
            "rope_scaling": None,
            "hf_overrides": None,
            "revision": None,
            "served_model_name": None,
            "lora_modules": (),
            "max_model_len": None,
            "kv_cache_memory_bytes": None,
            "num_gpu_blocks_override": None,
            # One process, with as many threads as the target's rank here.
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "nnodes": 1,
            "kv_per_rank": False,
            "enable_expert_parallel": False,
            "tensor_parallel_cut": "outputs",
            "expert_load_file": None,
            "num_threads": None,
        }
    )
    engine = build_decode_engine(draft_options, frees_windows=False)
    check_specs(target.spec, engine.spec)
    if options.engine == "torch":
        check_tokenizers(
            resolve_checkpoint(options.model, options.revision),
            resolve_checkpoint(draft_options.model, None),
        )
    pool = BlockPool(
        engine.spec.num_blocks,
        whole_blocks(engine.spec.layout.block_size),
        secret=secrets.token_bytes(32),
        enable_prefix_caching=False,
    )
    return DraftModelProposer(engine, pool, options.max_num_batched_tokens, clock)


def _head(options: DecodeOptions, target: Engine, clock: Callable[[], float]) -> HeadProposer:
    # Imports torch, which an oracle engine's worker does without.
    from engine.torch.head_runner import open_head

    engine, files = _watchable(options, target)
    head, states = open_head(engine, files, options.max_num_seqs)
    pool = BlockPool(
        head.num_blocks,
        whole_blocks(head.block_size),
        secret=secrets.token_bytes(32),
        enable_prefix_caching=False,
    )
    return HeadProposer(head, states, pool, clock, options.tree_widths)


def _medusa(options: DecodeOptions, target: Engine, clock: Callable[[], float]) -> MedusaProposer:
    from engine.torch.medusa import open_medusa

    engine, files = _watchable(options, target)
    heads, states = open_medusa(engine, files)
    return MedusaProposer(heads, states, clock, options.tree_widths)


def _watchable(options: DecodeOptions, target: Engine) -> tuple[TorchEngine, HeadFiles]:
    """A target that may give its states, and the heads that the options name. Raises
    ConfigError."""
    from engine.torch.engine import TorchEngine

    files = draft_head_files(options)
    if files is None or not isinstance(target, TorchEngine):
        raise ConfigError.of(
            "speculative_method",
            options.speculative_method,
            "an oracle engine has no hidden states; give ngram, or another engine",
        )
    return target, files


_NO_CANDIDATE = Candidate(0.0, 0.0, 0)

#: Steps in a row without drafts after which a few are made all the same, if there are candidates;
#: and what it grows to, twofold with each probe that changed nothing.
PROBE_INTERVAL = 32
MAX_PROBE_INTERVAL = 1024

#: A probe makes as many drafts as would pay if rows cost half: few drafts may cost more apiece than
#: many. If none would pay, one in PROBE_SHARE sequences gets one draft, at least one sequence.
PROBE_SHARE = 8

#: Consecutive steps of a trial of drafts that cost time, for one sequence: the first few take
#: longer than later ones and say little about acceptance.
TRIAL_STEPS = 8

#: One in so many steps with such drafts has one more than seems to pay; otherwise a length that
#: took long once, by chance, would not be tried again.
STEPS_PER_MORE = 16

#: The interval between trials grows by this factor for drafts that take as long as a step: trials
#: take about 1 % of the time at first, and less later.
_PATIENCE = 24

#: Consecutive steps with drafts, after which one step has none, to measure their cost.
REFRESH_INTERVAL = 64

#: A sequence without useful drafts rests one step longer for each so many sequences in the batch,
#: because searching takes time, too.
_SEQUENCES_PER_REST = 4

#: Maximum steps of rest if drafts cost time: nothing is learned meanwhile.
_COSTLY_REST = 16


@dataclass(slots=True)
class _Track:
    """State of a sequence. rates: see Acceptance. drafts: the latest, until compared. rest,
    rest_left: steps without a search for drafts."""

    rates: Rates = field(default_factory=dict)
    confidence: int = 0
    drafts: Proposal = NO_PROPOSAL
    rest: int = 0
    rest_left: int = 0


class Speculator:
    """Implements Speculation."""

    def __init__(
        self,
        proposer: Proposer,
        max_num_drafts: int,
        clock: Callable[[], float],
        widths: Sequence[int] = (),
    ) -> None:
        """max_num_drafts: per sequence and step. clock: in seconds. widths: number of alternatives
        that the proposer gives at each place, until it is 1."""
        self._rows = rows_of_places(widths)
        self.max_num_drafts = max_num_drafts
        self._proposer = proposer
        self._clock = clock
        self._acceptance = Acceptance()
        self._curves: dict[int, DraftCurve] = {}
        """What steps cost, by their numbers of rows, rounded."""
        self._tracks: dict[Hashable, _Track] = {}
        self._num_steps = 0
        self._last_drafted_step = 0
        self._probe_interval = PROBE_INTERVAL
        self._num_trial_steps_left = 0
        self._start_s = 0.0

    def is_due(self, key: Hashable) -> bool:
        track = self._tracks.get(key)
        if track is None or track.rest_left == 0:
            return True
        track.rest_left -= 1
        return False

    def plan(
        self, requests: Sequence[DraftRequest], num_rows: int, max_num_drafts: int
    ) -> list[Proposal]:
        """See Speculation.plan. From here to on_step_end() is the step, less the drafting."""
        self._num_steps += 1
        self._start_s = self._clock()
        curve = self._curves.get(rounded(num_rows, 3))
        if curve is None or not requests or curve.num_steps_since_plain >= REFRESH_INTERVAL:
            return [NO_PROPOSAL] * len(requests)
        tracks = [self._tracks.setdefault(request.key, _Track()) for request in requests]
        estimates = self._proposer.estimate(requests)
        before = self._last_drafted_step, self._probe_interval, self._num_trial_steps_left
        lengths = self._lengths(tracks, estimates, num_rows, max_num_drafts, curve)
        start_s = self._clock()
        chosen = [Proposal(e.drafts[:length]) for e, length in zip(estimates, lengths, strict=True)]
        # Ask for drafts that the estimate does not hold already.
        asked = [i for i, length in enumerate(lengths) if length and not chosen[i].token_ids]
        if asked:
            made = self._proposer.propose(
                [replace(requests[i], max_num_drafts=lengths[i]) for i in asked]
            )
            for index, drafts in zip(asked, made, strict=True):
                chosen[index] = drafts
        self._start_s += self._clock() - start_s
        if not any(proposal.token_ids for proposal in chosen):
            # A proposer that was asked had to make ready first: it is asked again.
            self._last_drafted_step, self._probe_interval, self._num_trial_steps_left = before
        for track, estimate, length, drafts in zip(tracks, estimates, lengths, chosen, strict=True):
            track.confidence = estimate.confidence
            track.drafts = Proposal(estimate.drafts) if estimate.drafts else drafts
            longest_rest = num_rows // _SEQUENCES_PER_REST
            if estimate.num_drafts and not estimate.drafts:
                longest_rest = max(longest_rest, _COSTLY_REST)
            track.rest = 0 if length else min(2 * track.rest + 1, longest_rest)
            track.rest_left = track.rest
        return chosen

    def record(self, key: Hashable, token_ids: Sequence[int]) -> None:
        track = self._tracks.get(key)
        if track is not None and track.drafts.token_ids:
            self._acceptance.record(track.rates, track.confidence, track.drafts, token_ids)
            track.drafts = NO_PROPOSAL

    def on_step_end(self, num_rows: int, num_drafts: int) -> None:
        curve = self._curves.get(rounded(num_rows, 3))
        if curve is None and num_drafts == 0:
            curve = self._curves[rounded(num_rows, 3)] = DraftCurve()
        if curve is not None:
            curve.observe(num_rows, num_drafts, self._clock() - self._start_s)

    def forget(self, key: Hashable) -> None:
        self._tracks.pop(key, None)
        self._proposer.forget(key)

    def _lengths(
        self,
        tracks: Sequence[_Track],
        estimates: Sequence[Estimate],
        num_rows: int,
        max_num_drafts: int,
        curve: DraftCurve,
    ) -> list[int]:
        if not any(estimate.num_drafts for estimate in estimates):
            return [0] * len(tracks)
        chance = self._acceptance.chance
        candidates = [
            Candidate(
                chance(track.rates, estimate.confidence),
                chance(track.rates, LATER),
                estimate.num_drafts,
                self._rows,
            )
            if estimate.num_drafts
            else _NO_CANDIDATE
            for track, estimate in zip(tracks, estimates, strict=True)
        ]
        prices = StepPrices(num_rows, max_num_drafts, curve.seconds, self._proposer.cost_s)
        takes_time = any(estimate.num_drafts and not estimate.drafts for estimate in estimates)
        num_more = takes_time and curve.num_steps_since_plain % STEPS_PER_MORE == STEPS_PER_MORE - 1
        lengths = choose_lengths(candidates, prices, int(num_more))
        if any(lengths):
            self._last_drafted_step, self._probe_interval = self._num_steps, PROBE_INTERVAL
            return lengths
        if self._is_trial_due(curve, takes_time=takes_time):
            return _probe(candidates, 1) if takes_time else _bold(candidates, prices)
        return lengths

    def _is_trial_due(self, curve: DraftCurve, *, takes_time: bool) -> bool:
        """Whether this step has drafts to learn from, though none seem worth it. takes_time: to
        make them."""
        if self._num_trial_steps_left:
            self._num_trial_steps_left -= 1
            self._last_drafted_step = self._num_steps
            return True
        share = self._proposer.cost_s(1, 1) / curve.seconds(0)
        num_idle_steps = self._num_steps - self._last_drafted_step
        if num_idle_steps < self._probe_interval * (1 + _PATIENCE * share):
            return False
        self._last_drafted_step = self._num_steps
        self._probe_interval = min(2 * self._probe_interval, MAX_PROBE_INTERVAL)
        self._num_trial_steps_left = TRIAL_STEPS - 1 if takes_time else 0
        return True


def _bold(candidates: Sequence[Candidate], prices: StepPrices) -> list[int]:
    """See PROBE_SHARE."""
    num_rows = prices.num_rows
    hopeful = replace(prices, step_s=lambda num_drafts: 1 + num_drafts / num_rows / 2)
    lengths = choose_lengths(candidates, hopeful)
    if any(lengths):
        return lengths
    return _probe(candidates, min(prices.max_num_drafts, -(-num_rows // PROBE_SHARE)))


def _probe(candidates: Sequence[Candidate], num_drafts: int) -> list[int]:
    """One draft for each of the `num_drafts` best candidates."""
    able = [i for i, candidate in enumerate(candidates) if candidate.max_num_drafts]
    able.sort(key=lambda i: -candidates[i].first)
    best = set(able[:num_drafts])
    return [int(i in best) for i in range(len(candidates))]
