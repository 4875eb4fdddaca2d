"""The SDK: `Client` for threads and `AsyncClient` for asyncio, with the same methods and the same
typed errors.

with Client("127.0.0.1:50051") as client, client.stream("def main():", max_tokens=64) as stream:
    for chunk in stream:
        print(chunk.text, end="")
"""

from baton.client.async_client import AsyncClient, AsyncCompletionStream
from baton.client.calls import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S
from baton.client.chat import ChatMessage, ChatPrompt, Tool, ToolCall
from baton.client.requests import PromptLike
from baton.client.results import (
    Choice,
    Chunk,
    Completion,
    Model,
    TimeToFirstToken,
    Timing,
    Tokenization,
    Usage,
    WorkerStatus,
)
from baton.client.sync_client import Client, CompletionStream
from baton.errors import (
    BatonError,
    Cancelled,
    ClientStalled,
    DeadlineExceeded,
    EngineFault,
    FieldViolation,
    HandoffFailed,
    InvalidRequest,
    ModelNotFound,
    NoWorkers,
    Overloaded,
    RetriableError,
    Unauthenticated,
    WorkerLost,
)
from baton.rpc.tls import TlsFiles
from baton.sampling_params import BeamSearch, SamplingOptions, SamplingParams, StructuredOutput
from baton.types import FinishReason, NumericsClass, TierLoad, TokenLogprobs

__all__ = [
    "DEFAULT_ADDRESS",
    "DEFAULT_TIMEOUT_S",
    "AsyncClient",
    "AsyncCompletionStream",
    "BatonError",
    "BeamSearch",
    "Cancelled",
    "ChatMessage",
    "ChatPrompt",
    "Choice",
    "Chunk",
    "Client",
    "ClientStalled",
    "Completion",
    "CompletionStream",
    "DeadlineExceeded",
    "EngineFault",
    "FieldViolation",
    "FinishReason",
    "HandoffFailed",
    "InvalidRequest",
    "Model",
    "ModelNotFound",
    "NoWorkers",
    "NumericsClass",
    "Overloaded",
    "PromptLike",
    "RetriableError",
    "SamplingOptions",
    "SamplingParams",
    "StructuredOutput",
    "TierLoad",
    "TimeToFirstToken",
    "Timing",
    "TlsFiles",
    "TokenLogprobs",
    "Tokenization",
    "Tool",
    "ToolCall",
    "Unauthenticated",
    "Usage",
    "WorkerLost",
    "WorkerStatus",
]
