"""What one process measures, as Prometheus fetches it, and its port; with a registry of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from wsgiref.simple_server import WSGIServer

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics.export import MetricReader
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.exposition import choose_encoder

from baton.errors import ConfigError
from baton.telemetry import names
from baton.telemetry.metrics import HistogramReader, ObservableHistograms
from baton.telemetry.vllm_names import VllmNames

#: By path, what is served as JSON beside /metrics; called by the server's threads, once for each
#: request.
Pages = Mapping[str, Callable[[], object]]

#: What of the process is a label of all its metrics; Prometheus adds "instance" and "job".
_LABELS = frozenset({names.TIER})


@dataclass(frozen=True, slots=True)
class PrometheusMetrics:
    """What is measured, for whoever fetches it. `reader` belongs to the meter provider, which shuts
    it down."""

    reader: MetricReader
    registry: CollectorRegistry

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """All of it, and its content type. accept: the header of the request. Takes milliseconds;
        may be called from any thread."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class _Reader(HistogramReader, PrometheusMetricReader):
    """With our histograms."""


def prometheus_metrics(
    histograms: ObservableHistograms, vllm_model: str | None
) -> PrometheusMetrics:
    """vllm_model: also under vLLM's names, for this model's name."""
    registry = CollectorRegistry()
    reader = _Reader(
        histograms,
        scope_info_enabled=False,
        resource_attribute_filter=_LABELS.__contains__,
        registry=registry,
    )
    exposed = CollectorRegistry()
    exposed.register(registry)  # a registry collects, too
    if vllm_model is not None:
        exposed.register(VllmNames(registry, vllm_model))
    return PrometheusMetrics(reader, exposed)


def serve_prometheus(
    metrics: PrometheusMetrics, host: str, port: int, pages: Pages
) -> Callable[[], None]:
    """Serve /metrics, and `pages`, at host:port from a thread, until what comes back is called.

    Raises ConfigError if the port cannot be bound.
    """
    try:
        server, thread = start_http_server(port, host, metrics.registry)
    except OSError as error:
        metrics.reader.shutdown()
        raise ConfigError.of(
            "metrics_port", str(port), f"cannot be bound ({error.strerror}); give a free port"
        ) from error
    server.set_app(_with_pages(server.get_app(), pages))
    return lambda: _close(server, thread)


def _close(server: WSGIServer, thread: threading.Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join()


def _with_pages(metrics: Any, pages: Pages) -> Any:
    """`metrics`, a WSGI application, with `pages` before it."""

    def application(
        environ: Mapping[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        page = pages.get(environ["PATH_INFO"])
        if page is None:
            answer: Iterable[bytes] = metrics(environ, start_response)
            return answer
        body = json.dumps(page()).encode()
        length = ("Content-Length", str(len(body)))
        start_response("200 OK", [("Content-Type", "application/json"), length])
        return [body]

    return application
