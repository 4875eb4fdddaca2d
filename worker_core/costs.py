"""Costs on this worker, learned from measurements, for choices between two alternatives.

    local_prefill_threshold  compute missing prompt tokens here, or await a prefill worker's KV
    max_prefill_tokens       prompt tokens to compute beside decoding sequences
    prefill_tokens_per_s     current prefill speed, reported to gateways, which balance prompts
                             between the tiers by it
    is_swap_cheaper          swap a preempted sequence's KV to host memory, or recompute it
    is_fetch_cheaper         fetch a prefix from a sequence's destination, or compute it

Times are fitted to recent observations, so that the fits follow the machine. Pure but for their
state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import mul

from baton.types import StepCosts
from worker_core.gap_rule import GapBudget, Pace
from worker_core.policy import LocalPrefillPolicy

#: Factor on an observation's weight at each later observation.
_FADING = 0.98
#: The same for costs that are published: they are used for other batches than those measured, so
#: the slope has to be right.
_SLOW_FADING = 0.998
#: Terms of a step's time; and how much the fit of all of them is held to what is known, relative
#: to what the steps say. The least value of a pivot.
_NUM_TERMS, _DAMPING, _TINY = 4, 1e-4, 1e-12
#: Minimum observations for an estimate.
_MIN_OBSERVATIONS = 4
#: For published costs, a step counts as at most so many times as long as expected: one in which the
#: machine stood still would say that a sequence takes as long as a step. From so many observations
#: on.
_LONGEST, _OBSERVATIONS_TO_EXPECT = 4.0, 16
#: Assumed speed of copies until the first one, both directions together, in bytes per second.
_ASSUMED_COPY_BYTES_PER_S = 2e9
#: Minimum tokens of a fetch; for fewer, the round trip alone takes longer.
MIN_FETCHED_TOKENS = 32
#: Assumed round trip in seconds, and bytes per second, until the first fetch.
_ASSUMED_FETCH_S, _ASSUMED_FETCH_BYTES_PER_S = 0.005, 5e8
#: While computing seems faster, one of this many opportunities is fetched nevertheless, as a
#: measurement.
_TRY_EVERY = 50


class Costs:
    """Learned speeds of this worker and its peers. Times in seconds."""

    def __init__(self, policy: LocalPrefillPolicy, token_bytes: int) -> None:
        """token_bytes: KV bytes per token."""
        self._policy = policy
        self._token_bytes = token_bytes
        self.handoff = LinearFit()
        """Ticket offer to commit, including all of the prefill tier, by missing tokens."""
        self._by_threads: dict[int, _StepFits] = {}
        self.num_threads = 0
        self._budget = _budget_of(policy)
        self._num_short_tokens = 0
        """Tokens of the last small chunk granted."""
        self.copy = LinearFit()
        """KV copies to and from host memory, by bytes."""
        self.fetch = LinearFit()
        """Prefix fetches from destinations, by tokens."""
        self._num_fetch_chances = 0

    @property
    def num_threads(self) -> int:
        """Threads that steps are computed with; steps of another number have fits of their own."""
        return self._num_threads

    @num_threads.setter
    def num_threads(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._fits = self._by_threads.setdefault(num_threads, _StepFits())

    def of_steps(self) -> StepCosts:
        """Costs of steps, as far as they were measured often enough."""
        decode, prefill = self._fits.published, self._fits.prefill
        has_decoded = decode.num_observations >= _MIN_OBSERVATIONS
        has_computed = prefill.num_observations >= _MIN_OBSERVATIONS
        return StepCosts(
            *((decode.fixed, decode.slope) if has_decoded else (0.0, 0.0)),
            *((prefill.fixed, prefill.slope) if has_computed else (0.0, 0.0)),
        )

    @property
    def policy(self) -> LocalPrefillPolicy:
        return self._policy

    @policy.setter
    def policy(self, policy: LocalPrefillPolicy) -> None:
        if policy.gap_rule != self._policy.gap_rule:
            self._budget = _budget_of(policy)
        self._policy = policy

    def observe_step(self, num_decode_tokens: int, num_prefill_tokens: int, seconds: float) -> None:
        """Record a step with this many decode tokens, including drafts and beams, and prompt
        tokens.

        The time of a step depends on tokens, not sequences. Steps with prompt tokens have no
        drafts, so each decoding sequence counts as one there. A step with both is parted between
        the two by a fit of all steps. A busy worker may have no step without a prompt: until there
        were some, the parts teach what decoding takes.
        """
        fits = self._fits
        fits.num_decoding_alone += not num_prefill_tokens
        decode_s = 0.0 if num_prefill_tokens else seconds
        fits.parting.observe(num_decode_tokens, num_prefill_tokens, seconds)
        if num_decode_tokens and num_prefill_tokens:
            decode_s = min(seconds, fits.parting.decode_s(num_decode_tokens, fits))
        if num_decode_tokens and (
            not num_prefill_tokens or fits.num_decoding_alone < _MIN_OBSERVATIONS
        ):
            fits.decode.observe(num_decode_tokens, decode_s)
            fits.publish(num_decode_tokens, decode_s)
        if num_prefill_tokens:
            fits.prefill.observe(num_prefill_tokens, seconds - decode_s)

    def observe_gaps(self, num_decoding: int, num_prefill_tokens: int, gap_s: float) -> None:
        """Record the gap after `observe_step`: from the end of the previous step, if sequences
        decoded in it, to the end of this one; otherwise the step's own time."""
        budget = self._budget
        if not num_prefill_tokens:
            if budget:
                budget.on_step(num_decoding, gap_s, self._fits.decode.predict(num_decoding))
            return
        if budget:
            is_long = num_prefill_tokens > self._num_short_tokens
            budget.on_step_beside(num_decoding, is_long=is_long)
        self._fits.beside.observe(num_prefill_tokens, gap_s)

    def local_prefill_threshold(self, num_decoding: int) -> int:
        """Maximum missing tokens for which computing here, which delays all decoding sequences, is
        cheaper than awaiting KV."""
        policy = self.policy
        known = min(self.handoff.num_observations, self._fits.prefill.num_observations)
        if policy.is_pinned or known < _MIN_OBSERVATIONS:
            return policy.default_threshold
        gain = self.handoff.fixed - self._fits.prefill.fixed
        loss_per_token = self._fits.prefill.slope * (1 + num_decoding) - self.handoff.slope
        if loss_per_token <= 0:
            return policy.max_threshold
        return min(max(int(gain / loss_per_token), 0), policy.max_threshold)

    def max_prefill_tokens(
        self,
        num_decoding: int,
        max_num_batched_tokens: int,
        num_wanted: int = 0,
        paces: Iterable[Pace] = (),
    ) -> int:
        """Maximum prompt tokens of a step beside `num_decoding` sequences within what the gap rule
        allows. num_wanted: missing tokens of the first prompt. paces: of the decoding sequences."""
        policy, budget = self.policy, self._budget
        if budget is None or not (num_decoding or policy.max_shared_tokens):
            return max_num_batched_tokens
        if not num_decoding:
            return min(policy.alone_chunk_tokens, max_num_batched_tokens)
        num_short = policy.min_chunk_tokens
        # Short prompts that all took the same time have no slope; the rate is then an upper bound
        # for long ones.
        if token_s := self._fits.prefill.slope or self._fits.prefill.rate:
            spare_s = budget.spare_s(self._fits.decode.predict(num_decoding), paces)
            num_short = max(int(spare_s / token_s), num_short)
        self._num_short_tokens = num_short = min(num_short, max_num_batched_tokens)
        is_long = num_wanted > num_short and budget.allows_long(num_decoding)
        return max_num_batched_tokens if is_long else num_short

    def step_s(self, num_decode_tokens: int, num_prefill_tokens: int) -> float:
        """Estimated seconds of a step."""
        decode_s = self._fits.decode.predict(num_decode_tokens) if num_decode_tokens else 0.0
        prefill_s = self._fits.prefill.predict(num_prefill_tokens) if num_prefill_tokens else 0.0
        return decode_s + prefill_s

    def prefill_tokens_per_s(self, num_decoding: int, max_num_batched_tokens: int) -> int:
        """Prefill speed beside `num_decoding` sequences, in tokens per second; 0 if unknown."""
        if self._fits.prefill.num_observations < _MIN_OBSERVATIONS:
            return 0
        is_beside = num_decoding > 0 and self._budget is not None
        if is_beside and self._fits.beside.num_observations >= _MIN_OBSERVATIONS:
            return _per_s(1, self._fits.beside.rate)
        rule = self.policy.gap_rule
        steady = (Pace(rule.tpot_s, 1, rule.tpot_s),) if rule and rule.tpot_s is not None else ()
        num_tokens = self.max_prefill_tokens(num_decoding, max_num_batched_tokens, paces=steady)
        beside_s = self._fits.decode.predict(num_decoding) if is_beside else 0.0
        return _per_s(num_tokens, beside_s + self._fits.prefill.predict(num_tokens))

    def is_swap_cheaper(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether swapping KV out and in is estimated faster than recomputing it in the prefill
        tier."""
        copy_s = self.copy.predict(num_bytes) * 2
        if not self.copy.num_observations:
            copy_s = num_bytes / _ASSUMED_COPY_BYTES_PER_S
        recompute_s = self.recompute_s(num_tokens)
        return recompute_s is None or copy_s < recompute_s

    def is_fetch_cheaper(self, num_tokens: int) -> bool:
        """Whether fetching is estimated faster than computing `num_tokens` prompt tokens, or is due
        as a measurement. False before the prefill speed is known."""
        if num_tokens < MIN_FETCHED_TOKENS or not self._fits.prefill.num_observations:
            return False
        fetch_s = _ASSUMED_FETCH_S + num_tokens * self._token_bytes / _ASSUMED_FETCH_BYTES_PER_S
        if self.fetch.num_observations:
            fetch_s = self.fetch.predict(num_tokens)
        self._num_fetch_chances += 1
        is_try = self._num_fetch_chances % _TRY_EVERY == 0
        return is_try or fetch_s < self._fits.prefill.predict(num_tokens)

    def recompute_s(self, num_tokens: int) -> float | None:
        """Estimated seconds of computing the KV of `num_tokens` tokens anew, in the prefill tier if
        this worker uses it; None before the first measurement."""
        recompute = self.handoff if self.handoff.num_observations else self._fits.prefill
        return recompute.predict(num_tokens) if recompute.num_observations else None


def _budget_of(policy: LocalPrefillPolicy) -> GapBudget | None:
    return policy.gap_rule.new_budget() if policy.gap_rule else None


def _per_s(num_tokens: int, seconds: float) -> int:
    """Tokens per second; 0 if no time has passed (stopped test clock)."""
    return int(num_tokens / seconds) if seconds > 0 else 0


class _StepFits:
    """Of steps with one number of threads."""

    def __init__(self) -> None:
        self.decode = LinearFit()
        self.published = LinearFit(_SLOW_FADING)
        """Decoding by its tokens, both: of steps without a prompt, and of the rest of others until
        there were some."""
        self.prefill = LinearFit()
        """What prompts add to a step, by their tokens."""
        self.beside = LinearFit()
        """Gaps of steps with a prompt, by prompt tokens."""
        self.parting = _Parting()
        self.num_decoding_alone = 0
        """Steps without a prompt."""

    def publish(self, num_decode_tokens: int, seconds: float) -> None:
        """Observe what decoding took, for others."""
        if self.published.num_observations >= _OBSERVATIONS_TO_EXPECT:
            seconds = min(seconds, _LONGEST * self.published.predict(num_decode_tokens))
        self.published.observe(num_decode_tokens, seconds)


class _Parting:
    """Least squares of all steps, with exponentially decaying weights: decoding has a fixed time
    and one for each token, so have prompts, and a step with both has no fixed time of prompts, for
    it reads the weights once.

    Where the steps do not tell these apart, as chunks that fill each step up to the same time, what
    the fits of either kind say is kept.
    """

    def __init__(self) -> None:
        self._squares = [[0.0] * _NUM_TERMS for _ in range(_NUM_TERMS)]
        self._products = [0.0] * _NUM_TERMS

    def observe(self, num_decode_tokens: int, num_prefill_tokens: int, seconds: float) -> None:
        is_decoding = num_decode_tokens > 0
        terms = (is_decoding, num_decode_tokens, num_prefill_tokens, not is_decoding)
        for i, (row, term) in enumerate(zip(self._squares, terms, strict=True)):
            self._products[i] = self._products[i] * _SLOW_FADING + term * seconds
            for j, other in enumerate(terms):
                row[j] = row[j] * _SLOW_FADING + term * other

    def decode_s(self, num_decode_tokens: int, fits: _StepFits) -> float:
        """Seconds of a step with a prompt that decoding takes, at least 0."""
        known = (fits.decode.fixed, fits.decode.slope, fits.prefill.slope, fits.prefill.fixed)
        rest = [
            product - sum(map(mul, row, known))
            for product, row in zip(self._products, self._squares, strict=True)
        ]
        change = _solved(self._squares, rest)
        fixed, slope = known[0] + change[0], known[1] + change[1]
        return max(0.0, fixed) + max(0.0, slope) * num_decode_tokens


def _solved(squares: Sequence[Sequence[float]], products: Sequence[float]) -> list[float]:
    """x of (squares + a little of their diagonal) x = products, by elimination."""
    rows = [[*row, product] for row, product in zip(squares, products, strict=True)]
    for i, row in enumerate(rows):
        row[i] = row[i] * (1 + _DAMPING) + _TINY
    for i, pivot in enumerate(rows):
        for row in rows[i + 1 :]:
            factor = row[i] / pivot[i]
            for j in range(i, len(row)):
                row[j] -= factor * pivot[j]
    found = [0.0] * len(rows)
    for i in reversed(range(len(rows))):
        later = sum(rows[i][j] * found[j] for j in range(i + 1, len(rows)))
        found[i] = (rows[i][-1] - later) / rows[i][i]
    return found


class LinearFit:
    """Fit of seconds = fixed + slope * amount, both at least 0, by least squares with exponentially
    decaying weights.

    rate: seconds per unit if all time is attributed to the amount: an upper bound of the slope,
    used while all amounts are equal.
    """

    def __init__(self, fading: float = _FADING) -> None:
        self._fading = fading
        self._weight = 0.0
        self._amount = 0.0
        self._seconds = 0.0
        self._amount_sq = 0.0
        self._product = 0.0
        self.num_observations = 0
        self.fixed = self.slope = self.rate = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        self.num_observations += 1
        fading = self._fading
        self._weight = self._weight * fading + 1.0
        self._amount = self._amount * fading + amount
        self._seconds = self._seconds * fading + seconds
        self._amount_sq = self._amount_sq * fading + amount * amount
        self._product = self._product * fading + amount * seconds
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
