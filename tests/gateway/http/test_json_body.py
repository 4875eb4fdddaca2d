"""Bodies of JSON that are long mean what a library reads of them in one go, but are read in
pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.v1 import inference_pb2
from gateway.http import json_body
from gateway.http.json_body import MAX_MEMBERS, MAX_NODES, MAX_VALUES, read_fields
from gateway.long_work import LONG_PIECE
from tests.support.virtual_loop import run_virtual

MODEL_LEN = 2**20
FIELDS = ("prompt", "tokens")


def fields_of(data: bytes, max_model_len: int = MODEL_LEN) -> dict[str, Any]:
    return run_virtual(read_fields(data, FIELDS, max_model_len))


def plain(value: Any) -> Any:
    """With lists in place of TokenIds."""
    if isinstance(value, inference_pb2.TokenIds):
        return list(value.ids)
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def refusal(data: bytes, max_model_len: int = MODEL_LEN) -> tuple[str, str]:
    """The first wrong field, and what is wrong."""
    with pytest.raises(InvalidRequest) as caught:
        fields_of(data, max_model_len)
    violation = caught.value.violations[0]
    return violation.field, violation.description


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Characters of what the library is given in one go."""
    read, seen = json_body.from_json, list[int]()

    def watched(data: bytes, **options: Any) -> Any:
        seen.append(len(data))
        return read(data, **options)

    monkeypatch.setattr(json_body, "from_json", watched)
    return seen


@pytest.mark.slow
def test_a_million_ids_are_never_read_in_one_go(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []

    async def watched(_size: int) -> None:
        pauses.append(len(sizes))

    monkeypatch.setattr("gateway.long_work.let_others_run", watched)
    ids = [i % 50_000 for i in range(1_000_000)]
    body = {"model": "m", "prompt": ids, "max_tokens": 1}
    fields = fields_of(json.dumps(body).encode())
    assert isinstance(fields["prompt"], inference_pb2.TokenIds)
    assert plain(fields) == body
    assert max(sizes) < 8 * LONG_PIECE
    # Others run after no more than two pieces.
    assert all(b - a <= 2 for a, b in zip(pauses, [*pauses[1:], len(sizes)], strict=True))


NUMBERS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4)
TEXTS = st.text('ab"\\[]{}:, 1é\n', max_size=30)
VALUES = st.recursive(
    TEXTS | st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    other=VALUES,
    field=st.sampled_from(["prompt", "tokens", "other"]),
    numbers=NUMBERS,
    nested=st.integers(0, 3),
    is_spaced=st.booleans(),
    is_ascii=st.booleans(),
    pad=st.integers(LONG_PIECE - 300, LONG_PIECE + 300),
    filler=st.sampled_from(["x", "\\", '"', "[", "é"]),
)
def test_long_bodies_mean_what_short_ones_do(
    other: Any,
    field: str,
    numbers: list[int],
    nested: int,
    is_spaced: bool,
    is_ascii: bool,
    pad: int,
    filler: str,
) -> None:
    value: Any = numbers * 3000
    for _ in range(nested):
        value = [value, numbers, "x"]
    body = {"filler": filler * pad, "a": other, field: value, "b": other, "text": str(value)}
    separators = (" , ", " : ") if is_spaced else (",", ":")
    data = json.dumps(body, separators=separators, ensure_ascii=is_ascii).encode()
    assert plain(fields_of(data)) == json.loads(data)


@pytest.mark.slow
@settings(max_examples=150)
@given(at=st.integers(0, 140_000), put=st.sampled_from([",", "]", "[", '"', "\\", "1 2", "}", ""]))
def test_what_is_not_json_is_refused_wherever_the_fault_is(at: int, put: str) -> None:
    whole = json.dumps({"prompt": [12] * 20_000, "text": "x" * 40_000, "b": [None]})
    broken = (whole[:at] + put + whole[at + 1 :]).encode()
    try:
        right = json.loads(broken)
    except ValueError:
        assert refusal(broken)[0]
    else:
        assert plain(fields_of(broken)) == right


@pytest.mark.parametrize("end", ["1,", ",1", "1,,1", "", ",", " "])
def test_a_list_whose_commas_are_wrong_is_no_list(end: str) -> None:
    inner = "1," * 50_000 + end
    data = f'{{"prompt": [{inner}]}}'.encode()
    try:
        json.loads(data)
    except ValueError:
        assert refusal(data) == ("prompt", f"is not JSON {refusal(data)[1][12:]}")
    else:
        assert len(fields_of(data)["prompt"].ids) == 50_001


def test_more_ids_than_any_model_takes_are_not_read(sizes: list[int]) -> None:
    data = json.dumps({"prompt": [1] * 300_001}).encode()
    field, fault = refusal(data, 300_000)
    assert (field, fault) == ("prompt", "300001 token ids: the model takes 300000; send fewer")
    assert max(sizes) < 1000
    several = json.dumps({"prompt": [[1] * 200_000, [1] * 100_001]}).encode()
    assert refusal(several, 100_000)[0] == "prompt[0]"
    most = MAX_VALUES + 100_000
    many = json.dumps({"prompt": [[1] * 90_000] * 5}).encode()
    assert refusal(many, 100_000) == ("body", f"450000 token ids; send at most {most} in all")


def test_a_prompt_that_is_cut_may_be_longer_than_the_model_takes() -> None:
    body = {"prompt": [1] * 50_000, "truncate_prompt_tokens": 5}
    assert len(fields_of(json.dumps(body).encode(), 100)["prompt"].ids) == 50_000
    longest = {**body, "prompt": [1] * (MAX_VALUES + 101)}
    assert refusal(json.dumps(longest).encode(), 100)[0] == "body"
    uncut = {**body, "truncate_prompt_tokens": None}
    assert refusal(json.dumps(uncut).encode(), 100)[0] == "prompt"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": [1] * 70_000 + [-1]}, "prompt[70000]"),
        ({"prompt": [1] * 70_000 + [1.5, 1]}, "prompt[70000]"),
        ({"prompt": [1] * 70_000 + [2**32]}, "prompt[70000]"),
        ({"prompt": ["x", [0] * 40_000 + [-2]]}, "prompt[1][40000]"),
        ({"tokens": [1] * 300_000 + [-1]}, "tokens[300000]"),
    ],
)
def test_what_is_no_id_is_named(body: Any, field: str) -> None:
    assert refusal(json.dumps(body).encode())[0] == field


@pytest.mark.parametrize(
    ("inner", "what"),
    [
        ("{}," * MAX_NODES + "{}", f"more than {MAX_NODES} objects and lists"),
        ("[]," * MAX_NODES + "[]", f"more than {MAX_NODES} objects and lists"),
        ('{"":1},' * (MAX_MEMBERS - 9) + '{"":1,"":1}' * 9, f"more than {MAX_MEMBERS} members"),
        ('"",' * MAX_VALUES + "1", f"{MAX_VALUES + 1} values"),
        ("null," * MAX_VALUES + "1", f"{MAX_VALUES + 1} values"),
        ("1," * MAX_VALUES + "1", f"{MAX_VALUES + 1} values"),
    ],
)
def test_too_much_is_refused_before_any_is_made(inner: str, what: str, sizes: list[int]) -> None:
    field, fault = refusal(f'{{"metadata": [{inner}], "prompt": "x"}}'.encode())
    assert (field, fault.startswith(what)) == ("body", True), fault
    assert all(size < 1000 for size in sizes)


def test_marks_within_texts_count_as_nothing() -> None:
    text = '[{":,]}' * 100_000 + '\\"' * 200_000
    body = {"prompt": text, "b": [1, 2]}
    assert fields_of(json.dumps(body).encode()) == body
