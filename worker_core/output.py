"""Post-processing of a step: emits tokens, forks choices and beams, hands prompts off, and ends
outputs."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import BatonError, Cancelled
from baton.events import Prefilled, Tokens
from baton.types import FinishReason, Sample, finish_reason
from engine.interface import SliceOutcome, num_scored_rows
from worker_core.beam_group import BeamGroup
from worker_core.handoff import Handoffs
from worker_core.sequence import Stage, WorkerSequence
from worker_core.state import CoreState


class OutputProcessor:
    """Applies the outcomes of slices to their sequences."""

    def __init__(self, state: CoreState, handoffs: Handoffs) -> None:
        self._state = state
        self._handoffs = handoffs

    def advance(
        self,
        sequence: WorkerSequence,
        num_new: int,
        outcome: SliceOutcome,
        num_drafts: int = 0,
    ) -> None:
        """Apply a step that computed `num_new` tokens of a sequence and sampled as its slice
        requested; with drafts, the confirmed ones and the token after them."""
        if isinstance(outcome, BatonError):
            self._handoffs.cancel(sequence, outcome.reason, outcome.message)
            self._state.fail(sequence, outcome)
            return
        if sequence.has_begun:
            sequence.num_computed_tokens += num_new
            self._produce(sequence, outcome, num_drafts)
            return
        self._advance_prefill(sequence, num_new, outcome)

    def _advance_prefill(
        self, sequence: WorkerSequence, num_new: int, samples: tuple[Sample, ...]
    ) -> None:
        """Advance the prefill by `num_new` tokens."""
        start = sequence.num_computed_tokens
        num_scored = num_scored_rows(sequence.spec, start, num_new) if sequence.is_scored else 0
        scored, drawn = samples[:num_scored], samples[num_scored:]
        sequence.num_computed_tokens += num_new
        sequence.lease.index(sequence.token_ids, sequence.num_computed_tokens)
        sequence.lease.slide(sequence.token_ids, sequence.num_computed_tokens)
        progress = sequence.prefill
        if progress:
            progress.logprobs += [sample.logprobs for sample in scored if sample.logprobs]
        if not drawn:
            return
        if progress:
            prefilled = Prefilled(
                progress.num_cached_tokens,
                progress.num_fetched_tokens,
                (progress.started_s - progress.arrived_s) * 1e3,
                (self._state.clock() - progress.started_s) * 1e3,
                tuple(progress.logprobs),
                tuple(progress.chunks),
            )
            self._state.emit(sequence, prefilled)
        if sequence.destination:
            self._hand_off(sequence, drawn)
        else:
            self.produce_first_tokens(sequence, drawn)

    def _hand_off(self, sequence: WorkerSequence, first_tokens: tuple[Sample, ...]) -> None:
        """Hand off a computed prompt: emit the first tokens and send them with the KV, unless they
        end all choices."""
        spec = sequence.spec
        if spec.sampling.beam:
            self._handoffs.commit(sequence, first_tokens)
            return
        token_index = len(spec.output_token_ids)
        for offset, sample in enumerate(first_tokens):
            finish = finish_reason(
                sample.token_id,
                token_index + 1,
                spec.num_tokens + 1,
                spec.sampling,
                self._state.spec.max_model_len,
            )
            if finish is FinishReason.NONE and sequence.reporting_choice is None:
                sequence.reporting_choice = offset
            event = Tokens(token_index, (sample,), finish)
            self._state.emit_at(sequence.stream, sequence.handle + offset, event)
        if sequence.reporting_choice is not None:
            self._handoffs.commit(sequence, first_tokens)
            if spec.num_choices == 1:
                sequence.token_ids.append(first_tokens[0].token_id)
                sequence.begin(self._state.clock())
        else:
            self._handoffs.cancel(sequence, Cancelled.reason, "the first token ended the output")
            self._state.leave(sequence)

    def produce_first_tokens(
        self, sequence: WorkerSequence, first_tokens: tuple[Sample, ...]
    ) -> None:
        """Fork the choices or beams. first_tokens: one sample per choice."""
        if sequence.spec.sampling.beam:
            self._start_beams(sequence, first_tokens[0])
        elif sequence.spec.num_choices == 1:
            self._produce(sequence, first_tokens)
        else:
            self._fork(sequence, first_tokens)

    def advance_beams(self, group: BeamGroup, outcomes: Sequence[SliceOutcome]) -> None:
        """Advance a beam group by the candidates of all its beams."""
        samples: list[Sample] = []
        for outcome in outcomes:
            if isinstance(outcome, BatonError):
                self._state.fail(group, outcome)
                return
            samples += outcome
        group.advance(samples)
        self._end_if_over(group)

    def _fork(self, group: WorkerSequence, first_tokens: tuple[Sample, ...]) -> None:
        """Turn each choice into a sequence of its own that shares the group's blocks."""
        self._state.forget(group)
        num_computed = group.num_computed_tokens
        group.lease.index(group.token_ids, num_computed)
        for offset in group.choices:
            choice = WorkerSequence(
                group.stream,
                group.handle + offset,
                group.spec.choice_alone(offset),
                group.lease.fork(num_computed),
                Stage.RUNNING,
                num_computed,
                matcher_future=group.matcher_future,
            )
            self._state.put(choice)
            self._produce(choice, (first_tokens[offset],))
        group.lease.release()

    def _produce(
        self, sequence: WorkerSequence, samples: tuple[Sample, ...], num_drafts: int = 0
    ) -> None:
        """Add and emit tokens up to the end of the output. All samples but the last are confirmed
        drafts."""
        is_first = not sequence.has_begun
        token_index = len(sequence.token_ids) - sequence.num_prompt_tokens
        token_ids, sampling = sequence.token_ids, sequence.spec.sampling
        num_new, finish = 0, FinishReason.NONE
        for sample in samples:
            token_ids.append(sample.token_id)
            num_new += 1
            finish = finish_reason(
                sample.token_id,
                token_index + num_new,
                len(token_ids),
                sampling,
                self._state.spec.max_model_len,
            )
            if finish is not FinishReason.NONE:
                break
        if is_first:
            sequence.begin(self._state.clock())
        num_accepted = num_new - 1
        sequence.num_computed_tokens += num_accepted
        tokens = Tokens(token_index, samples[:num_new], finish, num_drafts, num_accepted)
        self._state.emit(sequence, tokens)
        if finish is not FinishReason.NONE:
            self._state.leave(sequence)
        else:
            sequence.lease.slide(token_ids, sequence.num_computed_tokens)

    def _start_beams(self, root: WorkerSequence, first: Sample) -> None:
        root.lease.index(root.token_ids, root.num_computed_tokens)
        group = BeamGroup(root, first, self._state.pool, self._state.spec.max_model_len)
        self._state.put(group)
        self._end_if_over(group)

    def _end_if_over(self, group: BeamGroup) -> None:
        """Emit the outputs of an ended search; missing outputs are empty."""
        if not group.is_over:
            return
        nothing = Tokens(0, (), FinishReason.STOP, score=float("-inf"))
        found = [
            Tokens(0, tuple(map(Sample, output.token_ids)), output.finish, score=output.score)
            for output in group.outputs
        ]
        for place in range(group.spec.num_choices):
            event = found[place] if place < len(found) else nothing
            self._state.emit_at(group.stream, group.handle + place, event)
        self._state.leave(group)
