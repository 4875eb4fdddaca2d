"""An OTLP collector in this process, over gRPC or HTTP: keeps every span and metric that is
exported to it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class SeenSpan:
    """A span as it arrived. Times in nanoseconds since the epoch."""

    service: str
    instance: str
    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    trace_state: str
    kind: int
    start_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, Any]
    events: tuple[tuple[str, int], ...]


@dataclass
class OtlpReceiver:
    """All exports so far. `messages` holds their bytes, to be searched."""

    address: str = ""
    spans: list[SeenSpan] = field(default_factory=list)
    metric_names: set[str] = field(default_factory=set)
    messages: list[bytes] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    """Over HTTP: where exports were sent."""

    def traces(self) -> dict[bytes, list[SeenSpan]]:
        traces: dict[bytes, list[SeenSpan]] = {}
        for span in self.spans:
            traces.setdefault(span.trace_id, []).append(span)
        return traces

    def take_traces(self, request: Any) -> None:
        self.messages.append(request.SerializeToString())
        for resource in request.resource_spans:
            resource_attributes = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans.extend(_span(resource_attributes, span) for span in scope.spans)

    def take_metrics(self, request: Any) -> None:
        self.messages.append(request.SerializeToString())
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                self.metric_names.update(metric.name for metric in scope.metrics)


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, seen: OtlpReceiver) -> None:
        self._seen = seen

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        self._seen.take_traces(request)
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, seen: OtlpReceiver) -> None:
        self._seen = seen

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        self._seen.take_metrics(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


@asynccontextmanager
async def otlp_receiver() -> AsyncIterator[OtlpReceiver]:
    """A collector on a free port of the loopback interface."""
    seen = OtlpReceiver()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(seen), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(seen), server)
    seen.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield seen
    finally:
        await server.stop(None)


@contextmanager
def otlp_http_receiver() -> Iterator[OtlpReceiver]:
    """As otlp_receiver, for http/protobuf, in threads of its own."""
    seen = OtlpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/x-protobuf"
            seen.paths.add(self.path)
            if self.path.endswith("/v1/traces"):
                seen.take_traces(trace_service_pb2.ExportTraceServiceRequest.FromString(data))
            else:
                seen.take_metrics(metrics_service_pb2.ExportMetricsServiceRequest.FromString(data))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing is written."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        seen.address = f"127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield seen
        finally:
            server.shutdown()
            thread.join()


def _span(resource: dict[str, Any], span: Any) -> SeenSpan:
    return SeenSpan(
        service=resource["service.name"],
        instance=resource["service.instance.id"],
        name=span.name,
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_id=span.parent_span_id,
        trace_state=span.trace_state,
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        is_error=span.status.code == 2,
        attributes=_attributes(span.attributes),
        events=tuple((event.name, event.time_unix_nano) for event in span.events),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}
