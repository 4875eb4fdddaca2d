"""Where the time of one request went. Durations add up over its placements."""

from __future__ import annotations

from dataclasses import dataclass

from baton.v1 import inference_pb2


@dataclass(slots=True)
class Timeline:
    """Written by the relay and its attempts. Moments are on the event loop's clock, in seconds."""

    arrival_s: float
    tokenize_ms: float = 0.0
    queue_ms: float = 0.0
    reserve_ms: float = 0.0
    prefill_queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_exposed_ms: float = 0.0
    transfer_bytes: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    num_resumes: int = 0
    cached_tokens: int | None = None
    """Of the first prefill, once it is known; later ones find our own tokens."""
    decode_cached_tokens: int | None = None

    def token_came(self, now_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s

    def name_workers(self, prefill: str, decode: str) -> None:
        """Who serves it now; the last ones count."""
        self.prefill_worker = prefill or self.prefill_worker
        self.decode_worker = decode or self.decode_worker

    def to_proto(self, now_s: float) -> inference_pb2.RequestTiming:
        first_s = self.first_token_s if self.first_token_s is not None else now_s
        last_s = self.last_token_s if self.last_token_s is not None else first_s
        return inference_pb2.RequestTiming(
            tokenize_ms=self.tokenize_ms,
            queue_ms=self.queue_ms,
            reserve_ms=self.reserve_ms,
            prefill_queue_ms=self.prefill_queue_ms,
            prefill_ms=self.prefill_ms,
            transfer_exposed_ms=self.transfer_exposed_ms,
            time_to_first_token_ms=(first_s - self.arrival_s) * 1e3,
            decode_ms=(last_s - first_s) * 1e3,
            total_ms=(last_s - self.arrival_s) * 1e3,
            transfer_bytes=self.transfer_bytes,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            num_resumes=self.num_resumes,
        )
