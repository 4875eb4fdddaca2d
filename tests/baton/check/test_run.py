"""`baton check` itself: it sees every difference, and asks the same questions each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.check.requests import MAX_PROMPT_TOKENS, MAX_TOKENS, draw_requests
from baton.check.run import Shape, _compare, split_shapes

OUTPUTS = st.lists(
    st.lists(st.integers(0, 5), min_size=1, max_size=6).map(tuple), min_size=1, max_size=5
).map(tuple)
SHAPE = Shape("s", {}, 1)


@given(OUTPUTS)
def test_equal_outputs_are_equal(outputs: tuple[tuple[int, ...], ...]) -> None:
    verdict = _compare(SHAPE, outputs, outputs, 0, 1.0)
    assert verdict.is_equal
    assert verdict.first_difference is None
    assert verdict.num_tokens == sum(map(len, outputs))


@given(OUTPUTS, st.data())
def test_one_changed_missing_or_added_token_is_found_where_it_is(
    outputs: tuple[tuple[int, ...], ...], data: st.DataObject
) -> None:
    request = data.draw(st.integers(0, len(outputs) - 1))
    token = data.draw(st.integers(0, len(outputs[request]) - 1))
    right = outputs[request]
    wrong = data.draw(
        st.sampled_from(
            [
                (*right[:token], right[token] + 1, *right[token + 1 :]),
                right[:token],
            ]
        )
    )
    actual = (*outputs[:request], wrong, *outputs[request + 1 :])
    verdict = _compare(SHAPE, outputs, actual, 0, 1.0)
    assert not verdict.is_equal
    assert verdict.first_difference == (request, token)


def test_requests_are_the_same_for_a_seed_and_fit_the_model() -> None:
    first = draw_requests(200, 300, 512, seed=1)
    assert first == draw_requests(200, 300, 512, seed=1)
    assert first != draw_requests(200, 300, 512, seed=2)
    for request in first:
        assert 1 <= len(request.prompt) + (request.params.max_tokens or 0) <= 512
        assert all(0 <= token_id < 300 for token_id in request.prompt)
    kinds = {request.params.temperature == 0.0 for request in first}
    assert kinds == {True, False}


def test_long_requests_reach_the_models_length_and_share_beginnings() -> None:
    first = draw_requests(60, 300, 5000, seed=1, is_long=True)
    assert first == draw_requests(60, 300, 5000, seed=1, is_long=True)
    lengths = [len(request.prompt) for request in first]
    assert lengths[0] == max(lengths) == 5000 - MAX_TOKENS
    assert min(lengths) < 10
    assert sorted(lengths)[50] > MAX_PROMPT_TOKENS
    for request in first:
        assert 1 <= len(request.prompt) + (request.params.max_tokens or 0) <= 5000
    beginnings = [request.prompt[:4] for request in first if len(request.prompt) > 8]
    assert len(set(beginnings)) < len(beginnings)
    assert draw_requests(3, 300, 2, seed=1, is_long=True)[0].params.max_tokens == 1


def test_shapes_cover_each_transport_and_unequal_blocks() -> None:
    shapes = split_shapes(["shm", "tcp"])
    assert {shape.options["kv_transport"] for shape in shapes} == {"shm", "tcp"}
    for transport in ("shm", "tcp"):
        pairs = {
            (shape.options["prefill_block_size"], shape.options["decode_block_size"])
            for shape in shapes
            if shape.options["kv_transport"] == transport
        }
        assert any(prefill != decode for prefill, decode in pairs)
