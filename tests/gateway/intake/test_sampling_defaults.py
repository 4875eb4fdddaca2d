"""A model's generation_config.json: what requests get that leave an option out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.types import Sampling
from baton.v1 import inference_pb2, sampling_pb2
from gateway.http.completions import CompletionBody, CompletionFormat
from gateway.intake.rules import ModelFacts
from gateway.intake.sampling_defaults import sampling_defaults
from gateway.intake.validator import Ids, Tokenized, check_request, resolve
from tests.support.http_bodies import parsed
from tests.support.virtual_loop import run_virtual

FILE = {
    "do_sample": True,
    "eos_token_id": [2],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_new_tokens": 30,
    "max_length": 20,
    "top_h": None,
}
FACTS = ModelFacts(
    "m",
    100,
    64,
    48,
    frozenset((2,)),
    has_chat_template=True,
    max_num_seqs=8,
    max_token_chars=8,
    sampling_defaults=sampling_defaults(FILE),
)
OWN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
#: What each would be without the file.
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def sampled(params: sampling_pb2.SamplingParams, facts: ModelFacts = FACTS) -> Sampling:
    prompt = inference_pb2.Prompt(text="hello")
    request = inference_pb2.GenerateRequest(prompt=prompt, sampling=params)
    read = run_virtual(check_request(request, facts))
    resolved = resolve(request, Tokenized((3, 4)), facts, Ids("r", seed=7, arrival_ns=5), read)
    return resolved.spec.sampling


def given(**sampling: Any) -> Sampling:
    return sampled(sampling_pb2.SamplingParams(**sampling))


def values(sampling: Sampling) -> dict[str, Any]:
    return {name: pytest.approx(getattr(sampling, name)) for name in OWN}


def test_a_request_that_is_silent_gets_the_models_own() -> None:
    assert values(given()) == OWN
    assert given().max_tokens == 30
    assert given().presence_penalty == 0


@pytest.mark.parametrize("name", OWN)
def test_what_a_request_says_wins_even_where_it_says_the_neutral_value(name: str) -> None:
    assert values(given(**{name: NEUTRAL[name]})) == {**OWN, name: NEUTRAL[name]}


def test_a_default_is_the_number_that_a_request_with_it_would_have() -> None:
    """As 32 bits on the wire: the same seed draws the same token whether the file or the request
    says 0.6."""
    assert given() == given(**OWN, max_tokens=30)


def test_the_length_is_within_what_the_context_leaves_and_a_request_asks_for() -> None:
    small = replace(FACTS, max_model_len=20)
    assert sampled(sampling_pb2.SamplingParams(), small).max_tokens == 18
    assert given(min_tokens=40).max_tokens == 40
    assert given(max_tokens=50).max_tokens == 50


def test_a_beam_search_takes_the_length_alone() -> None:
    sampling = given(beam_search=sampling_pb2.BeamSearch(width=2))
    assert values(sampling) == {**NEUTRAL, "temperature": 0.0}
    assert sampling.max_tokens == 30


def test_over_http_all_tokens_can_be_asked_for() -> None:
    """-1 is what vLLM calls none; it is said, so that no default comes in."""

    def of(body: bytes) -> Sampling:
        form = CompletionFormat(parsed(CompletionBody, body), lambda token_id: b"%d" % token_id)
        return sampled(form.requests[0].sampling)

    assert values(of(b'{"prompt": "x"}')) == OWN
    assert of(b'{"prompt": "x", "top_k": -1}').top_k == 0
    assert of(b'{"prompt": "x", "temperature": 0}').temperature == 0
    assert of(b'{"prompt": "x", "temperature": null}').temperature == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 1.5),
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
    ],
)
def test_what_no_request_could_have_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{field}={value}: .*--generation-config=none"):
        sampling_defaults({field: value})


def test_a_file_that_says_nothing_changes_nothing() -> None:
    assert not sampling_defaults({"eos_token_id": 2, "top_k": -1, "temperature": None})
