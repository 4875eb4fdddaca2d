"""What is remembered of pairs whose KV does not get through."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.broken_pairs import MAX_PAIRS, REST_S, BrokenPairs

WORKERS = st.integers(0, 3)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("note"), WORKERS, WORKERS),
        st.tuples(st.just("pass"), st.sampled_from([0.5, REST_S / 2, REST_S]), st.just(0)),
        st.tuples(st.just("drop"), WORKERS, st.booleans()),
    ),
    max_size=30,
)


@given(ACTIONS)
def test_a_pair_rests_from_its_last_failure_until_its_time_is_over_or_a_worker_leaves(
    actions: list[tuple[str, float, int]],
) -> None:
    pairs, model, now_s = BrokenPairs(), dict[tuple[str, str], float](), 0.0
    for what, first, second in actions:
        match what:
            case "note":
                pair = (f"p{first}", f"d{second}")
                is_known = model.get(pair, 0.0) > now_s
                pairs.expire(now_s)
                assert pairs.note(*pair, now_s) is not is_known
                model[pair] = now_s + REST_S
            case "pass":
                now_s += first
                pairs.expire(now_s)
            case _:
                gone = f"{'d' if second else 'p'}{first}"
                pairs.drop(gone)
                model = {pair: until_s for pair, until_s in model.items() if gone not in pair}
        for number in range(4):
            expected = {
                prefill
                for (prefill, decode), until_s in model.items()
                if decode == f"d{number}" and until_s > now_s
            }
            assert pairs.with_decode(f"d{number}") == expected


def test_no_more_than_so_many_are_remembered() -> None:
    pairs = BrokenPairs()
    for number in range(MAX_PAIRS + 5):
        pairs.note(f"p{number}", "d", 0.0)
    assert pairs.with_decode("d") == {f"p{number}" for number in range(5, MAX_PAIRS + 5)}
