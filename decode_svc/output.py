"""From what a step drew to what sequences become: tokens are told, choices and beams part, outputs end."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.guard import SliceOutcome
from baton.engine.rows import num_scored_rows, wants_prompt_logprobs
from baton.errors import BatonError
from baton.events import PromptScored, Tokens
from baton.types import FinishReason, Sample, finish_reason
from decode_svc.beam_group import BeamGroup
from decode_svc.sequence import DecodeSequence, Stage
from decode_svc.speculation.verify import verify
from decode_svc.state import DecodeState


class Output:
    """Takes outcomes of slices to the sequences they are of."""

    def __init__(self, state: DecodeState) -> None:
        self._state = state

    def advance(
        self,
        sequence: DecodeSequence,
        num_new: int,
        outcome: SliceOutcome,
        drafts: tuple[int, ...] = (),
    ) -> None:
        """A step computed `num_new` more tokens of a sequence, and drew what its slice asked for, also after each draft."""
        if isinstance(outcome, BatonError):
            self._state.fail(sequence, outcome)
            return
        if sequence.has_begun:
            sequence.num_computed_tokens += num_new
            if drafts:
                num_accepted = verify(drafts, [sample.token_id for sample in outcome])
                outcome = outcome[: num_accepted + 1]
            self._produce(sequence, outcome, len(drafts))
            return
        spec = sequence.spec
        num_scored = num_scored_rows(spec, sequence.num_computed_tokens, num_new)
        scored, drawn = outcome[:num_scored], outcome[num_scored:]
        sequence.prompt_logprobs += [s.logprobs for s in scored if s.logprobs]
        sequence.num_computed_tokens += num_new
        if not drawn:
            return
        if wants_prompt_logprobs(spec):
            self._state.emit(sequence, PromptScored(tuple(sequence.prompt_logprobs)))
        self.produce_firsts(sequence, drawn)

    def produce_firsts(self, sequence: DecodeSequence, firsts: tuple[Sample, ...]) -> None:
        """What follows the sequence as it was opened, one sample for each choice. Its choices, or its beams, part here."""
        if sequence.spec.sampling.beam:
            self._start_beams(sequence, firsts[0])
        elif sequence.spec.num_choices == 1:
            self._produce(sequence, firsts)
        else:
            self._part(sequence, firsts)

    def advance_beams(self, group: BeamGroup, outcomes: Sequence[SliceOutcome]) -> None:
        """A step drew the candidates of all beams of a group."""
        samples: list[Sample] = []
        for outcome in outcomes:
            if isinstance(outcome, BatonError):
                self._state.fail(group, outcome)
                return
            samples += outcome
        group.advance(samples)
        self._end_if_over(group)

    def _part(self, group: DecodeSequence, firsts: tuple[Sample, ...]) -> None:
        """Each choice becomes a sequence of its own, with the group's blocks."""
        self._state.forget(group)
        num_computed = group.num_computed_tokens
        group.lease.index(group.token_ids, num_computed)
        for offset in group.choices:
            choice = DecodeSequence(
                group.stream,
                group.handle + offset,
                group.spec.choice_alone(offset),
                group.lease.fork(num_computed),
                Stage.RUNNING,
                num_computed,
                order=group.order,
            )
            self._state.put(choice)
            self._produce(choice, (firsts[offset],))
        group.lease.release()

    def _produce(
        self, sequence: DecodeSequence, samples: tuple[Sample, ...], num_drafts: int = 0
    ) -> None:
        """Add tokens, up to the one that ends the output, and tell them. All but the last were computed as drafts."""
        token_index = sequence.num_output_tokens
        token_ids, sampling = sequence.token_ids, sequence.spec.sampling
        num_told, finish = 0, FinishReason.NONE
        for sample in samples:
            token_ids.append(sample.token_id)
            num_told += 1
            finish = finish_reason(
                sample.token_id,
                token_index + num_told,
                len(token_ids),
                sampling,
                self._state.spec.max_model_len,
            )
            if finish is not FinishReason.NONE:
                break
        num_accepted = num_told - 1
        sequence.num_computed_tokens += num_accepted
        tokens = Tokens(token_index, samples[:num_told], finish, num_drafts, num_accepted)
        self._state.emit(sequence, tokens)
        if finish is not FinishReason.NONE:
            self._state.leave(sequence)

    def _start_beams(self, root: DecodeSequence, first: Sample) -> None:
        root.lease.index(root.token_ids, root.num_computed_tokens)
        group = BeamGroup(root, first, self._state.pool, self._state.spec.max_model_len)
        self._state.put(group)
        self._end_if_over(group)

    def _end_if_over(self, group: BeamGroup) -> None:
        """Tell the outputs of a search that has ended; of fewer outputs than asked for, the rest is empty."""
        if not group.is_over:
            return
        nothing = Tokens(0, (), FinishReason.STOP, score=float("-inf"))
        found = [
            Tokens(0, tuple(map(Sample, output.token_ids)), output.finish, score=output.score)
            for output in group.outputs
        ]
        for place in range(group.spec.num_choices):
            event = found[place] if place < len(found) else nothing
            self._state.tell(group.stream, group.handle + place, event)
        self._state.leave(group)
