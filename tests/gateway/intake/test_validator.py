"""The validator: every bad field is named, with its value; what passes has a meaning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import FieldViolation, InvalidRequest
from baton.sampling_params import OPTIONS
from baton.types import BeamParams, EarlyStopping, Slo
from baton.v1 import inference_pb2, sampling_pb2
from gateway.intake import validator
from gateway.intake.request import ValidatedRequest
from gateway.intake.rules import ModelFacts
from gateway.intake.validator import (
    Ids,
    LongFields,
    Tokenized,
    check_detokenize,
    check_request,
    check_tokenize,
    resolve,
)
from gateway.long_work import in_pieces
from tests.support.virtual_loop import run_virtual

FACTS = ModelFacts(
    "m", 100, 64, 48, frozenset((2,)), has_chat_template=True, max_num_seqs=200, max_token_chars=8
)
IDS = Ids("r", seed=7, arrival_ns=5)
Params = sampling_pb2.SamplingParams
Prompt = inference_pb2.Prompt


def request(prompt: Prompt | None = None, **sampling: Any) -> inference_pb2.GenerateRequest:
    prompt = prompt or Prompt(text="hello")
    return inference_pb2.GenerateRequest(prompt=prompt, sampling=Params(**sampling))


def beams(
    width: int, length_penalty: float | None = None, early_stopping: int = 0, **sampling: Any
) -> inference_pb2.GenerateRequest:
    search = sampling_pb2.BeamSearch(width=width, length_penalty=length_penalty)
    search.early_stopping = early_stopping  # type: ignore[assignment] # unknown ones, too
    return request(beam_search=search, **sampling)


def ids_prompt(*ids: int) -> Prompt:
    return Prompt(token_ids=inference_pb2.TokenIds(ids=ids))


def resolved(
    given_request: inference_pb2.GenerateRequest, prompt_token_ids: Sequence[int]
) -> ValidatedRequest:
    """resolve(), where each bad word is two tokens, and another one after a space."""
    words = tuple(((i, i + 1), (i + 50,)) for i, _ in enumerate(given_request.sampling.bad_words))
    read = check(given_request)
    return resolve(given_request, Tokenized(tuple(prompt_token_ids), words), FACTS, IDS, read)


def check(asked: inference_pb2.GenerateRequest, facts: ModelFacts = FACTS) -> LongFields:
    return run_virtual(check_request(asked, facts))


def chat(*messages: tuple[str, str]) -> Prompt:
    return Prompt(
        chat=inference_pb2.ChatPrompt(
            messages=[inference_pb2.ChatMessage(role=r, content=c) for r, c in messages]
        )
    )


def test_a_request_has_the_targets_of_its_class_else_of_its_keys() -> None:
    tight, loose = Slo(0.3, 0.03), Slo(30.0)
    facts = replace(FACTS, slo_classes={"interactive": tight, "batch": loose})

    def targets(slo_class: str, of_key: str) -> Slo | None:
        asked = request()
        asked.slo_class = slo_class
        ids = replace(IDS, slo_class=of_key)
        return resolve(asked, Tokenized((1,), ()), facts, ids, check(asked, facts)).spec.slo

    assert targets("interactive", "batch") == tight
    assert targets("", "batch") == loose
    assert targets("", "") is None


def test_an_unknown_class_is_refused_by_name_with_the_known_ones() -> None:
    asked = request()
    asked.slo_class = "urgent"
    facts = replace(FACTS, slo_classes={"interactive": Slo(0.3), "batch": Slo(30.0)})
    assert "'urgent'" in violations(asked, facts)["slo_class"]
    assert "interactive, batch" in violations(asked, facts)["slo_class"]
    assert "leave it out" in violations(asked)["slo_class"]


def violations(bad: inference_pb2.GenerateRequest, facts: ModelFacts = FACTS) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        check(bad, facts)
    return {v.field: v.description for v in caught.value.violations}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, 129, 2**32 - 1]),
        ("best_of", [0, 129]),
        ("prompt_logprobs", [21]),
        ("bad_words", [["x"] * 129]),
        ("temperature", [-0.1, 100.5, math.nan, math.inf, -math.inf]),
        ("top_p", [0.0, -1.0, 1.01, math.nan]),
        ("min_p", [-0.01, 1.01, math.nan]),
        ("repetition_penalty", [0.0, -1.0, 101.0, math.nan, math.inf]),
        ("presence_penalty", [-2.5, 2.5, math.nan]),
        ("frequency_penalty", [-2.5, 2.5, math.nan]),
        ("max_tokens", [0]),
        ("logprobs", [21]),
        ("stop_token_ids", [[1] * 65]),
        ("stop", [["x"] * 17, ["x"] * 1000]),
        ("logit_bias", [dict.fromkeys(range(1025), 0.0)]),
    ],
)
def test_a_field_out_of_range_is_named_alone(field: str, values: list[Any]) -> None:
    for value in values:
        found = violations(request(**{field: value}), replace(FACTS, vocab_size=5000))
        assert list(found) == [f"sampling.{field}"]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (request(stop=["ok", ""]), "sampling.stop[1]"),
        (request(stop=["x" * 1025]), "sampling.stop[0]"),
        (request(stop_token_ids=[1, 100]), "sampling.stop_token_ids[1]"),
        (request(logit_bias={100: 1.0}), "sampling.logit_bias[100]"),
        (request(logit_bias={3: math.nan}), "sampling.logit_bias[3]"),
        (request(logit_bias={3: 100.5}), "sampling.logit_bias[3]"),
        (request(min_tokens=5, max_tokens=4), "sampling.min_tokens"),
        (request(n=3, best_of=2), "sampling.best_of"),
        (request(bad_words=["ok", ""]), "sampling.bad_words[1]"),
        (request(bad_words=["x" * 257]), "sampling.bad_words[0]"),
        (beams(width=0), "sampling.beam_search.width"),
        (beams(width=65), "sampling.beam_search.width"),
        (beams(width=2, length_penalty=math.nan), "sampling.beam_search.length_penalty"),
        (beams(width=2, length_penalty=-10.5), "sampling.beam_search.length_penalty"),
        (beams(width=2, early_stopping=3), "sampling.beam_search.early_stopping"),
        (beams(width=2, n=3), "sampling.n"),
        (request(Prompt()), "prompt"),
        (request(Prompt(text="")), "prompt.text"),
        (request(ids_prompt()), "prompt.token_ids"),
        (request(ids_prompt(1, 2**32 - 1)), "prompt.token_ids.ids[1]"),
        (request(ids_prompt(*[1] * 64)), "prompt"),
        (request(ids_prompt(*[1] * 48)), "prompt"),
        (request(ids_prompt(*[1] * 40), max_tokens=25), "sampling.max_tokens"),
        (request(ids_prompt(*[1] * 40), min_tokens=25), "sampling.min_tokens"),
        (request(chat()), "prompt.chat.messages"),
        (request(chat(*[("user", "x")] * 1025)), "prompt.chat.messages"),
        (request(chat(("", "x"))), "prompt.chat.messages[0].role"),
        (inference_pb2.GenerateRequest(prompt=Prompt(text="x"), priority=1001), "priority"),
        (
            inference_pb2.GenerateRequest(prompt=Prompt(text="x"), cache_salt="x" * 257),
            "cache_salt",
        ),
    ],
)
def test_each_wrong_request_names_its_field(bad: inference_pb2.GenerateRequest, field: str) -> None:
    assert list(violations(bad)) == [field]


def test_all_violations_come_in_one_error() -> None:
    bad = request(Prompt(text=""), temperature=math.nan, n=0, top_p=2.0, stop=[""])
    assert set(violations(bad)) == {
        "prompt.text",
        "sampling.temperature",
        "sampling.n",
        "sampling.top_p",
        "sampling.stop[0]",
    }


def test_choices_and_beams_that_no_decode_worker_runs_at_once() -> None:
    narrow = replace(FACTS, max_num_seqs=4)
    for bad, field in (
        (request(n=5), "n"),
        (request(best_of=5), "best_of"),
        (beams(width=5), "beam_search.width"),
    ):
        text = violations(bad, narrow)[f"sampling.{field}"]
        assert text.endswith("4, which the decode workers run at once")
    for good in (request(n=4), request(n=2, best_of=4), beams(width=4, n=3)):
        check(good, narrow)


#: Options that a beam search leaves no meaning, each with a value that is right without one.
OTHER_THAN_BEAMS: dict[str, Any] = {
    name: {"best_of": 2, "logit_bias": {1: 1.0}, "stop": ["x"], "bad_words": ["x"]}.get(name, 1)
    for name, option in OPTIONS.items()
    if not option.with_beams
}


@pytest.mark.parametrize("field", OTHER_THAN_BEAMS)
def test_what_a_beam_search_has_no_use_for_is_refused(field: str) -> None:
    bad = beams(width=2, **{field: OTHER_THAN_BEAMS[field]})
    assert list(violations(bad)) == [f"sampling.{field}"]


def test_what_is_about_drawing_goes_with_no_beam_search() -> None:
    assert {name for name, option in OPTIONS.items() if option.changes_draw} <= set(
        OTHER_THAN_BEAMS
    )
    assert {"seed", "logprobs", "stop", "best_of"} <= set(OTHER_THAN_BEAMS)
    assert not {"n", "max_tokens", "stop_token_ids", "echo"} & set(OTHER_THAN_BEAMS)


def test_a_beam_search_is_resolved() -> None:
    asked = beams(width=4, early_stopping=2, n=3, min_tokens=2, stop_token_ids=[9], echo=True)
    check(asked)
    spec = resolved(asked, (1,)).spec
    beam = spec.sampling.beam
    assert beam == BeamParams(4, 1.0, EarlyStopping.NEVER, num_returned=3)
    assert spec.num_choices == 3
    assert spec.sampling.is_greedy
    assert spec.sampling.stop_token_ids == {2, 9}
    assert resolved(asked, (1,)).num_returned == 3


def test_choices_are_resolved() -> None:
    for asked, choices, returned in (
        (request(), 1, 1),
        (request(n=3), 3, 3),
        (request(n=3, best_of=5), 5, 3),
        (request(best_of=5), 5, 1),
    ):
        made = resolved(asked, (1,))
        assert (made.spec.num_choices, made.num_returned) == (choices, returned)


def test_bad_words_are_resolved_in_every_way_they_are_written() -> None:
    spec = resolved(request(bad_words=["a", "b"]), (1,)).spec
    assert spec.sampling.bad_words == ((0, 1), (50,), (1, 2), (51,))
    # The tokenizer may know more tokens than the model does.
    words = (((5, 100), (6,)), ((6,), (99,)))
    spec = resolve(
        request(bad_words=["a", "b"]), Tokenized((1,), words), FACTS, IDS, LongFields()
    ).spec
    assert spec.sampling.bad_words == ((6,), (99,))


def test_bad_words_without_tokens_or_that_end_the_output_are_refused() -> None:
    asked = request(bad_words=["a", "", "b", "c"], stop_token_ids=[9])
    words = (((1,),), ((),), ((2,),), ((5, 6), (9,)))
    with pytest.raises(InvalidRequest) as caught:
        resolve(asked, Tokenized((1,), words), FACTS, IDS, LongFields())
    found = {v.field: v.description for v in caught.value.violations}
    assert list(found) == [f"sampling.bad_words[{i}]" for i in (1, 2, 3)]
    assert "no token" in found["sampling.bad_words[1]"]
    assert "ignore_eos" in found["sampling.bad_words[2]"]
    # 2 is the model's end token, and it may be forbidden where it ends nothing.
    resolve(
        request(bad_words=["b"], ignore_eos=True),
        Tokenized((1,), (((2,),),)),
        FACTS,
        IDS,
        LongFields(),
    )


def test_log_probabilities_of_a_prompt_must_fit_a_message() -> None:
    facts = replace(FACTS, max_model_len=10**6, max_kv_tokens=10**6)
    many = ids_prompt(*[1] * 60_000)
    assert list(violations(request(many, prompt_logprobs=20), facts)) == [
        "sampling.prompt_logprobs"
    ]
    check(request(many, prompt_logprobs=10), facts)
    check(request(many, logprobs=20), facts)


def test_a_flood_of_wrong_entries_is_not_repeated_in_full() -> None:
    assert len(violations(request(stop=[""] * 1000))) < 10
    assert len(violations(request(ids_prompt(*[500] * 60)))) < 10


def test_long_values_are_shown_cut() -> None:
    shown = violations(request(stop=["x" * 5000]))["sampling.stop[0]"]
    assert len(shown) < 200


def test_a_model_without_a_template_takes_no_chat() -> None:
    facts = replace(FACTS, has_chat_template=False)
    assert list(violations(request(chat(("user", "x"))), facts)) == ["prompt.chat"]


def test_a_text_is_measured_once_it_is_tokenized() -> None:
    with pytest.raises(InvalidRequest, match="no token"):
        resolved(request(), ())
    with pytest.raises(InvalidRequest, match="KV memory holds 48"):
        resolved(request(), (1,) * 48)
    with pytest.raises(InvalidRequest, match="lower it to 24"):
        resolved(request(max_tokens=25), (1,) * 40)


def test_unset_fields_take_their_defaults() -> None:
    made = resolved(request(), (1, 3))
    spec, text = made.spec, made.text
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (1.0, 1.0, 1.0)
    assert (sampling.top_k, sampling.min_p, sampling.min_tokens) == (0, 0.0, 0)
    assert sampling.max_tokens == 62
    assert sampling.stop_token_ids == {2}
    assert (sampling.seed, sampling.logprobs) == (7, -1)
    assert text.skip_special_tokens
    assert spec.rank == (0, 5, "r", 0)
    assert spec.tenant == b""


def test_given_fields_are_kept() -> None:
    params: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": 3,
        "seed": 0,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": [9],
        "skip_special_tokens": False,
        "logit_bias": {4: -1.5},
    }
    given_request = request(**params)
    given_request.cache_salt = "salt"
    given_request.priority = -4
    made = resolved(given_request, (1,))
    spec, text = made.spec, made.text
    sampling = spec.sampling
    assert sampling.is_greedy
    assert (sampling.max_tokens, sampling.seed, sampling.logprobs) == (3, 0, 0)
    assert sampling.stop_token_ids == {9}
    assert dict(sampling.logit_bias) == {4: -1.5}
    assert text.user_stop_token_ids == {9}
    assert not text.skip_special_tokens
    assert len(spec.tenant) == 16
    assert spec.priority == -4


@given(
    num_prompt=st.integers(1, 70),
    max_tokens=st.none() | st.integers(1, 70),
    min_tokens=st.integers(0, 70),
)
def test_what_passes_fits_the_model(
    num_prompt: int, max_tokens: int | None, min_tokens: int
) -> None:
    bad = request(ids_prompt(*[1] * num_prompt), max_tokens=max_tokens, min_tokens=min_tokens)
    try:
        check(bad)
        spec = resolved(bad, (1,) * num_prompt).spec
    except InvalidRequest:
        fits = num_prompt <= 47 and num_prompt + max(max_tokens or 1, min_tokens) <= 64
        assert not fits or min_tokens > (max_tokens or 64)
    else:
        assert 1 <= spec.sampling.max_tokens <= 64 - num_prompt
        assert spec.sampling.min_tokens <= spec.sampling.max_tokens
        assert num_prompt + 1 <= FACTS.max_kv_tokens


@given(data=st.binary(max_size=200))
def test_hostile_bytes_are_a_request_or_a_refusal(data: bytes) -> None:
    try:
        parsed = inference_pb2.GenerateRequest.FromString(data)
    except Exception:  # noqa: BLE001 - protobuf's own refusal
        return
    try:
        check(parsed)
        spec = resolved(parsed, (1,)).spec
    except InvalidRequest:
        return
    assert math.isfinite(spec.sampling.temperature)
    assert 1 <= spec.num_choices <= 128


@pytest.mark.parametrize("num_wrong", [0, 1, 20])
def test_ids_that_were_read_in_pieces_are_refused_alike(
    num_wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = replace(FACTS, max_model_len=300_000, max_kv_tokens=300_000)
    ids = [5] * 200_000 + [FACTS.vocab_size + 1] * num_wrong
    asked = request(ids_prompt(*ids), seed=1)
    asked.resume_from.add(choice=0, token_ids=ids)

    def found(piece: int) -> Sequence[FieldViolation]:
        monkeypatch.setattr(validator, "in_pieces", partial(in_pieces, size=piece))
        try:
            read = check(asked, facts)
        except InvalidRequest as error:
            return error.violations
        assert read.prompt.token_ids == read.so_far[0].token_ids == tuple(ids)
        return ()

    in_one, in_many = found(len(ids)), found(1000)
    assert in_one == in_many
    assert (len(in_one) > 0) == (num_wrong > 0)


def test_answers_so_far_have_no_more_ids_than_others_wait_for() -> None:
    facts = replace(FACTS, max_model_len=10_000, max_kv_tokens=10_000)
    asked = request(n=40, seed=1)
    for choice in range(40):
        asked.resume_from.add(choice=choice, token_ids=[1] * 7_000)
    with pytest.raises(InvalidRequest) as caught:
        check(asked, facts)
    (violation,) = caught.value.violations
    assert violation.field == "resume_from"
    assert violation.description == "280000 token ids in all; give at most 272144"
    del asked.resume_from[30:]
    check(asked, facts)


def test_tokenize_and_detokenize_are_checked_by_the_same_rules() -> None:
    with pytest.raises(InvalidRequest, match=r"prompt\.text"):
        run_virtual(check_tokenize(inference_pb2.TokenizeRequest(prompt=Prompt(text="")), FACTS))
    with pytest.raises(InvalidRequest, match=r"token_ids\[1\]"):
        run_virtual(check_detokenize(inference_pb2.DetokenizeRequest(token_ids=[1, 100]), FACTS))
    run_virtual(check_tokenize(inference_pb2.TokenizeRequest(prompt=Prompt(text="x")), FACTS))
    run_virtual(check_detokenize(inference_pb2.DetokenizeRequest(token_ids=[1, 99]), FACTS))


def test_tokens_that_only_the_tokenizer_knows_are_refused() -> None:
    text = request(Prompt(text="hello"), max_tokens=4)
    spec = resolve(text, Tokenized((1, FACTS.vocab_size - 1)), FACTS, IDS, LongFields()).spec
    assert spec.num_tokens == 2
    with pytest.raises(InvalidRequest, match=f"{FACTS.vocab_size + 3} the first") as caught:
        resolve(text, Tokenized((1, FACTS.vocab_size + 3, 2)), FACTS, IDS, LongFields())
    assert [v.field for v in caught.value.violations] == ["prompt"]


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt(text="x" * (47 * 8 + 1)),
        Prompt(
            chat=inference_pb2.ChatPrompt(
                messages=[inference_pb2.ChatMessage(role="user", content="x" * 200)] * 2
            )
        ),
    ],
)
def test_a_text_that_no_prompt_can_hold_is_refused_unread(prompt: Prompt) -> None:
    for checked, message in (
        (check_request, inference_pb2.GenerateRequest(prompt=prompt)),
        (check_tokenize, inference_pb2.TokenizeRequest(prompt=prompt)),
    ):
        with pytest.raises(InvalidRequest, match=r"37\d|400") as caught:
            run_virtual(checked(message, FACTS))  # type: ignore[arg-type] # each its own
        (violation,) = caught.value.violations
        assert violation.field in ("prompt.text", "prompt.chat.messages")
        assert "at most 47 tokens here, none of more than 8 characters" in violation.description
    check(request(Prompt(text="x" * 47 * 8)))


def test_too_many_ids_are_refused_unread() -> None:
    for ids in ([1] * 48, [10**6] * 48):
        with pytest.raises(InvalidRequest) as caught:
            check(request(ids_prompt(*ids)))
        assert [v.field for v in caught.value.violations] == ["prompt"]
    with pytest.raises(InvalidRequest, match="65 ids: the model takes 64"):
        run_virtual(
            check_detokenize(inference_pb2.DetokenizeRequest(token_ids=[10**6] * 65), FACTS)
        )


SO_FAR = inference_pb2.ChoiceSoFar


@pytest.mark.parametrize(
    ("sampling", "entries", "field"),
    [
        ({"seed": 1}, [SO_FAR(choice=1, token_ids=[3])], "resume_from[0].choice"),
        ({"seed": 1}, [SO_FAR(token_ids=[100])], "resume_from[0].token_ids[0]"),
        ({"seed": 1}, [SO_FAR()], "resume_from[0].token_ids"),
        ({"seed": 1}, [SO_FAR(token_ids=[3] * 101)], "resume_from[0].token_ids"),
        ({"seed": 1}, [SO_FAR(token_ids=[3])] * 2, "resume_from"),
        ({"seed": 1, "n": 1, "best_of": 2}, [SO_FAR(token_ids=[3])], "resume_from"),
        ({}, [SO_FAR(token_ids=[3])], "sampling.seed"),
    ],
)
def test_what_an_answer_cannot_go_on_behind(
    sampling: dict[str, Any], entries: list[inference_pb2.ChoiceSoFar], field: str
) -> None:
    given_request = request(**sampling)
    given_request.resume_from.extend(entries)
    with pytest.raises(InvalidRequest) as caught:
        check(given_request)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_an_output_that_has_all_its_tokens_must_have_ended() -> None:
    given_request = request(seed=1, n=2, max_tokens=3)
    entries = [SO_FAR(token_ids=[3, 4]), SO_FAR(choice=1, token_ids=[3] * 3)]
    given_request.resume_from.extend(entries)
    check(given_request)
    with pytest.raises(InvalidRequest, match="has_ended") as caught:
        resolved(given_request, [5, 6])
    assert [v.field for v in caught.value.violations] == ["resume_from[1].token_ids"]
    given_request.resume_from[1].has_ended = True
    resolved(given_request, [5, 6])
