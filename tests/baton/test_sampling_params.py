"""The table of sampling options: what it says is what the contract, the wire and the tiers have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cli.sampling import FLAGS
from baton.sampling_params import OPTIONS, Range, Texts, TokenBiases, TokenIds
from baton.types import BeamParams, EarlyStopping, Sampling
from baton.v1 import sampling_pb2
from baton.wire import sampling_from_proto, sampling_to_proto

PROTO = Path(__file__).parents[2] / "protos" / "baton" / "v1" / "sampling.proto"
IDS = st.integers(0, 2**32 - 1)
FLOATS = st.floats(-100, 100, width=32)


def comments() -> Mapping[str, str]:
    """What the contract says of each field of SamplingParams."""
    message = PROTO.read_text().partition("message SamplingParams {")[2].partition("\n}")[0]
    found: dict[str, str] = {}
    comment = ""
    for line in map(str.strip, message.splitlines()):
        if line.startswith("//"):
            comment += line.removeprefix("//")
        elif field := re.search(r"(\w+) = \d+;", line):
            found[field[1]], comment = comment, ""
    return found


def test_every_field_of_the_contract_is_in_the_table() -> None:
    assert list(OPTIONS) == [field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields]
    assert list(OPTIONS) == list(comments())


@pytest.mark.parametrize("name", OPTIONS)
def test_the_contract_names_the_same_limits(name: str) -> None:
    said = comments()[name]
    match OPTIONS[name].limits:
        case Range(low, high, is_open):
            assert (
                f"({low:g}, {high:g}]" in said
                if is_open
                else re.search(rf"{low:g}(\.\.|, ){high:g}", said)
            )
        case Texts(max_num, max_chars):
            assert f"at most {max_num}, each of 1..{max_chars} characters" in said
        case TokenIds(max_num):
            assert f"at most {max_num}." in said
        case TokenBiases(max_num, bias):
            assert f"{bias.low:g}..{bias.high:g}; at most {max_num} entries" in said


def test_what_the_tiers_know_is_on_the_wire_to_them() -> None:
    names = {field.name for field in fields(Sampling)}
    assert names == {field.name for field in sampling_pb2.TokenSampling.DESCRIPTOR.fields}
    drawn = {name for name, option in OPTIONS.items() if option.changes_draw}
    assert drawn <= names


def test_every_option_has_a_flag_but_those_that_no_flag_can_hold() -> None:
    assert OPTIONS.keys() - set(FLAGS) == {"logit_bias", "beam_search", "structured_output"}


@pytest.mark.parametrize(
    ("name", "default", "text"),
    [
        ("top_p", None, "[above 0, and at most 1; default: 1]"),
        ("max_tokens", None, "[default: what the model's context leaves]"),
        ("max_tokens", 128, "[default: 128]"),
        ("ignore_eos", None, "[default: no]"),
        ("stop", None, "[at most 16 strings, each of 1 to 1024 characters]"),
    ],
)
def test_people_are_shown_limits_and_default(name: str, default: object, text: str) -> None:
    assert OPTIONS[name].describe(default).endswith(f". {text}")


BEAMS = st.builds(
    BeamParams, st.integers(1, 64), st.floats(-10, 10), st.sampled_from(EarlyStopping), IDS
)
SAMPLINGS = st.builds(
    Sampling,
    temperature=FLOATS,
    top_k=IDS,
    top_p=FLOATS,
    min_p=FLOATS,
    repetition_penalty=FLOATS,
    presence_penalty=FLOATS,
    frequency_penalty=FLOATS,
    logit_bias=st.dictionaries(IDS, FLOATS, max_size=3).map(MappingProxyType),
    min_tokens=IDS,
    max_tokens=IDS,
    stop_token_ids=st.frozensets(IDS, max_size=3),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.integers(-1, 20),
    bad_words=st.lists(st.lists(IDS, min_size=1).map(tuple), max_size=3).map(tuple),
    prompt_logprobs=st.integers(-1, 20),
    grammar=st.binary(max_size=9),
    beam=st.none() | BEAMS,
    allowed_token_ids=st.lists(IDS, max_size=3).map(tuple),
    logprob_token_ids=st.lists(IDS, max_size=3).map(tuple),
)


@given(SAMPLINGS)
def test_a_sampling_comes_out_of_its_message_as_it_went_in(sampling: Sampling) -> None:
    sent = sampling_to_proto(sampling).SerializeToString()
    assert sampling_from_proto(sampling_pb2.TokenSampling.FromString(sent)) == sampling
