"""What the gateway remembers of pairs of workers that cannot exchange KV."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.history import FIRST_REST_S, MAX_PAIRS, REST_S, BrokenPairs

WORKERS = st.integers(0, 3)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("note"), WORKERS, WORKERS),
        st.tuples(st.just("pass"), st.sampled_from([0.5, FIRST_REST_S, REST_S]), st.just(0)),
        st.tuples(st.just("drop"), WORKERS, st.booleans()),
    ),
    max_size=30,
)


@given(ACTIONS)
def test_a_pair_rests_for_a_moment_and_for_long_if_it_fails_again_soon(
    actions: list[tuple[str, float, int]],
) -> None:
    pairs, model, now_s = BrokenPairs(), dict[tuple[str, str], float](), 0.0
    for what, first, second in actions:
        match what:
            case "note":
                pair = (f"p{first}", f"d{second}")
                rested_until_s = model.get(pair, -REST_S)
                is_further = now_s < rested_until_s + REST_S
                rest_s = None
                if now_s >= rested_until_s:
                    rest_s = REST_S if is_further else FIRST_REST_S
                    model[pair] = now_s + rest_s
                assert pairs.note(*pair, now_s) == rest_s
            case "pass":
                now_s += first
                pairs.expire(now_s)
            case _:
                gone = f"{'d' if second else 'p'}{first}"
                pairs.drop(gone)
                model = {pair: until_s for pair, until_s in model.items() if gone not in pair}
        for number in range(4):
            expected = {
                sender
                for (sender, receiver), until_s in model.items()
                if receiver == f"d{number}" and until_s > now_s
            }
            assert pairs.barred_from(f"d{number}") == expected


def test_no_more_than_so_many_are_remembered() -> None:
    pairs = BrokenPairs()
    for number in range(MAX_PAIRS + 5):
        pairs.note(f"p{number}", "d", 0.0)
    assert pairs.barred_from("d") == {f"p{number}" for number in range(5, MAX_PAIRS + 5)}
    assert pairs.note("p0", "d", FIRST_REST_S) == FIRST_REST_S, "it was forgotten"
    assert pairs.note(f"p{MAX_PAIRS + 4}", "d", FIRST_REST_S) == REST_S
