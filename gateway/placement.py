"""A sequence's claim on the workers it was given to."""

from __future__ import annotations

import logging

from baton.types import NumericsClass, Tier
from gateway.fleet import Fleet, Worker

_log = logging.getLogger(__name__)


class Placement:
    """A sequence's claim on workers, counted in the fleet from the start until it is released. Release is idempotent."""

    def __init__(
        self,
        fleet: Fleet,
        placement_id: int,
        prefill: Worker | None,
        decode: Worker | None,
        num_prefill_tokens: int,
        num_blocks: int,
        num_sequences: int = 1,
    ) -> None:
        """num_prefill_tokens: those that the prefill worker probably has to compute, at least 1.
        num_sequences: those that it will be on the decode worker."""
        self.prefill = prefill
        self.decode = decode
        # Those of now: after a loss the same address gets another link.
        self.prefill_link = prefill.prefill_link if prefill else None
        self.decode_link = decode.decode_link if decode else None
        self._fleet = fleet
        self._id = placement_id
        self._prefill_tokens = num_prefill_tokens if prefill else 0
        self._num_sequences = num_sequences if decode else 0
        if prefill:
            prefill.num_in_flight += 1
            prefill.outstanding_tokens += num_prefill_tokens
            fleet.prefill_work.give(prefill.address, num_prefill_tokens)
        if decode:
            decode.num_in_flight += num_sequences
            decode.reserve_blocks(placement_id, num_blocks)

    @property
    def prefill_name(self) -> str:
        """The prefill worker's id; empty if there is none."""
        return _name_of(self.prefill)

    @property
    def decode_name(self) -> str:
        """The decode worker's id; empty if there is none."""
        return _name_of(self.decode)

    @property
    def numerics(self) -> NumericsClass | None:
        """Of the worker that the first token comes from; None if it has told nothing."""
        worker = self.prefill or self.decode
        return worker.info.numerics if worker and worker.info else None

    def bypasses_split(self, num_missing_tokens: int) -> bool:
        """Whether a decode worker that computes so many tokens does what the prefill workers named should do."""
        info = self.decode.info if self.decode else None
        if info is None or num_missing_tokens <= info.max_local_prefill_tokens:
            return False
        return bool(self._fleet.tier(Tier.PREFILL))

    def settle(self) -> None:
        """The decode worker has reserved what it needs; its reports count it from now on."""
        if self.decode and self._num_sequences:
            self.decode.settle(self._id)

    def defer(self) -> None:
        """The decode worker had no room after all."""
        if self.decode:
            self.decode.is_awaiting_report = True

    def suspect_prefill(self) -> None:
        """The prefill worker could not be reached."""
        if self.prefill:
            self._fleet.suspect(self.prefill.address)

    def note_undelivered(self, sender: Worker | None, why: str, now_s: float) -> None:
        """A worker could not deliver KV to the decode worker."""
        decode = self.decode
        if sender is None or decode is None or not (sender.is_joined and decode.is_joined):
            return
        rest_s = self._fleet.broken_pairs.note(sender.address, decode.address, now_s)
        if rest_s is not None:
            _log.warning(
                "worker %s could not deliver KV to %s, and is not paired with it for %g s: %s",
                _name_of(sender),
                self.decode_name,
                rest_s,
                why,
            )

    def release_prefill(self) -> None:
        """The prefill worker is done with the sequence, or was not needed."""
        if self.prefill and self._prefill_tokens:
            self.prefill.num_in_flight -= 1
            self.prefill.outstanding_tokens -= self._prefill_tokens
            self._prefill_tokens = 0
            self._fleet.changed()

    def release_one(self) -> None:
        """One of several sequences has left the decode worker."""
        if self.decode and self._num_sequences > 1:
            self._num_sequences -= 1
            self.decode.num_in_flight -= 1
            self._fleet.changed()

    def release(self) -> None:
        """Nothing is left on either worker."""
        self.release_prefill()
        if self.decode and self._num_sequences:
            self.decode.num_in_flight -= self._num_sequences
            self._num_sequences = 0
            self.decode.drop_blocks(self._id)
            self._fleet.changed()


def _name_of(worker: Worker | None) -> str:
    return worker.info.identity.worker_id if worker and worker.info else ""
