"""`baton check --receipt`: asks again for an answer that a receipt describes, and compares."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from grpc.aio import AioRpcError

from baton.errors import ConfigError, EngineFault
from baton.rpc.channel import aio_channel
from baton.rpc.status import from_rpc_error
from baton.v1 import inference_pb2, inference_pb2_grpc
from baton.wire import numerics_from_proto

Receipt = inference_pb2.Receipt


@dataclass(frozen=True, slots=True)
class ReceiptVerdict:
    """Comparison of an answer with its repetition. num_logprobs: compared; 0 if one of the answers
    has none. first_difference: in words; empty if there is none. changes: what made the second
    answer otherwise than the first."""

    num_tokens: int
    num_logprobs: int
    first_difference: str
    changes: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        return not self.first_difference


def read_receipts(path: Path) -> tuple[Receipt, ...]:
    """Receipts of a file: of an answer of the HTTP API, as it came, or alone. Raises
    ConfigError."""
    fix = "give an answer that was asked for with return_receipt"
    try:
        document = json.loads(path.read_text())
        found = document.get("receipt", document) if isinstance(document, dict) else document
        receipts = found if isinstance(found, list) else [found]
        read = tuple(ParseDict(receipt, Receipt()) for receipt in receipts)
    except (OSError, ValueError, ParseError) as error:
        raise ConfigError.of("receipt", path, f"{error}; {fix}") from error
    if not read or not all(receipt.prompt_token_ids for receipt in read):
        raise ConfigError.of("receipt", path, f"has no receipt; {fix}")
    return read


async def replay(
    receipt: Receipt, address: str, api_key: str | None = None, model: str | None = None
) -> Receipt:
    """Ask a gateway, by gRPC, for the same answer. model: that of the receipt if None; empty for
    the gateway's first. Raises BatonError."""
    if model is None:
        model = receipt.adapter or receipt.model
    request = inference_pb2.GenerateRequest(
        model=model, sampling=receipt.sampling, return_receipt=True
    )
    request.prompt.token_ids.ids.extend(receipt.prompt_token_ids)
    metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
    async with aio_channel(address) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, metadata=metadata)
        try:
            async for chunk in call:
                if chunk.HasField("receipt"):
                    return chunk.receipt
        except AioRpcError as error:
            raise from_rpc_error(error, address=address) from None
    raise EngineFault("the gateway gave no receipt; it is older than receipts")


def compare(receipt: Receipt, again: Receipt) -> ReceiptVerdict:
    """Compare an answer with its repetition. Log probabilities must be equal to the bit."""
    return ReceiptVerdict(
        sum(len(choice.token_ids) for choice in receipt.choices),
        sum(
            min(len(one.logprobs), len(other.logprobs))
            for one, other in zip(receipt.choices, again.choices, strict=False)
        ),
        _first_difference(receipt, again),
        tuple(_changes(receipt, again)),
    )


def _first_difference(receipt: Receipt, again: Receipt) -> str:
    if len(receipt.choices) != len(again.choices):
        return f"{len(again.choices)} choices instead of {len(receipt.choices)}"
    for number, (one, other) in enumerate(zip(receipt.choices, again.choices, strict=True)):
        at = _first_unequal(one.token_ids, other.token_ids)
        if at is not None:
            return f"choice {number}, token {at}: {_at(other.token_ids, at)} instead of " + _at(
                one.token_ids, at
            )
        # Tokens that a stream was taken up with have none.
        num = min(len(one.logprobs), len(other.logprobs))
        values = (each.logprobs[len(each.logprobs) - num :] for each in (one, other))
        before, after = values
        at = _first_unequal(before, after)
        if at is not None:
            place = len(one.token_ids) - num + at
            return (
                f"choice {number}, token {place}: the log probability is {after[at]!r} instead of "
                f"{before[at]!r}"
            )
    return ""


def _first_unequal(one: Sequence[float], other: Sequence[float]) -> int | None:
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    found = next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)
    return None if found == len(one) == len(other) else found


def _at(values: Sequence[int], at: int) -> str:
    return str(values[at]) if at < len(values) else "the end"


def _changes(receipt: Receipt, again: Receipt) -> list[str]:
    facts: tuple[Mapping[str, Any], ...] = tuple(
        {
            "digest of the weights": each.digest,
            "type of KV": each.kv_dtype,
            "numerics": "; ".join(
                sorted({str(numerics_from_proto(worker.numerics)) for worker in each.workers})
            ),
            "versions": ", ".join(sorted({worker.software_version for worker in each.workers})),
        }
        for each in (receipt, again)
    )
    return [
        f"{name}: {after}, was {facts[0][name]}"
        for name, after in facts[1].items()
        if after != facts[0][name]
    ]
