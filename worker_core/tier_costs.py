"""What tiers of KV cost on this machine, learned from measurements: compute a prompt's tokens, or
read their KV from a tier. Pure but for its state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from worker_core.costs import Costs, LinearFit

#: Tokens of a read by which a tier as a whole is judged: a turn of a conversation.
_TYPICAL_TOKENS = 512
#: Weight of the last question in the share of questions that a shared tier could answer, and the
#: least share assumed, so that it is asked again.
_SHARE_WEIGHT, _MIN_SHARE = 0.1, 0.05
#: Adjacent blocks of a sample, about as many as a prompt has, and how many times as many are not
#: saved.
_SAMPLE_BLOCKS, _SAMPLE_EVERY = 64, 8


@dataclass(frozen=True, slots=True)
class Part:
    """Adjacent blocks of a prompt that one tier has, or may have. level: index of the tier."""

    level: int
    num_blocks: int


class TierCosts:
    """Learned speeds of a worker's tiers, latency included. Times in seconds."""

    def __init__(self, costs: Costs, num_levels: int, block_size: int, block_bytes: int) -> None:
        """costs: of the worker. block_size: in tokens; block_bytes: of a record."""
        self._costs = costs
        self._block_size, self._block_bytes = block_size, block_bytes
        self.reads = [LinearFit() for _ in range(num_levels)]
        """Reads, by bytes, from decision to use."""
        self._shares = [1.0] * num_levels
        self.saved_s = [0.0] * num_levels
        self.lost_s = [0.0] * num_levels

    def pays(self, level: int) -> bool:
        """Whether a read of typical length is estimated faster than computing. False before either
        was measured."""
        return self._gain_s(level, -(-_TYPICAL_TOKENS // self._block_size)) > 0

    def num_worth(self, parts: Sequence[Part], is_shared: Sequence[bool]) -> int:
        """Leading blocks to fetch, of parts found by tier: up to the first part that would take
        longer to read than to compute. is_shared: by level, whether the tier has to be asked."""
        num_blocks = 0
        for part in parts:
            gain_s = self._gain_s(part.level, part.num_blocks)
            if is_shared[part.level]:
                # A part that is not there costs the question.
                share = max(self._shares[part.level], _MIN_SHARE)
                gain_s = share * gain_s - (1 - share) * self.reads[part.level].fixed
            if gain_s <= 0:
                break
            num_blocks += part.num_blocks
        return num_blocks

    def expected_s(self, parts: Iterable[tuple[int, int]]) -> float:
        """Estimated time of reading (level, number of blocks) each, one after another."""
        return sum(self.reads[level].predict(num * self._block_bytes) for level, num in parts)

    def observe_read(self, level: int, num_bytes: int, seconds: float) -> None:
        self.reads[level].observe(num_bytes, seconds)

    def observe_share(self, level: int, share: float) -> None:
        """Record which share of the blocks that a shared tier was asked for it had."""
        self._shares[level] += _SHARE_WEIGHT * (share - self._shares[level])

    def observe_use(self, level: int, num_blocks: int, seconds: float) -> None:
        """Record that a prompt waited so long for blocks of a tier."""
        computing_s = self._costs.recompute_s(num_blocks * self._block_size) if num_blocks else 0.0
        gain_s = (computing_s or 0.0) - seconds
        (self.saved_s if gain_s > 0 else self.lost_s)[level] += abs(gain_s)

    def _gain_s(self, level: int, num_blocks: int) -> float:
        """Time of computing blocks less that of reading them; negative if either is unknown."""
        computing_s = self._costs.recompute_s(num_blocks * self._block_size)
        if computing_s is None or not self.reads[level].num_observations:
            return -1.0
        return computing_s - self.reads[level].predict(num_blocks * self._block_bytes)


class SavingGain:
    """Decides whether saving blocks is worth its copies, by what came of it. All are saved until
    num_trial_blocks were and none was read; then one run of _SAMPLE_BLOCKS in _SAMPLE_EVERY, so
    that a load that comes back is noticed; and all again after a read."""

    def __init__(self, num_trial_blocks: int) -> None:
        self._num_trial_blocks = num_trial_blocks
        self._num_offered = 0
        """Blocks since the last read."""

    def wants(self, num_blocks: int) -> bool:
        """Whether to save the next num_blocks."""
        run = self._num_offered // _SAMPLE_BLOCKS
        is_trial = self._num_offered < self._num_trial_blocks
        self._num_offered += num_blocks
        return is_trial or run % _SAMPLE_EVERY == 0

    def on_read(self) -> None:
        """Saved blocks were read, and that paid."""
        self._num_offered = 0
