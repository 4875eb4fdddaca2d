"""Every error of Baton. A leaf has one reason and one gRPC code, and travels as ErrorInfo with rich
details.

BatonError
├── InvalidRequest        INVALID_ARGUMENT     the caller must change a field; names it, its value
│                                              and the fix
├── ModelNotFound         NOT_FOUND            no such model here
├── Unauthenticated       UNAUTHENTICATED      the caller has shown no API key of this server
├── PermissionDenied      PERMISSION_DENIED    the caller's certificate is not one that this worker
│                                              answers to
├── Overloaded            RESOURCE_EXHAUSTED   full now; says when to try again
├── NoWorkers             UNAVAILABLE          a tier has no worker that takes work; says when to
│                                              try again
├── WorkerLost            UNAVAILABLE          the worker went away, and the request could not be
│                                              placed anew
├── HandoffFailed         UNAVAILABLE          KV did not arrive whole; the same request may succeed
├── Draining              UNAVAILABLE          this worker takes no more work
├── DeadlineExceeded      DEADLINE_EXCEEDED    the client's or the handoff's time is over
├── ClientStalled         ABORTED              the client stopped reading
├── Cancelled             CANCELLED            the caller gave the request up
├── PeerMismatch          FAILED_PRECONDITION  two workers cannot work together; names the field and
│                                              both values
├── EngineFault           INTERNAL             a step failed because of this request; others go on
└── StartupError          (never on the wire)  the process cannot start
    ├── ConfigError           an option's value is wrong; names option, value and fix
    └── ModelError            the model cannot be served
        ├── UnsupportedModel      its architecture or a setting is unknown to us
        │   └── UnsupportedSetting    to Baton's own layers of its family
        ├── MissingTensor         the checkpoint lacks a tensor
        ├── TensorMismatch        a tensor has a shape the config does not allow
        ├── AdapterError          a LoRA adapter does not fit, or asks for what is not supported
        └── UnsafeCheckpoint      it has weights as pickles only
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from grpc import StatusCode

from baton.redaction import redacted

DOMAIN = "baton"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field of a request: its path, and what is wrong and how to mend it, the value
    included."""

    field: str
    description: str


class BatonError(Exception):
    """Base of all. `request_id` is set where the error belongs to one request and is known
    there."""

    reason: ClassVar[str] = "UNKNOWN"
    code: ClassVar[StatusCode] = StatusCode.UNKNOWN
    retry_after_s: float | None = None

    def __init__(self, message: str, *, request_id: str = "", **metadata: str) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.metadata: Mapping[str, str] = metadata


class InvalidRequest(BatonError):
    """The caller must change a field."""

    reason = "INVALID_REQUEST"
    code = StatusCode.INVALID_ARGUMENT

    def __init__(
        self,
        message: str,
        *,
        violations: tuple[FieldViolation, ...] = (),
        request_id: str = "",
        **metadata: str,
    ) -> None:
        super().__init__(message, request_id=request_id, **metadata)
        self.violations = violations

    @classmethod
    def of(cls, *violations: FieldViolation) -> InvalidRequest:
        """One error for all violations found in a request."""
        text = "; ".join(f"{v.field}: {v.description}" for v in violations)
        return cls(text, violations=violations)


class ModelNotFound(BatonError):
    """No such model here."""

    reason = "MODEL_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class Unauthenticated(BatonError):
    """The caller has shown no API key of this server."""

    reason = "UNAUTHENTICATED"
    code = StatusCode.UNAUTHENTICATED


class PermissionDenied(BatonError):
    """The caller's certificate is not one that this worker answers to."""

    reason = "PERMISSION_DENIED"
    code = StatusCode.PERMISSION_DENIED


class RetriableError(BatonError):
    """May succeed when tried again after `retry_after_s`. Never raised itself."""

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, request_id: str = "", **metadata: str
    ) -> None:
        super().__init__(message, request_id=request_id, **metadata)
        self.retry_after_s = retry_after_s


class Overloaded(RetriableError):
    """Full now."""

    reason = "OVERLOADED"
    code = StatusCode.RESOURCE_EXHAUSTED


class NoWorkers(RetriableError):
    """A tier has no worker that takes work."""

    reason = "NO_WORKERS"
    code = StatusCode.UNAVAILABLE


class WorkerLost(RetriableError):
    """The worker went away, and the request could not be placed anew."""

    reason = "WORKER_LOST"
    code = StatusCode.UNAVAILABLE


class HandoffFailed(RetriableError):
    """KV did not arrive whole."""

    reason = "HANDOFF_FAILED"
    code = StatusCode.UNAVAILABLE


class Draining(RetriableError):
    """This worker takes no more work."""

    reason = "DRAINING"
    code = StatusCode.UNAVAILABLE


class DeadlineExceeded(BatonError):
    """The client's or the handoff's time is over."""

    reason = "DEADLINE_EXCEEDED"
    code = StatusCode.DEADLINE_EXCEEDED


class ClientStalled(BatonError):
    """The client stopped reading."""

    reason = "CLIENT_STALLED"
    code = StatusCode.ABORTED


class Cancelled(BatonError):
    """The caller gave the request up."""

    reason = "CANCELLED"
    code = StatusCode.CANCELLED


#: What to do about workers that round differently, where they must not.
NUMERICS_FIX = (
    "keep the prefill and decode workers of a class together, level the CPUs with BATON_CPU_LEVEL, "
    "or give --numerics=mixed"
)


class PeerMismatch(BatonError):
    """Two workers cannot work together."""

    reason = "PEER_MISMATCH"
    code = StatusCode.FAILED_PRECONDITION

    @classmethod
    def of(
        cls,
        peer: str,
        field: str,
        expected: str,
        actual: str,
        fix: str = "give both workers the same model, adapters, dtype and version",
    ) -> PeerMismatch:
        return cls(
            f"peer {peer}: {field} is {actual!r}, but {expected!r} is needed here; {fix}",
            peer=peer,
            field=field,
            expected=expected,
            actual=actual,
        )


class EngineFault(BatonError):
    """A step failed because of this request."""

    reason = "ENGINE_FAULT"
    code = StatusCode.INTERNAL


class StartupError(BatonError):
    """The process cannot start."""

    reason = "STARTUP"


class ConfigError(StartupError):
    """An option's value is wrong."""

    reason = "CONFIG"

    @classmethod
    def of(cls, option: str, value: object, fix: str) -> ConfigError:
        """The value is shown without credentials; `fix`, too, as it may repeat the value."""
        shown, fix = redacted(str(value)), redacted(fix)
        return cls(f"{option}={shown}: {fix}", option=option, value=shown, fix=fix)


class ModelError(StartupError):
    """The model cannot be served."""

    reason = "MODEL"


class UnsupportedModel(ModelError):
    """Its architecture or a setting is unknown to us."""


class UnsupportedSetting(UnsupportedModel):
    """A setting that Baton's own layers do not support; transformers' code may."""


class MissingTensor(ModelError):
    """The checkpoint lacks a tensor."""


class AdapterError(ModelError):
    """A LoRA adapter cannot be read, is of another model, or asks for what is not supported."""


class TensorMismatch(ModelError):
    """A tensor has a shape that the config does not allow."""


class UnsafeCheckpoint(ModelError):
    """It has weights as pickles only."""


#: Errors that travel, by reason.
BY_REASON: Mapping[str, type[BatonError]] = {
    leaf.reason: leaf
    for leaf in (
        InvalidRequest,
        ModelNotFound,
        Unauthenticated,
        PermissionDenied,
        Overloaded,
        NoWorkers,
        WorkerLost,
        HandoffFailed,
        Draining,
        DeadlineExceeded,
        ClientStalled,
        Cancelled,
        PeerMismatch,
        EngineFault,
    )
}
