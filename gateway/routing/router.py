"""Which workers a sequence goes to, and which running ones should change workers. Pure: snapshots
in, a plan or a reason to wait out.

A prefill worker is charged in tokens: those it has yet to compute, plus those of this sequence that
its cache probably lacks, which weigh more. So a cached prefix wins as long as it saves enough to
outweigh the difference of the queues. It counts for less the more its worker did lately above the
mean of the tier and a batch, so that a prefix which many ask for spreads before it makes a hot
spot; and of like workers the one that did least is taken. A decode worker is charged by how full it
is, batch or memory, and a cached prefix decides only between like ones. One that KV does not get to
from any prefill worker is the last choice, and computes the prompt itself.

A decode worker is short when few of its blocks can be had; then its worst-ranked sequences go,
those that it would preempt first, until it has some room again. They go where plenty is left even
with them. The three levels are apart, so that what was moved is not moved back: a target stays
above the level at which moving ends, which is above that at which it begins."""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

from baton.types import KvLayout, NumericsClass, Rank, SequenceSpec
from engine.kv.layout import groups_of

#: How much more a token computed again weighs than one to wait for: it delays all who come later,
#: too.
RECOMPUTE_WEIGHT = 2.0

#: Share of a prefill worker's speed that a decode worker is taken to have at prompts, before it
#: has measured its own.
ASSUMED_SHARE = 0.5

#: Share of its speed that it is taken to have at a prompt that others come before.
BEHIND_SHARE = 0.5

#: A decode worker computes a prompt if that takes less than this share of the time until a prefill
#: worker has: it slows down what decodes there.
SHARING_GAIN = 0.8

#: Difference of two decode workers' fill (0..1) that a wholly cached prompt outweighs: of the fill
#: itself, and at least.
AFFINITY_SHARE, MIN_AFFINITY = 0.05, 0.02

#: Shares of a worker's blocks that can be had: below the first it is short, up to the second
#: sequences leave it, and the third is left where they go.
SHORT, RELIEVED, PLENTY = 0.1, 0.2, 0.4


@dataclass(frozen=True, slots=True)
class Need:
    """What a sequence asks for.

    num_tokens: known now, prompt and output; their KV is to be computed or sent.
    max_num_tokens: the most it can come to.
    needs_decode: whether more than the prefill's token is wanted.
    avoid: addresses of workers that failed this sequence; taken only if there are no others.
    num_sequences: how many it will be on the decode worker: choices, or beams, that share the
    tokens known now.
    unreached: addresses of decode workers that its KV did not get to; they compute the prompt, if
    it must be them.
    numerics: class of the workers that its tokens came from, where it must not change; None: any.
    """

    num_tokens: int
    max_num_tokens: int
    needs_decode: bool
    avoid: frozenset[str] = frozenset()
    num_sequences: int = 1
    unreached: frozenset[str] = frozenset()
    numerics: NumericsClass | None = None

    @classmethod
    def of(
        cls,
        spec: SequenceSpec,
        avoid: frozenset[str] = frozenset(),
        unreached: frozenset[str] = frozenset(),
        numerics: NumericsClass | None = None,
    ) -> Need:
        """What `spec` asks for."""
        num_left = spec.sampling.max_tokens - len(spec.output_token_ids)
        return cls(
            num_tokens=spec.num_tokens,
            max_num_tokens=len(spec.prompt_token_ids) + spec.sampling.max_tokens,
            needs_decode=num_left > 1 or spec.sampling.beam is not None,
            avoid=avoid,
            num_sequences=spec.width,
            unreached=unreached,
            numerics=numerics,
        )


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A prefill worker that takes work.

    ahead_tokens: how much more it was given lately than the mean of its tier; negative if less.
    batch_tokens: the most that it computes in one step; a lead by less is none.
    """

    address: str
    max_model_len: int
    outstanding_tokens: int
    max_outstanding_tokens: int
    matched_tokens: int = 0
    ahead_tokens: float = 0.0
    batch_tokens: int = 0
    prefill_tokens_per_s: int = 0
    is_awaiting_report: bool = False

    def ttft_s(self, need: Need, others_tokens_per_s: int) -> float:
        """Estimated seconds until it has computed the prompt, after what it has.
        others_tokens_per_s: that of a decode worker. This one is taken to be no slower: what it
        measured may be old, or nothing yet, and nothing new is learned of one that is spared."""
        num_missing = max(1, need.num_tokens - self.matched_tokens)
        speed = max(self.prefill_tokens_per_s, others_tokens_per_s)
        return (self.outstanding_tokens + num_missing) / speed

    def worth_of_cache(self) -> float:
        """Tokens of queue that its cached prefix outweighs."""
        lead = max(0.0, self.ahead_tokens - self.batch_tokens)
        return max(0.0, RECOMPUTE_WEIGHT * self.matched_tokens - lead)


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A decode worker that takes work.

    num_available_blocks: free or given up on demand, as last reported, less what was reserved
    since.
    num_sequences: running, waiting, and on their way there.
    unreached_by: addresses of prefill workers whose KV does not get here.
    max_shared_tokens: most tokens of a prompt that it computes although prefill workers could.
    pending_tokens: of prompts that it has yet to compute. prefill_tokens_per_s: at which it does,
    beside what decodes here; 0 if not known.
    """

    address: str
    max_model_len: int
    max_local_prefill_tokens: int
    layout: KvLayout
    num_blocks: int
    num_available_blocks: int
    num_sequences: int
    max_num_seqs: int
    is_awaiting_report: bool = False
    matched_tokens: int = 0
    unreached_by: Set[str] = frozenset()
    max_shared_tokens: int = 0
    pending_tokens: int = 0
    prefill_tokens_per_s: int = 0

    def ttft_s(self, need: Need, assumed_tokens_per_s: float) -> float:
        """Estimated seconds until it has computed the prompt in chunks beside the sequences that
        decode here; infinite for a prompt that is not to be computed here. assumed_tokens_per_s:
        before its own speed is known."""
        if need.num_tokens > self.max_shared_tokens:
            return math.inf
        num_missing = max(1, need.num_tokens - self.matched_tokens)
        speed = self.prefill_tokens_per_s or assumed_tokens_per_s
        if self.pending_tokens:  # whoever is computed first decodes beside those that come after
            speed *= BEHIND_SHARE
        return (self.pending_tokens + num_missing) / speed

    def num_blocks_for(self, need: Need) -> int:
        """Those that they share, and one more for each but the first to write into."""
        return groups_of(self.layout).num_held_blocks(need.num_tokens + 1) + need.num_sequences - 1

    def fits(self, need: Need) -> bool:
        """Whether the sequence fits here when nothing else does."""
        if self.max_model_len < need.max_num_tokens or self.max_num_seqs < need.num_sequences:
            return False
        return self.num_blocks_for(need) <= self.num_blocks

    def has_room(self, need: Need) -> bool:
        """Whether it fits now, with a block left for each running sequence's growth."""
        num_sequences = self.num_sequences + need.num_sequences
        if self.is_awaiting_report or num_sequences > self.max_num_seqs:
            return False
        watermark = min(self.num_sequences, self.num_blocks // 8)
        return self.num_blocks_for(need) + watermark <= self.num_available_blocks

    def has_room_to_stay(self, need: Need) -> bool:
        """Whether a prefill worker may run the sequence: half of its memory stays for prompts."""
        num_left = self.num_available_blocks - self.num_blocks_for(need)
        return self.has_room(need) and num_left >= self.num_blocks // 2

    def is_reached_by(self, need: Need, prefills: Sequence[PrefillView]) -> bool:
        """Whether KV of one of these would get here."""
        if self.address in need.unreached:
            return False
        return any(prefill.address not in self.unreached_by for prefill in prefills)

    @property
    def is_short(self) -> bool:
        """Whether so few of its blocks can be had that sequences should leave it."""
        return self.num_available_blocks < SHORT * self.num_blocks


@dataclass(frozen=True, slots=True)
class Plan:
    """Addresses of the workers to use. No prefill worker: the decode worker computes the prompt. No
    decode worker: nothing is wanted after the first token. Not both are None; both the same: a
    prefill worker runs the sequence itself."""

    prefill: str | None
    decode: str | None


class Verdict(enum.Enum):
    """Why there is no plan."""

    NOT_NOW = enum.auto()
    """Some worker that takes work will have room."""
    NO_WORKER = enum.auto()
    """None of the workers that take work could ever serve it."""


def choose(
    need: Need, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView], tie_key: bytes
) -> Plan | Verdict:
    """Place one sequence. `tie_key` decides between equal workers, evenly over many keys."""
    able_prefills = [p for p in prefills if p.max_model_len >= need.max_num_tokens]
    if able_prefills and not need.needs_decode:
        prefill = _best_prefill(need, able_prefills, tie_key)
        return Plan(prefill.address, None) if prefill else Verdict.NOT_NOW
    able_decodes = [d for d in decodes if d.fits(need)]
    if not able_decodes:
        return Verdict.NO_WORKER
    decode = _best_decode(need, able_decodes, able_prefills, tie_key)
    if decode is None:
        return Verdict.NOT_NOW
    is_short = need.num_tokens <= decode.max_local_prefill_tokens
    if is_short or not decode.is_reached_by(need, able_prefills):
        return Plan(None, decode.address)
    reaching = [p for p in able_prefills if p.address not in decode.unreached_by]
    if sooner := _sooner_decode(need, able_decodes, reaching):
        return Plan(None, sooner.address)
    prefill = _best_prefill(need, reaching, tie_key)
    return Plan(prefill.address, decode.address) if prefill else Verdict.NOT_NOW


def choose_prefill_to_stay(
    need: Need, prefills: Sequence[PrefillView], views: Sequence[DecodeView], tie_key: bytes
) -> Plan | None:
    """A prefill worker that computes the prompt and decodes on until a decode worker has room; None
    if none can now. views: the same workers as ones that run sequences."""
    roomy = {v.address for v in views if v.fits(need) and v.has_room_to_stay(need)}
    prefill = _best_prefill(need, [p for p in prefills if p.address in roomy], tie_key)
    return Plan(prefill.address, prefill.address) if prefill else None


def _sooner_decode(
    need: Need, decodes: Sequence[DecodeView], prefills: Sequence[PrefillView]
) -> DecodeView | None:
    """The decode worker that has the prompt computed soonest, if that is sooner than any prefill
    worker, whatever waits before them."""
    if need.avoid:
        return None
    # That of the fastest; before any has measured its own, only how much each has to do counts.
    speed = (
        max(p.prefill_tokens_per_s for p in prefills)
        or max(d.prefill_tokens_per_s for d in decodes)
        or 1
    )
    assumed = speed * ASSUMED_SHARE
    roomy = [view for view in decodes if view.has_room(need)]
    if not roomy:
        return None
    ttfts_s = [view.ttft_s(need, assumed) for view in roomy]
    here_s = min(ttfts_s)
    soonest = roomy[ttfts_s.index(here_s)]
    others = soonest.prefill_tokens_per_s or speed
    apart_s = min(p.ttft_s(need, others) for p in prefills)
    return soonest if here_s < SHARING_GAIN * apart_s else None


def _best_prefill(need: Need, views: Sequence[PrefillView], tie_key: bytes) -> PrefillView | None:
    # One sequence is always taken, however long; further ones while the queue is short. What its
    # cache saves makes the queue shorter: else a busy tier gives every sequence to whichever worker
    # has room first, finds nothing in caches, and is busy with that alone.
    views = [
        view
        for view in views
        if not view.is_awaiting_report
        and view.outstanding_tokens < view.max_outstanding_tokens + view.worth_of_cache()
    ]
    views = [view for view in views if view.address not in need.avoid] or views

    def rank(view: PrefillView) -> tuple[float, float, bytes]:
        cost = view.outstanding_tokens + RECOMPUTE_WEIGHT * need.num_tokens - view.worth_of_cache()
        return cost, view.ahead_tokens, _tie(tie_key, view.address)

    return min(views, key=rank, default=None)


def _best_decode(
    need: Need, views: Sequence[DecodeView], prefills: Sequence[PrefillView], tie_key: bytes
) -> DecodeView | None:
    """prefills: those that could compute the prompt."""
    views = [view for view in views if view.has_room(need)]
    views = [view for view in views if view.address not in need.avoid] or views
    if prefills:
        views = [
            view
            for view in views
            if need.num_tokens <= view.max_local_prefill_tokens
            or view.is_reached_by(need, prefills)
        ] or views

    def rank(view: DecodeView) -> tuple[float, bytes]:
        batch = view.num_sequences / view.max_num_seqs
        memory = 1.0 - view.num_available_blocks / view.num_blocks
        fill = max(batch, memory)
        matched = min(1.0, view.matched_tokens / need.num_tokens)
        cost = fill - matched * (MIN_AFFINITY + AFFINITY_SHARE * fill)
        return cost, _tie(tie_key, view.address)

    return min(views, key=rank, default=None)


def _tie(tie_key: bytes, address: str) -> bytes:
    return hashlib.blake2b(address.encode(), key=tie_key, digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Running:
    """A running sequence that may be moved, and where it is. key: its number among them."""

    key: int
    address: str
    rank: Rank
    num_tokens: int

    def num_blocks_at(self, worker: DecodeView) -> int:
        """Blocks that it takes there, with room for the next token."""
        return groups_of(worker.layout).num_held_blocks(self.num_tokens + 1)


@dataclass(frozen=True, slots=True)
class Transfer:
    """The sequence `key` goes to `address`."""

    key: int
    address: str


def rebalance(
    workers: Sequence[DecodeView], sequences: Sequence[Running], max_transfers: int
) -> list[Transfer]:
    """At most `max_transfers`, worst-ranked sequences first."""
    available = {w.address: w.num_available_blocks for w in workers}
    places = {w.address: w.max_num_seqs - w.num_sequences for w in workers}
    by_address = {w.address: w for w in workers}
    short = {w.address for w in workers if w.is_short}
    transfers: list[Transfer] = []
    for sequence in sorted(sequences, key=lambda s: s.rank, reverse=True):
        if len(transfers) == max_transfers:
            break
        owner = by_address.get(sequence.address)
        if owner is None or owner.address not in short:
            continue
        if available[owner.address] >= RELIEVED * owner.num_blocks:
            continue
        others = [w for w in workers if w.address not in short and places[w.address] > 0]
        target = _roomiest(sequence, others, available)
        if target is None:
            continue
        available[target.address] -= sequence.num_blocks_at(target)
        available[owner.address] += sequence.num_blocks_at(owner)
        places[target.address] -= 1
        transfers.append(Transfer(sequence.key, target.address))
    return transfers


def _roomiest(
    sequence: Running, workers: Sequence[DecodeView], available: dict[str, int]
) -> DecodeView | None:
    """The worker with the largest share of its blocks left, if plenty is left there with the
    sequence."""

    def share_left(worker: DecodeView) -> float:
        return (available[worker.address] - sequence.num_blocks_at(worker)) / worker.num_blocks

    best = max(workers, key=lambda w: (share_left(w), w.address), default=None)
    return best if best is not None and share_left(best) >= PLENTY else None
