"""Adds a receipt to the last piece of an answer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from baton import __version__
from baton.types import WorkerInfo
from baton.v1 import inference_pb2, sampling_pb2
from baton.wire import numerics_to_proto
from gateway.intake.request import ValidatedRequest
from gateway.output.delivery import Write
from gateway.telemetry.timing import Timeline

#: Sampling options with a value in every resolved request.
_RESOLVED = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "max_tokens", "seed"),
)


class ReceiptWriter:
    """Passes pieces on to `write`, and keeps the tokens and log probabilities of all."""

    def __init__(
        self,
        write: Write,
        request: inference_pb2.GenerateRequest,
        validated: ValidatedRequest,
        timeline: Timeline,
        infos: Callable[[], Mapping[str, WorkerInfo]],
    ) -> None:
        """infos: of the workers that are known, by name."""
        self._write = write
        self._timeline = timeline
        self._infos = infos
        spec = validated.spec
        self._receipt = inference_pb2.Receipt(
            adapter=spec.adapter,
            prompt_token_ids=spec.prompt_token_ids,
            sampling=_resolved(request.sampling, validated),
            choices=[inference_pb2.ReceiptChoice() for _ in range(validated.num_returned)],
            gateway_version=__version__,
        )
        for index, so_far in validated.resume_from.items():
            self._receipt.choices[index].token_ids.extend(so_far.token_ids)

    def __call__(self, chunk: inference_pb2.GenerateResponse) -> Coroutine[Any, Any, object] | None:
        choice = self._receipt.choices[chunk.choice]
        choice.token_ids.extend(chunk.token_ids)
        choice.logprobs.extend(position.chosen.logprob for position in chunk.logprobs)
        if chunk.HasField("timing"):
            self._complete()
            chunk.receipt.CopyFrom(self._receipt)
        return self._write(chunk)

    def _complete(self) -> None:
        receipt, timeline, infos = self._receipt, self._timeline, self._infos()
        last = infos.get(timeline.decode_worker or timeline.prefill_worker)
        if last is not None:
            receipt.model, receipt.digest = last.model, last.layout.fingerprint
            receipt.kv_dtype = last.layout.dtype
        for name in timeline.workers:
            worker = receipt.workers.add(worker_id=name)
            if info := infos.get(name):
                worker.tier, worker.software_version = info.tier.name.lower(), info.software_version
                worker.numerics.CopyFrom(numerics_to_proto(info.numerics))
        for handoff in timeline.handoffs:
            receipt.handoffs.add(
                source=handoff.source,
                target=handoff.target,
                num_bytes=handoff.num_bytes,
                checksum=handoff.checksum,
            )
        receipt.num_resumes = timeline.num_resumes


def _resolved(
    asked: sampling_pb2.SamplingParams, validated: ValidatedRequest
) -> sampling_pb2.SamplingParams:
    """The sampling of a request with the values that it left out."""
    resolved, used = sampling_pb2.SamplingParams(), validated.spec.sampling
    resolved.CopyFrom(asked)
    # A beam search takes no other options.
    for name in ("max_tokens",) if asked.HasField("beam_search") else _RESOLVED:
        setattr(resolved, name, getattr(used, name))
    return resolved
