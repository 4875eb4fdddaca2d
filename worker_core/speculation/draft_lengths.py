"""Number of drafts that a step verifies for each sequence. Pure: chances and costs in, lengths out.

A draft at place j of a proposal gives a token if it and all before it are right: with probability
first * later^(j - 1). Drafts of all sequences are taken in the order of this probability, as many
as give the most tokens per second, including the time of drafting. Under load a row is worth more
to another sequence, and nothing is drafted.

Chances are learned by comparing drafts with the tokens that the target drew. A trial is one draft
after right drafts only. The first draft of a proposal counts under its confidence, later ones
together, because a proposal that begins right mostly stays right. A sequence's own trials count
first; if it has few, those of all sequences are used.

Costs are learned from steps: for each number of rows (rounded), the time of steps without drafts,
and the ratio of steps with drafts to it. The ratio excludes growing contexts and other work on the
machine, which slow down both. Timings on a shared machine err upwards only, sometimes several times
in a row, so a low quantile of the last few is used."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from worker_core.speculation.interface import Proposal

#: Factor on chances: they are estimates, and drafts cost certain time.
CAUTION = 0.8

#: Drafts with a lower chance are never verified.
MIN_CHANCE = 0.1

#: Numbers of drafts are compared one by one up to the first; beyond it in steps of a share of them.
_NUM_FINE, _COARSENESS = 16, 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that may have drafts. first, later: chances of its first draft, and of each draft
    after a right one. rows: additional rows of a step for each of its first places; 1 for
    others."""

    first: float
    later: float
    max_num_drafts: int
    rows: tuple[int, ...] = ()

    def rows_of(self, place: int) -> int:
        """place: from 1."""
        return self.rows[place - 1] if place <= len(self.rows) else 1


@dataclass(frozen=True, slots=True)
class StepPrices:
    """What the step costs, by what is added to it.

    num_rows: of the step without drafts; each gives a token. max_num_drafts: most rows for drafts,
    in all.
    step_s: seconds of the step, by its rows for drafts. draft_s: seconds of drafting, by sequences
    and most drafts of one.
    """

    num_rows: int
    max_num_drafts: int
    step_s: Callable[[int], float]
    draft_s: Callable[[int, int], float]


def choose_lengths(
    candidates: Sequence[Candidate], prices: StepPrices, num_more: int = 0
) -> list[int]:
    """Drafts of each candidate that make the step's tokens per second highest, and the num_more
    likeliest besides."""
    # (less its chance, place in its proposal from 1, candidate) of each draft, the likeliest first,
    # none before those that it builds on.
    drafts: list[tuple[float, int, int]] = []
    for index, candidate in enumerate(candidates):
        chance = candidate.first
        for place in range(1, candidate.max_num_drafts + 1):
            if chance < MIN_CHANCE:
                break
            drafts.append((-chance, place, index))
            chance *= candidate.later
    drafts.sort()
    num_tokens, num_drafting, longest, num_added = float(prices.num_rows), 0, 0, 0
    best_rate = num_tokens / prices.step_s(0)
    best_count = 0
    for count, (less_chance, place, index) in enumerate(drafts, start=1):
        num_added += candidates[index].rows_of(place)
        if num_added > prices.max_num_drafts:
            drafts = drafts[: count - 1]
            break
        num_tokens -= CAUTION * less_chance
        num_drafting += place == 1
        longest = max(longest, place)
        if count > _NUM_FINE and count % (count // _COARSENESS) and count < len(drafts):
            continue
        step_s = prices.step_s(num_added)
        rate = num_tokens / (step_s + prices.draft_s(num_drafting, longest))
        if rate > best_rate:
            best_rate, best_count = rate, count
    lengths = [0] * len(candidates)
    for _, _, index in drafts[: best_count + num_more]:
        lengths[index] += 1
    return lengths


#: Category of drafts after the first of a proposal; confidences are not negative.
LATER = -1

#: Weight that a trial keeps when one more comes: about the last 8 of a sequence count, the last 200
#: of all.
_OWN_DECAY = 0.88
_ALL_DECAY = 0.995

#: Number of own trials that weighs as much as all sequences' share.
_PRIOR_TRIALS = 3.0

#: Prior chance, and its weight in trials.
_FIRST_GUESS = 0.5
_FIRST_GUESS_TRIALS = 2.0


@dataclass(slots=True)
class _Rate:
    """A success rate in which old trials decay."""

    num_right: float = 0.0
    num_trials: float = 0.0

    def add(self, is_right: bool, decay: float) -> None:
        self.num_right = self.num_right * decay + is_right
        self.num_trials = self.num_trials * decay + 1.0

    def share(self, prior: float, prior_trials: float) -> float:
        return (self.num_right + prior * prior_trials) / (self.num_trials + prior_trials)


#: Success rates of a sequence's own trials, by category.
Rates = dict[int, _Rate]


class Acceptance:
    """Chances of drafts, by sequence and category."""

    def __init__(self) -> None:
        self._all: defaultdict[int, _Rate] = defaultdict(_Rate)

    def chance(self, own: Rates, category: int) -> float:
        """Probability in (0, 1) that the next draft of this category is right, if those before it
        are."""
        prior = self._all[category].share(_FIRST_GUESS, _FIRST_GUESS_TRIALS)
        return own[category].share(prior, _PRIOR_TRIALS) if category in own else prior

    def record(
        self, own: Rates, confidence: int, proposal: Proposal, tokens: Sequence[int]
    ) -> None:
        """Compare drafts, verified or not, with the tokens at their places. Changes `own`. A place
        with a right alternative counts as right; drafts after it count as wrong."""
        category, is_on_track = confidence, True
        for place, (draft, token) in enumerate(zip(proposal.token_ids, tokens, strict=False)):
            others = proposal.alternatives[place] if place < len(proposal.alternatives) else ()
            is_right = is_on_track and (draft == token or token in others)
            is_on_track = is_on_track and draft == token
            self._all[category].add(is_right, _ALL_DECAY)
            own.setdefault(category, _Rate()).add(is_right, _OWN_DECAY)
            if not is_right:
                return
            category = LATER


#: Assumed cost of a draft's row before it is measured, as a share of another row.
_UNKNOWN_ROW_SHARE = 0.5

#: Timings of one size that count, and how many of them are below the one that stands for all, as a
#: divisor.
_NUM_TIMINGS = 9
_QUANTILE = 4


def rounded(number: int, num_bits: int) -> int:
    """`number` with only its first `num_bits` binary digits kept."""
    shift = max(0, number.bit_length() - num_bits)
    return number >> shift << shift


@dataclass(slots=True)
class _Timings:
    """The last few of about the same size. value, size: of the one that stands for all, and the
    mean."""

    last: deque[tuple[float, int]] = field(default_factory=partial(deque, maxlen=_NUM_TIMINGS))
    value: float = 0.0
    size: float = 0.0

    def add(self, value: float, size: int) -> None:
        self.last.append((value, size))
        num_timings = len(self.last)
        self.value = sorted(self.last)[(num_timings - 1) // _QUANTILE][0]
        self.size = sum(size for _, size in self.last) / num_timings


#: Before it was measured, each draft after a proposal's first is taken to cost this share of it,
#: and that of each sequence after those of a size that was measured.
_UNKNOWN_DRAFT_SHARE, _UNKNOWN_SEQUENCE_SHARE = 0.5, 0.25

#: Calls of a size before what they took is believed: the first is the one that takes longest.
_FEWEST_CALLS = 3


class DraftCosts:
    """Seconds that a proposer takes: for the first draft of each sequence, by the rounded number of
    sequences, and the share of it that each further draft takes.

    Both are the middle one of the last few calls. Catching up with a sequence is part of the price
    as often as it happens; one call that had to begin anew, or found all caches cold, says nothing
    about the next. A size that was hardly ever asked for goes by the nearest one that was."""

    def __init__(self) -> None:
        self._first_draft_times: defaultdict[int, deque[float]] = defaultdict(_last_few)
        self._shares: deque[float] = _last_few()
        self._first_s: dict[int, float] = {}
        """The middle ones, of sizes with enough calls: a step asks for many prices."""
        self._share = _UNKNOWN_DRAFT_SHARE

    def observe(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """It took so long for `num_drafts` drafts, at most, of each of so many sequences."""
        size = rounded(num_sequences, 3)
        first_s = self._first_s.get(size, 0.0)
        if num_drafts > 1 and first_s:
            self._shares.append(max(0.0, seconds / first_s - 1) / (num_drafts - 1))
            if len(self._shares) >= _FEWEST_CALLS:
                self._share = _middle(self._shares)
        elif num_drafts:
            first_draft_times = self._first_draft_times[size]
            first_draft_times.append(seconds / self._times(num_drafts))
            if len(first_draft_times) >= _FEWEST_CALLS:
                self._first_s[size] = _middle(first_draft_times)

    def seconds(self, num_sequences: int, num_drafts: int) -> float:
        """See Proposer.cost_s; 0 of what was never measured."""
        if not self._first_s or not num_sequences or not num_drafts:
            return 0.0
        wanted = rounded(num_sequences, 3)
        size = min(self._first_s, key=lambda size: abs(size - wanted))
        more = max(0.0, wanted / size - 1) * _UNKNOWN_SEQUENCE_SHARE
        return self._first_s[size] * (1 + more) * self._times(num_drafts)

    def _times(self, num_drafts: int) -> float:
        """What a proposal of so many drafts costs, by that of its first."""
        return 1 + self._share * (num_drafts - 1)


def _last_few() -> deque[float]:
    return deque(maxlen=_NUM_TIMINGS)


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


class DraftCurve:
    """Seconds over the number of drafts, never falling, for steps of about the same number of other
    rows."""

    def __init__(self) -> None:
        self._plain = _Timings()
        self._drafted: defaultdict[int, _Timings] = defaultdict(_Timings)
        self._sizes = [0.0]
        self._ratios = [1.0]
        self.num_steps_since_plain = 0
        """Steps with drafts since the last one without."""

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """A step took so long. The first one observed has no drafts."""
        if num_drafts == 0:
            self.num_steps_since_plain = 0
            self._plain.add(seconds, num_rows)
            return
        self.num_steps_since_plain += 1
        self._drafted[rounded(num_drafts, 3)].add(seconds / self._plain.value, num_drafts)
        # The rising curve from 1 nearest to the ratios in least squares (pool adjacent violators).
        groups: list[tuple[float, int, list[float]]] = []
        for timings in sorted(self._drafted.values(), key=attrgetter("size")):
            mean, weight, sizes = max(1.0, timings.value), len(timings.last), [timings.size]
            while groups and groups[-1][0] >= mean:
                other_mean, other_weight, other_sizes = groups.pop()
                mean = (mean * weight + other_mean * other_weight) / (weight + other_weight)
                weight += other_weight
                sizes = other_sizes + sizes
            groups.append((mean, weight, sizes))
        self._sizes = [0.0, *(size for _, _, sizes in groups for size in sizes)]
        self._ratios = [1.0, *(mean for mean, _, sizes in groups for _ in sizes)]

    def seconds(self, num_drafts: int) -> float:
        """Seconds of a step with so many drafts."""
        sizes, ratios = self._sizes, self._ratios
        place = bisect_left(sizes, num_drafts)
        if place == len(sizes):
            slope = _UNKNOWN_ROW_SHARE / self._plain.size
            if len(sizes) > 1:
                slope = min(slope, (ratios[-1] - 1.0) / sizes[-1])
            ratio = ratios[-1] + (num_drafts - sizes[-1]) * slope
        elif place == 0:
            ratio = ratios[0]
        else:
            share = (num_drafts - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
            ratio = ratios[place - 1] + share * (ratios[place] - ratios[place - 1])
        return self._plain.value * ratio
