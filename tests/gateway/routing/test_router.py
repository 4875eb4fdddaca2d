"""Choosing workers: never one without room, evenly among equals, by affinity only where loads are
alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.history import PrefixAffinity, PrefixHasher, prefix_digests
from gateway.routing.router import (
    DecodeView,
    Need,
    Plan,
    PrefillView,
    Verdict,
    choose,
    choose_host_memory,
    choose_prefill_to_stay,
)
from gateway.routing.workers import MAX_BACKOFF_S, backoff_s
from tests.support.fake_workers import LAYOUT

NEED = Need(num_tokens=40, max_num_tokens=60, needs_decode=True)
PREFILL = PrefillView("p", 100, outstanding_tokens=0, max_outstanding_tokens=128)
DECODE = DecodeView(
    "d",
    max_model_len=100,
    max_local_prefill_tokens=0,
    layout=LAYOUT,
    num_blocks=100,
    num_available_blocks=100,
    num_sequences=0,
    max_num_seqs=8,
)

PREFILLS = st.lists(
    st.builds(
        PrefillView,
        address=st.integers(0, 5).map("p{}".format),
        max_model_len=st.sampled_from([50, 100]),
        outstanding_tokens=st.integers(0, 200),
        max_outstanding_tokens=st.just(128),
        matched_tokens=st.integers(0, 40),
        ahead_tokens=st.integers(-100, 100).map(float),
        batch_tokens=st.sampled_from([0, 64]),
    ),
    max_size=4,
    unique_by=lambda v: v.address,
)
DECODES = st.lists(
    st.builds(
        DecodeView,
        address=st.integers(0, 5).map("d{}".format),
        max_model_len=st.sampled_from([50, 100]),
        max_local_prefill_tokens=st.sampled_from([0, 20, 100]),
        layout=st.sampled_from([replace(LAYOUT, block_size=size) for size in (1, 4, 16)]),
        num_blocks=st.integers(1, 60),
        num_available_blocks=st.integers(-5, 60),
        num_sequences=st.integers(0, 9),
        max_num_seqs=st.just(8),
        is_awaiting_report=st.booleans(),
        matched_tokens=st.integers(0, 40),
        unreached_by=st.frozensets(st.integers(0, 5).map("p{}".format)),
        is_colocated=st.booleans(),
    ),
    max_size=4,
    unique_by=lambda v: v.address,
)
NEEDS = st.builds(
    Need,
    num_tokens=st.integers(1, 55),
    max_num_tokens=st.integers(56, 90),
    needs_decode=st.booleans(),
    avoid=st.frozensets(st.sampled_from(["p0", "p1", "d0", "d1"])),
    unreached=st.frozensets(st.sampled_from(["d0", "d1"])),
)


@given(need=NEEDS, prefills=PREFILLS, decodes=DECODES)
def test_a_plan_names_workers_that_have_room(
    need: Need, prefills: list[PrefillView], decodes: list[DecodeView]
) -> None:
    plan = choose(need, prefills, decodes, b"k")
    assert plan == choose(need, prefills[::-1], decodes[::-1], b"k"), "the order says nothing"
    if isinstance(plan, Plan):
        assert plan.prefill or plan.decode
        assert plan.decode or not need.needs_decode
        for prefill in prefills:
            if prefill.address == plan.prefill:
                most_tokens = prefill.max_outstanding_tokens + prefill.worth_of_cache()
                assert prefill.outstanding_tokens < most_tokens
                assert not prefill.is_awaiting_report
                assert prefill.max_model_len >= need.max_num_tokens
        for decode in decodes:
            if decode.address == plan.decode:
                assert decode.num_blocks_for(need) <= decode.num_available_blocks
                assert decode.num_sequences < decode.max_num_seqs
                assert not decode.is_awaiting_report
    elif plan is Verdict.NO_WORKER:
        assert not any(decode.fits(need) for decode in decodes)


@given(need=NEEDS, prefills=PREFILLS, decodes=DECODES)
def test_not_now_means_that_idle_workers_would_do(
    need: Need, prefills: list[PrefillView], decodes: list[DecodeView]
) -> None:
    """No sequence waits for ever: one that must wait is placed when the workers are empty."""
    if choose(need, prefills, decodes, b"k") is Verdict.NOT_NOW:
        idle_prefills = [replace(p, outstanding_tokens=0) for p in prefills]
        idle_decodes = [
            replace(
                d,
                num_available_blocks=d.num_blocks,
                num_sequences=0,
                is_awaiting_report=False,
            )
            for d in decodes
        ]
        assert isinstance(choose(need, idle_prefills, idle_decodes, b"k"), Plan)


def test_equal_workers_share_evenly() -> None:
    prefills = [replace(PREFILL, address=f"p{i}") for i in range(4)]
    decodes = [replace(DECODE, address=f"d{i}") for i in range(4)]
    plans = [choose(NEED, prefills, decodes, i.to_bytes(4, "big")) for i in range(2000)]
    for tier in ("prefill", "decode"):
        counts = Counter(getattr(plan, tier) for plan in plans)
        assert len(counts) == 4
        assert all(400 < count < 600 for count in counts.values())


def test_a_cached_prefix_wins_while_it_saves_more_than_the_queue_costs() -> None:
    """32 tokens that need not be computed again outweigh a queue of 64."""
    cached = replace(PREFILL, address="cached", matched_tokens=32)
    for outstanding, winner in ((0, "cached"), (63, "cached"), (65, "p")):
        prefills = [PREFILL, replace(cached, outstanding_tokens=outstanding)]
        plan = choose(NEED, prefills, [DECODE], b"k")
        assert isinstance(plan, Plan)
        assert plan.prefill == winner


def test_a_worker_without_credit_takes_what_its_cache_makes_short() -> None:
    """Its queue of 200 is 72 above its credit of 128, and the cache outweighs twice what it
    holds."""
    for matched, expected in ((0, None), (36, None), (37, "p")):
        full = replace(PREFILL, outstanding_tokens=200, matched_tokens=matched)
        plan = choose(NEED, [full], [DECODE], b"k")
        assert (plan.prefill if isinstance(plan, Plan) else None) == expected


def test_a_cached_prefix_counts_for_less_on_a_worker_that_is_ahead() -> None:
    """32 tokens outweigh a queue of 64 less what the worker was given above the mean and a batch of
    10."""
    for ahead, outstanding, winner in (
        (0, 63, "cached"),
        (10, 63, "cached"),
        (-50, 65, "p"),
        (50, 23, "cached"),
        (50, 25, "p"),
        (75, 0, "p"),
    ):
        cached = replace(
            PREFILL,
            address="cached",
            matched_tokens=32,
            outstanding_tokens=outstanding,
            ahead_tokens=float(ahead),
            batch_tokens=10,
        )
        plan = choose(NEED, [PREFILL, cached], [DECODE], b"k")
        assert isinstance(plan, Plan)
        assert plan.prefill == winner


@given(
    views=st.lists(st.tuples(st.integers(0, 40), st.integers(-200, 200)), min_size=1, max_size=5)
)
def test_no_cache_draws_work_to_a_worker_that_is_further_ahead_than_it_is_worth(
    views: list[tuple[int, int]],
) -> None:
    """So leads are bounded, whatever is asked for: by twice the longest prompt, one prompt, and a
    batch."""
    prefills = [
        replace(
            PREFILL,
            address=f"p{i}",
            matched_tokens=matched,
            ahead_tokens=float(ahead),
            batch_tokens=8,
        )
        for i, (matched, ahead) in enumerate(views)
    ]
    plan = choose(NEED, prefills, [DECODE], b"k")
    assert isinstance(plan, Plan)
    chosen = next(view for view in prefills if view.address == plan.prefill)
    least = min(view.ahead_tokens for view in prefills)
    assert chosen.ahead_tokens <= max(least, 2 * chosen.matched_tokens + 8)


def test_of_workers_with_equal_queues_the_one_that_did_least_is_taken() -> None:
    prefills = [replace(PREFILL, address=f"p{i}", ahead_tokens=3.0 - i) for i in range(4)]
    assert choose(NEED, prefills, [DECODE], b"k") == Plan("p3", "d")
    busy = [*prefills[:3], replace(prefills[3], outstanding_tokens=1)]
    assert choose(NEED, busy, [DECODE], b"k") == Plan("p2", "d"), "a queue says more"


def test_a_cached_prefix_wins_among_decode_workers_of_like_load() -> None:
    roomy = replace(DECODE, max_num_seqs=64)
    cached = replace(roomy, address="cached", matched_tokens=40)
    for num_sequences, winner in ((0, "cached"), (1, "cached"), (2, "d")):
        decodes = [roomy, replace(cached, num_sequences=num_sequences)]
        plan = choose(NEED, [PREFILL], decodes, b"k")
        assert isinstance(plan, Plan)
        assert plan.decode == winner


def test_the_emptier_worker_wins() -> None:
    decodes = [DECODE, replace(DECODE, address="full", num_available_blocks=20)]
    prefills = [PREFILL, replace(PREFILL, address="busy", outstanding_tokens=1)]
    assert choose(NEED, prefills, decodes, b"k") == Plan("p", "d")


def test_workers_that_failed_a_sequence_are_its_last_choice() -> None:
    need = replace(NEED, avoid=frozenset(("p", "d")))
    other = replace(DECODE, address="other", num_sequences=5)
    assert choose(need, [PREFILL], [DECODE, other], b"k") == Plan("p", "other")
    assert choose(need, [PREFILL], [DECODE], b"k") == Plan("p", "d")


def test_an_empty_decode_worker_takes_what_fills_it() -> None:
    tight = replace(DECODE, num_blocks=11, num_available_blocks=11)
    assert choose(NEED, [], [tight], b"k") == Plan(None, "d")
    assert choose(NEED, [], [replace(tight, num_sequences=1)], b"k") is Verdict.NOT_NOW


TOKEN_LISTS = st.lists(st.integers(0, 3), max_size=40)


@given(a=TOKEN_LISTS, b=TOKEN_LISTS)
def test_digests_agree_exactly_on_the_common_prefix(a: list[int], b: list[int]) -> None:
    da, db = (prefix_digests(t, b"", b"key", chunk_tokens=4) for t in (a, b))
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    num_equal = sum(x == y for x, y in zip(da, db, strict=False))
    assert num_equal == min(common // 4, len(a) // 4, len(b) // 4)


@given(
    pieces=st.lists(TOKEN_LISTS, max_size=6),
    at=st.integers(0, 6),
    more=TOKEN_LISTS,
    many=TOKEN_LISTS,
)
def test_digests_of_pieces_are_those_of_the_whole(
    pieces: list[list[int]], at: int, more: list[int], many: list[int]
) -> None:
    hasher = PrefixHasher(b"t", b"key", 4)
    pieces.insert(at, many * 20)
    for piece in pieces:
        hasher.add(piece)
    tokens = [token for piece in pieces for token in piece]
    other = hasher.copy()
    other.add(more)
    for made, whole in ((hasher, tokens), (other, tokens + more)):
        assert tuple(made.digests) == prefix_digests(whole, b"t", b"key", chunk_tokens=4)
        assert made.num_tokens == len(whole)


def test_tenants_and_processes_share_no_digests() -> None:
    tokens = list(range(64))
    sets = [
        set(prefix_digests(tokens, tenant, key, chunk_tokens=4))
        for tenant in (b"", b"t" * 16)
        for key in (b"k1", b"k2")
    ]
    assert len(set.union(*sets)) == sum(map(len, sets))


@given(records=st.lists(st.tuples(st.integers(0, 2), TOKEN_LISTS), max_size=12), query=TOKEN_LISTS)
def test_affinity_tells_the_longest_prefix_of_each_worker(
    records: list[tuple[int, list[int]]], query: list[int]
) -> None:
    def digests(tokens: list[int]) -> tuple[bytes, ...]:
        return prefix_digests(tokens, b"", b"key", chunk_tokens=4)

    affinity = PrefixAffinity(10_000)
    expected: dict[str, int] = {}
    for number, tokens in records:
        affinity.record(digests(tokens), f"w{number}")
        pairs = zip(digests(tokens), digests(query), strict=False)
        matched = 4 * sum(x == y for x, y in pairs)
        expected[f"w{number}"] = max(matched, expected.get(f"w{number}", 0))
    assert affinity.matched_tokens(digests(query)) == {w: n for w, n in expected.items() if n}
    affinity.forget("w0")
    assert "w0" not in affinity.matched_tokens(digests(query))


def test_affinity_is_bounded_and_forgets_what_was_not_used() -> None:
    affinity = PrefixAffinity(8)
    old = prefix_digests([1] * 16, b"", b"k", chunk_tokens=4)
    affinity.record(old, "w")
    for number in range(2, 10):
        affinity.record(prefix_digests([number] * 16, b"", b"k", chunk_tokens=4), "w")
        assert len(affinity) <= 8
    assert affinity.matched_tokens(old) == {}


@given(num_failures=st.integers(1, 10_000), random=st.floats(0, 1, exclude_max=True))
def test_back_off_grows_to_a_bound(num_failures: int, random: float) -> None:
    wait_s = backoff_s(num_failures, random)
    assert 0 < wait_s <= MAX_BACKOFF_S
    assert backoff_s(num_failures + 1, random) >= wait_s


@given(need=NEEDS, prefills=PREFILLS, decodes=DECODES)
def test_no_kv_is_sent_where_it_does_not_get_to(
    need: Need, prefills: list[PrefillView], decodes: list[DecodeView]
) -> None:
    plan = choose(need, prefills, decodes, b"k")
    if isinstance(plan, Plan) and plan.prefill and plan.decode:
        (decode,) = (d for d in decodes if d.address == plan.decode)
        assert plan.prefill not in decode.unreached_by
        assert plan.decode not in need.unreached


def test_a_decode_worker_that_some_kv_gets_to_is_preferred() -> None:
    lonely = replace(DECODE, address="lonely", unreached_by=frozenset(["p", "q"]))
    half = replace(DECODE, address="half", num_sequences=5, unreached_by=frozenset(["p"]))
    prefills = [PREFILL, replace(PREFILL, address="q", outstanding_tokens=90)]
    assert choose(NEED, prefills, [lonely, half], b"k") == Plan("q", "half")
    assert choose(NEED, prefills, [lonely], b"k") == Plan(None, "lonely")
    full = replace(half, num_sequences=8)
    assert choose(NEED, prefills, [lonely, full], b"k") == Plan(None, "lonely")
    need = replace(NEED, unreached=frozenset(["half"]))
    assert choose(need, prefills, [half], b"k") == Plan(None, "half")


def test_short_prompts_go_anywhere() -> None:
    lonely = replace(
        DECODE, address="lonely", max_local_prefill_tokens=40, unreached_by=frozenset(["p"])
    )
    busy = replace(DECODE, num_sequences=4)
    assert choose(NEED, [PREFILL], [lonely, busy], b"k") == Plan(None, "lonely")


FAST = replace(PREFILL, prefill_tokens_per_s=1000)
SHARING = replace(DECODE, max_shared_tokens=100, prefill_tokens_per_s=500)


def test_a_prompt_is_computed_by_the_tier_that_has_it_sooner() -> None:
    assert choose(NEED, [FAST], [SHARING], b"k") == Plan("p", "d"), "40 ms here, 80 ms there"
    behind = replace(FAST, outstanding_tokens=100)
    assert choose(NEED, [behind], [SHARING], b"k") == Plan(None, "d"), "140 ms against 80"
    both_behind = replace(SHARING, pending_tokens=100)
    assert choose(NEED, [behind], [both_behind], b"k") == Plan("p", "d"), "140 ms against 280"


def test_a_colocated_worker_takes_what_it_has_sooner_than_the_split() -> None:
    colocated = replace(
        SHARING, address="c", is_colocated=True, max_local_prefill_tokens=100, num_sequences=7
    )
    assert choose(NEED, [FAST], [SHARING, colocated], b"k") == Plan("p", "d"), "40 ms against 80"
    behind = replace(FAST, outstanding_tokens=100)
    busy = replace(SHARING, pending_tokens=100)
    assert choose(NEED, [behind], [busy, colocated], b"k") == Plan(None, "c"), "140 against 80"
    full = replace(SHARING, num_available_blocks=3)
    assert choose(NEED, [FAST], [full, colocated], b"k") == Plan(None, "c")


def test_among_colocated_workers_a_cached_prefix_wins_while_it_saves_more_than_the_queue() -> None:
    def chosen(knowing: DecodeView, other: DecodeView) -> str | None:
        plan = choose(NEED, [], [knowing, other], b"k")
        return plan.decode if isinstance(plan, Plan) else None

    other = replace(SHARING, address="o", is_colocated=True)
    knowing = replace(other, address="k", matched_tokens=30, sequence_s=0.001)
    assert chosen(knowing, other) == "k"
    assert chosen(replace(knowing, num_sequences=5), other) == "k", "busier, yet worth it"
    assert chosen(replace(knowing, pending_tokens=61), other) == "o", "it would wait longer"
    slow = replace(knowing, num_sequences=5, sequence_s=0.01)
    assert chosen(slow, other) == "o", "20 steps, slower for five: a second against 120 ms"
    credit = {"max_pending_tokens": 50.0, "pending_tokens": 55}
    full = [replace(view, **credit) for view in (knowing, other)]
    assert chosen(*full) == "k", "a cached prefix counts as a shorter queue"


def test_a_prompt_that_the_decode_tier_has_cached_is_computed_there() -> None:
    knowing = replace(SHARING, matched_tokens=36)
    assert choose(NEED, [FAST], [knowing], b"k") == Plan(None, "d")


def test_a_prefill_worker_is_not_taken_to_be_slower_than_the_decode_tier() -> None:
    """Its speed may have been measured while it was cold."""
    slow = replace(FAST, prefill_tokens_per_s=10)
    assert choose(NEED, [slow], [SHARING], b"k") == Plan("p", "d")
    assert choose(NEED, [replace(slow, outstanding_tokens=9)], [SHARING], b"k") == Plan("p", "d")
    behind = replace(slow, outstanding_tokens=100)
    assert choose(NEED, [behind], [SHARING], b"k") == Plan(None, "d")


def test_a_decode_worker_that_has_measured_nothing_is_taken_to_be_slower() -> None:
    unknown = replace(SHARING, prefill_tokens_per_s=0)
    assert choose(NEED, [FAST], [unknown], b"k") == Plan("p", "d")
    behind = replace(FAST, outstanding_tokens=100)
    assert choose(NEED, [behind], [unknown], b"k") == Plan(None, "d")


def test_prompts_are_shared_only_where_that_is_wanted() -> None:
    behind = replace(FAST, outstanding_tokens=100)
    pinned = replace(SHARING, max_shared_tokens=16)
    assert choose(NEED, [behind], [pinned], b"k") == Plan("p", "d")


@pytest.mark.parametrize("decode_speed", [0, 500])
def test_before_a_speed_is_known_prompts_are_shared_by_what_each_has_to_do(
    decode_speed: int,
) -> None:
    silent = replace(PREFILL, prefill_tokens_per_s=0)
    sharing = replace(SHARING, prefill_tokens_per_s=decode_speed)
    assert choose(NEED, [silent], [sharing], b"k") == Plan("p", "d")
    behind = replace(silent, outstanding_tokens=100)
    assert choose(NEED, [behind], [sharing], b"k") == Plan(None, "d")
    both_behind = replace(sharing, pending_tokens=100)
    assert choose(NEED, [behind], [both_behind], b"k") == Plan("p", "d")


def test_a_prompt_is_not_shared_with_a_decode_worker_that_has_no_room() -> None:
    behind = replace(FAST, outstanding_tokens=100)
    full = replace(SHARING, num_available_blocks=5)
    other = replace(DECODE, address="d2")
    assert choose(NEED, [behind], [full, other], b"k") == Plan("p", "d2")


def test_while_the_decode_tier_is_full_a_prefill_worker_with_memory_decodes_on() -> None:
    own = replace(DECODE, address="p")
    assert choose_prefill_to_stay(NEED, [FAST], [own], b"k") == Plan("p", "p")
    half_full = replace(own, num_available_blocks=60)
    assert choose_prefill_to_stay(NEED, [FAST], [half_full], b"k") is None
    busy = replace(FAST, outstanding_tokens=128)
    assert choose_prefill_to_stay(NEED, [busy], [own], b"k") is None


def test_a_prompt_waits_in_host_memory_where_no_decode_worker_has_blocks() -> None:
    full = replace(DECODE, num_available_blocks=3, num_host_blocks=100)
    assert choose(NEED, [FAST], [full], b"k") is Verdict.NOT_NOW
    assert choose_host_memory(NEED, [FAST], [full], b"k") == Plan(FAST.address, "d")
    for other in (
        replace(full, num_host_blocks=0),
        replace(full, num_host_blocks=2),
        replace(full, num_blocks=4),
        replace(full, is_awaiting_report=True),
        replace(full, unreached_by=frozenset({FAST.address})),
        replace(full, max_local_prefill_tokens=NEED.num_tokens),
    ):
        assert choose_host_memory(NEED, [FAST], [other], b"k") is None
    assert choose_host_memory(replace(NEED, num_sequences=2), [FAST], [full], b"k") is None
    busy = replace(FAST, outstanding_tokens=128)
    assert choose_host_memory(NEED, [busy], [full], b"k") is None


@given(need=NEEDS, prefills=PREFILLS, decodes=DECODES, speed=st.integers(0, 1000))
def test_a_shared_prompt_never_waits_longer_than_it_would_apart(
    need: Need, prefills: list[PrefillView], decodes: list[DecodeView], speed: int
) -> None:
    fast = [replace(prefill, prefill_tokens_per_s=500) for prefill in prefills]
    sharing = [
        replace(decode, max_shared_tokens=100, prefill_tokens_per_s=speed) for decode in decodes
    ]
    plan, apart = choose(need, fast, sharing, b"k"), choose(need, fast, decodes, b"k")
    if plan == apart or not isinstance(plan, Plan):
        return
    (decode,) = [view for view in sharing if view.address == plan.decode]
    assert plan.prefill is None
    assert decode.has_room(need)
    able = [prefill for prefill in fast if prefill.max_model_len >= need.max_num_tokens]

    def apart_s(home: DecodeView) -> float:
        return min(p.ttft_s(need, speed) for p in able if p.address not in home.unreached_by)

    homes = [view for view in decodes if view.is_reached_by(need, able)]
    if isinstance(apart, Plan):
        homes = [view for view in homes if view.address == apart.decode]
    assert any(decode.ttft_s(need, 250) < apart_s(home) for home in homes)
