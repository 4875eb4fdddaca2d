"""Kept answers: whose they are, how many, for how long."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http import response_store
from gateway.http.response_store import ResponseStore

OWNERS = (b"a", b"b", b"")
NAMES = tuple(map(str, range(6)))

calls = st.lists(
    st.tuples(
        st.sampled_from(("put", "drop", "wait")),
        st.sampled_from(OWNERS),
        st.sampled_from(NAMES),
        st.integers(0, 300),
    ),
    max_size=60,
)


@given(calls)
def test_an_owner_finds_the_last_of_its_own_within_bounds(calls: Any) -> None:
    now, model = [0.0], dict[tuple[bytes, str], tuple[float, str]]()
    store = ResponseStore(1000, 50.0, lambda: now[0])
    for verb, owner, name, amount in calls:
        if verb == "put":
            text = f"{owner!r}{name}" + "x" * amount
            store.put(owner, name, {"text": text}, [text])
            model[owner, name] = (now[0] + 50.0, text)
        elif verb == "drop":
            store.drop(owner, name)
            model.pop((owner, name), None)
        else:
            now[0] += amount / 10
        assert store.num_bytes <= 1000
        for each in OWNERS:
            for key in NAMES:
                document, items = store.document(each, key), store.items(each, key)
                if document is not None:  # full, it may have lost it
                    expires_s, text = model[each, key]
                    assert (json.loads(document)["text"], items) == (text, [text])
                    assert now[0] < expires_s


def test_what_an_owner_puts_pushes_out_its_own_first() -> None:
    store = ResponseStore(1000, 50.0)
    answer = {"text": "x" * 100}
    store.put(b"polite", "1", answer, ())
    for index in range(100):
        store.put(b"greedy", str(index), answer, ())
    assert store.document(b"polite", "1") == json.dumps(answer)
    assert store.document(b"greedy", "99") == json.dumps(answer)
    assert store.document(b"greedy", "1") is None


def test_an_answer_that_is_too_large_pushes_out_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_ENTRY_BYTES", 500)
    store = ResponseStore(1000, 50.0)
    store.put(b"a", "1", {}, ())
    for num_chars in (600, 2000):
        store.put(b"b", "2", {"text": "x" * num_chars}, ())
        assert store.document(b"b", "2") is None
    assert store.document(b"a", "1") == "{}"
