"""What no gateway of ours sends is refused by a worker, each sequence by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.types import BeamParams, Sampling, SequenceSpec
from baton.v1 import sampling_pb2, sequence_service_pb2
from baton.wire import sequence_from_proto, sequence_to_proto
from engine.oracle import OracleEngine, OracleOptions
from worker_core.commands import Open
from worker_core.sequence_rules import refusal
from worker_core.sequence_service import SequenceServicer

SPEC = SequenceSpec("r", (1, 2, 3), Sampling(max_tokens=4))
VOCAB_SIZE = 64


def sampling(**fields: Any) -> SequenceSpec:
    return SequenceSpec("r", (1, 2, 3), Sampling(**{"max_tokens": 4, **fields}))


BAD = {
    "temperature": sampling(temperature=math.nan),
    "temperature ": sampling(temperature=math.inf),
    "temperature  ": sampling(temperature=-1.0),
    "top_p": sampling(top_p=math.nan),
    "top_p ": sampling(top_p=0.0),
    "min_p": sampling(min_p=2.0),
    "repetition_penalty": sampling(repetition_penalty=0.0),
    "presence_penalty": sampling(presence_penalty=math.nan),
    "frequency_penalty": sampling(frequency_penalty=-math.inf),
    "logit_bias": sampling(logit_bias={1: math.nan}),
    "logit_bias ": sampling(logit_bias={VOCAB_SIZE: 1.0}),
    "stop_token_ids": sampling(stop_token_ids=frozenset((2**32 - 1,))),
    "bad_words": sampling(bad_words=((),)),
    "bad_words ": sampling(bad_words=((1, VOCAB_SIZE),)),
    "logprobs": sampling(logprobs=-2),
    "prompt_logprobs": sampling(prompt_logprobs=2**31 - 1),
    "max_tokens": sampling(max_tokens=0),
    "width": sampling(beam=BeamParams(0)),
    "width ": sampling(beam=BeamParams(2**32 - 1)),
    "num_returned": sampling(beam=BeamParams(2, num_returned=3)),
    "length_penalty": sampling(beam=BeamParams(2, length_penalty=math.nan)),
    "prompt.token_ids": SequenceSpec("r", (1, VOCAB_SIZE), Sampling()),
    "prompt.token_ids ": SequenceSpec("r", (1,), Sampling(), output_token_ids=(VOCAB_SIZE,)),
    "prompt": SequenceSpec("r", (), Sampling()),
    "tenant": SequenceSpec("r", (1,), Sampling(), tenant=b"t"),
    "tenant ": SequenceSpec("r", (1,), Sampling(), tenant=b"t" * 65),
    "num_choices": SequenceSpec("r", (1,), Sampling(), num_choices=2**32 - 1),
}


@pytest.mark.parametrize("field", BAD)
def test_what_could_not_be_computed_is_refused_by_its_field(field: str) -> None:
    engine = OracleEngine(OracleOptions(num_blocks=8, vocab_size=VOCAB_SIZE)).spec
    assert refusal(SPEC, engine) is None
    # As it arrives: what the wire does to a value changes nothing.
    error = refusal(sequence_from_proto(sequence_to_proto(BAD[field])), engine)
    assert error is not None
    assert field.strip() in error.message


Edit = Callable[[sequence_service_pb2.OpenSequence], object]


async def test_an_enum_that_is_unknown_here_fails_its_sequence_alone() -> None:
    opened: list[Any] = []
    servicer = SequenceServicer(opened.append, lambda: True, lambda *_: 0)

    async def requests() -> Any:
        for number, edit in enumerate((early_stopping, source, nothing), start=1):
            message = sequence_service_pb2.OpenSequence(
                handle=number, sequence=sequence_to_proto(sampling(beam=BeamParams(2)))
            )
            edit(message)
            yield sequence_service_pb2.ServeRequest(open=message)

    class Context:
        async def send_initial_metadata(self, _metadata: object) -> None: ...

    answers = [
        event
        async for response in servicer.Serve(requests(), Context())  # type: ignore[arg-type]
        for event in response.events
    ]
    assert [(event.handle, event.failed.reason) for event in answers] == [
        (1, InvalidRequest.reason),
        (2, InvalidRequest.reason),
    ]
    assert "early_stopping: 77 is unknown here" in answers[0].failed.message
    assert "source: 77 is unknown here" in answers[1].failed.message
    assert [command.handle for command in opened if isinstance(command, Open)] == [3]


def early_stopping(message: sequence_service_pb2.OpenSequence) -> None:
    message.sequence.sampling.beam.early_stopping = sampling_pb2.EarlyStopping.ValueType(77)


def source(message: sequence_service_pb2.OpenSequence) -> None:
    message.source = sequence_service_pb2.KvSource.ValueType(77)


def nothing(_message: sequence_service_pb2.OpenSequence) -> None: ...
