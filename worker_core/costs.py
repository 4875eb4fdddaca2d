"""What things cost on this worker, learned from what they took: the ground of its choices between
two ways.

    local_prefill_threshold  compute a prompt's missing tokens here, or await them from a prefill
                             worker
    max_prefill_tokens       how much of a prompt to compute beside sequences that decode
    prefill_tokens_per_s     how fast prompts are computed here as things are: reported to gateways,
                             which share prompts between the tiers by it
    is_swap_cheaper          keep a preempted sequence's KV in host memory, or have it computed anew
    is_fetch_cheaper         fetch a prefix from a sequence's destination, or compute it

Times are fitted to recent observations, so that the fits follow the machine. Pure but for their
state.
"""

from __future__ import annotations

import math

from worker_core.policy import LocalPrefillPolicy

#: What an observation's weight is after one more.
_FADING = 0.98
#: Observations before a fit is believed.
_MIN_OBSERVATIONS = 4
#: Assumed until the first copy: both ways together, in bytes a second.
_ASSUMED_COPY_BYTES_PER_S = 2e9
#: Fewer tokens are never fetched: the round trip alone takes longer.
MIN_FETCHED_TOKENS = 32
#: Assumed until a prefix was fetched: seconds of a round trip, and bytes a second.
_ASSUMED_FETCH_S, _ASSUMED_FETCH_BYTES_PER_S = 0.005, 5e8
#: While computing is estimated to be faster, one chance in so many is fetched all the same, to
#: measure it.
_TRY_EVERY = 50


class Costs:
    """What this worker has learned of its own and its peers' speed. Times in seconds."""

    def __init__(self, policy: LocalPrefillPolicy, token_bytes: int) -> None:
        """token_bytes: of KV of one token."""
        self.policy = policy
        self._token_bytes = token_bytes
        self.handoff = LinearFit()
        """From a ticket's offer to its commit, all of the prefill tier in between, by missing
        tokens."""
        self._decode = LinearFit()
        self._prefill = LinearFit()
        self._prefill_beside = LinearFit()
        """Whole gaps, in which so many tokens of prompts were computed."""
        self._budget = ItlBudget()
        self._num_short_tokens = 0
        """Of the last small chunk that was allowed."""
        self.copy = LinearFit()
        """Of KV to host memory, or back, by bytes."""
        self.fetch = LinearFit()
        """Of KV from a sequence's destination, by tokens."""
        self._num_fetch_chances = 0

    def observe_step(self, num_decode_tokens: int, num_prefill_tokens: int, seconds: float) -> None:
        """A step that computed so many tokens of sequences that decode, drafts and beams among
        them, and so many of prompts.

        Tokens, not sequences, are what a step's time follows; a step with part of a prompt has no
        drafts, so that beside it each sequence counts as one.
        """
        if not num_prefill_tokens:
            self._decode.observe(num_decode_tokens, seconds)
            return
        beside_s = self._decode.predict(num_decode_tokens) if num_decode_tokens else 0.0
        self._prefill.observe(num_prefill_tokens, max(0.0, seconds - beside_s))

    def observe_gaps(self, num_decoding: int, num_prefill_tokens: int, gap_s: float) -> None:
        """After that: from the end of the step before, if sequences decoded in it, to the end of
        this one; the step's own time if none did."""
        if not num_prefill_tokens:
            self._budget.on_step(num_decoding, gap_s, self._decode.predict(num_decoding))
            return
        is_long = num_prefill_tokens > self._num_short_tokens
        self._budget.on_step_beside(num_decoding, is_long=is_long)
        self._prefill_beside.observe(num_prefill_tokens, gap_s)

    def local_prefill_threshold(self, num_decoding: int) -> int:
        """Most missing tokens that are better computed here, where each delays all that decode,
        than awaited."""
        policy = self.policy
        known = min(self.handoff.num_observations, self._prefill.num_observations)
        if policy.is_pinned or known < _MIN_OBSERVATIONS:
            return policy.default_threshold
        gain = self.handoff.fixed - self._prefill.fixed
        loss_per_token = self._prefill.slope * (1 + num_decoding) - self.handoff.slope
        if loss_per_token <= 0:
            return policy.max_threshold
        return min(max(int(gain / loss_per_token), 0), policy.max_threshold)

    def max_prefill_tokens(
        self, num_decoding: int, max_num_batched_tokens: int, num_wanted: int = 0
    ) -> int:
        """Tokens of prompts that a step may compute beside `num_decoding` sequences, for their next
        tokens not to wait long. num_wanted: missing tokens of the prompt that comes first."""
        policy = self.policy
        if policy.max_itl_factor is None or not (num_decoding or policy.max_shared_tokens):
            return max_num_batched_tokens
        if not num_decoding:
            return min(policy.alone_chunk_tokens, max_num_batched_tokens)
        num_short = policy.min_chunk_tokens
        # A few short prompts may all have taken the same time, which says nothing of a long one.
        if token_s := self._prefill.slope or self._prefill.rate:
            decode_s = self._decode.predict(num_decoding)
            most_s = (policy.max_itl_factor - 1) * decode_s
            spare_s = min(self._budget.spare_s(decode_s), most_s)
            num_short = max(int(spare_s / token_s), num_short)
        self._num_short_tokens = num_short = min(num_short, max_num_batched_tokens)
        is_long = num_wanted > num_short and self._budget.allows_long(num_decoding)
        return max_num_batched_tokens if is_long else num_short

    def prefill_tokens_per_s(self, num_decoding: int, max_num_batched_tokens: int) -> int:
        """At which prompts are computed beside `num_decoding` sequences; 0 if it is not known."""
        if self._prefill.num_observations < _MIN_OBSERVATIONS:
            return 0
        is_beside = num_decoding > 0 and self.policy.max_itl_factor is not None
        if is_beside and self._prefill_beside.num_observations >= _MIN_OBSERVATIONS:
            return _per_s(1, self._prefill_beside.rate)
        num_tokens = self.max_prefill_tokens(num_decoding, max_num_batched_tokens)
        beside_s = self._decode.predict(num_decoding) if is_beside else 0.0
        return _per_s(num_tokens, beside_s + self._prefill.predict(num_tokens))

    def is_swap_cheaper(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether KV is sooner out and back again than computed anew by the prefill tier, as far as
        is known."""
        copy_s = self.copy.predict(num_bytes) * 2
        if not self.copy.num_observations:
            copy_s = num_bytes / _ASSUMED_COPY_BYTES_PER_S
        recompute = self.handoff if self.handoff.num_observations else self._prefill
        return not recompute.num_observations or copy_s < recompute.predict(num_tokens)

    def is_fetch_cheaper(self, num_tokens: int) -> bool:
        """Than to compute so many tokens of a prompt; or worth a try. False before it is known what
        computing takes."""
        if num_tokens < MIN_FETCHED_TOKENS or not self._prefill.num_observations:
            return False
        fetch_s = _ASSUMED_FETCH_S + num_tokens * self._token_bytes / _ASSUMED_FETCH_BYTES_PER_S
        if self.fetch.num_observations:
            fetch_s = self.fetch.predict(num_tokens)
        self._num_fetch_chances += 1
        is_try = self._num_fetch_chances % _TRY_EVERY == 0
        return is_try or fetch_s < self._prefill.predict(num_tokens)


def _per_s(num_tokens: int, seconds: float) -> int:
    """0 where no time passes: under a clock that stands still."""
    return int(num_tokens / seconds) if seconds > 0 else 0


class LinearFit:
    """seconds = fixed + slope * amount, neither below 0, by least squares with fading weights.

    rate: seconds per unit of amount if all time is put down to the amount: the most that the slope
    can be, and what it is without a spread of amounts.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._amount = 0.0
        self._seconds = 0.0
        self._amount_sq = 0.0
        self._product = 0.0
        self.num_observations = 0
        self.fixed = self.slope = self.rate = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        self.num_observations += 1
        self._weight = self._weight * _FADING + 1.0
        self._amount = self._amount * _FADING + amount
        self._seconds = self._seconds * _FADING + seconds
        self._amount_sq = self._amount_sq * _FADING + amount * amount
        self._product = self._product * _FADING + amount * seconds
        self.rate = self._seconds / self._amount if self._amount else 0.0
        spread = self._amount_sq - self._amount**2 / self._weight
        if spread <= 1e-9 * self._amount_sq:
            self.slope = self.rate
        else:
            slope = (self._product - self._amount * self._seconds / self._weight) / spread
            self.slope = min(max(slope, 0.0), self.rate)
        self.fixed = max(0.0, (self._seconds - self.slope * self._amount) / self._weight)

    def predict(self, amount: float) -> float:
        return self.fixed + self.slope * amount


#: 99th percentile of gaps beside small chunks of prompts, in units of that of gaps without.
TAIL_FACTOR = 1.2
#: Share of gaps that may be longer than that; and how many steps' worth of them is saved up at
#: most.
LONG_SHARE, MAX_LONG_STEPS = 0.003, 4

#: Gaps are kept by powers of this, so that the percentile is right to a twentieth; it is looked up
#: after so many steps, and older gaps weigh less then. What weighs next to nothing is dropped.
_LOG_RATIO = math.log(1.05)
_LOOKUP_STEPS, _GAP_FADING, _LEAST_WEIGHT = 64, 0.98, 1e-3
_SHORTEST_S = 1e-6


class _Percentile:
    """The 99th of what was observed lately, by weight. Times in seconds."""

    def __init__(self) -> None:
        self._weights: dict[int, float] = {}
        """Of times, by the power that they are rounded up to."""
        self._num_observations = 0
        self.value_s = 0.0

    def observe(self, seconds: float, weight: float) -> None:
        power = math.ceil(math.log(max(seconds, _SHORTEST_S)) / _LOG_RATIO)
        self._weights[power] = self._weights.get(power, 0.0) + weight
        if self._num_observations % _LOOKUP_STEPS == 0:
            self._look_up()
        self._num_observations += 1

    def _look_up(self) -> None:
        num_left = 0.01 * sum(self._weights.values())
        for power in sorted(self._weights, reverse=True):
            num_left -= self._weights[power]
            if num_left < 0:
                self.value_s = math.exp(power * _LOG_RATIO)
                break
        faded = ((power, weight * _GAP_FADING) for power, weight in self._weights.items())
        self._weights = {power: weight for power, weight in faded if weight > _LEAST_WEIGHT}


class ItlBudget:
    """How long next tokens may wait for prompts computed beside sequences that decode. Times in
    seconds.

    The measure is the worker's own: the 99th percentile of the gaps between two tokens, of steps
    without a prompt. A gap beside one may take TAIL_FACTOR times that, less the 99th percentile of
    what gaps take beyond the usual time of their step: others use the machine, too.

    The percentile says nothing of the longest gaps: LONG_SHARE of all may be of any length. This
    share is saved up while sequences decode, and spent on whole chunks of a prompt. Small chunks at
    any time and whole ones now and then give a prompt much more than small ones alone.
    """

    def __init__(self) -> None:
        self._gap = _Percentile()
        self._excess = _Percentile()
        self._num_saved = 0.0
        """Gaps that may be long."""

    def spare_s(self, step_s: float) -> float:
        """How much longer a step may take that takes so long without a prompt; 0 before anything is
        known."""
        return max(0.0, TAIL_FACTOR * self._gap.value_s - self._excess.value_s - step_s)

    def on_step(self, num_decoding: int, gap_s: float, step_s: float) -> None:
        """A step without a prompt ended so many gaps. step_s: what such a step usually takes."""
        self._gap.observe(gap_s, num_decoding)
        self._excess.observe(gap_s - step_s, num_decoding)
        self._save(num_decoding)

    def on_step_beside(self, num_decoding: int, *, is_long: bool) -> None:
        """A step with a prompt ended so many; is_long: with a whole chunk of it."""
        self._save(num_decoding)
        if is_long:
            self._num_saved -= num_decoding

    def allows_long(self, num_decoding: int) -> bool:
        """Whether the next tokens of so many sequences may wait for a whole chunk."""
        return self._num_saved >= num_decoding

    def _save(self, num_decoding: int) -> None:
        most = MAX_LONG_STEPS * num_decoding
        self._num_saved = min(self._num_saved + LONG_SHARE * num_decoding, most)
