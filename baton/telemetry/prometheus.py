"""The Prometheus port of one process, with a registry of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from wsgiref.simple_server import WSGIServer

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics.export import MetricReader
from prometheus_client import CollectorRegistry, start_http_server

from baton.errors import ConfigError
from baton.telemetry import names
from baton.telemetry.vllm_names import VllmNames

#: What of the process is a label of all its metrics; Prometheus adds "instance" and "job".
_LABELS = frozenset({names.TIER})


@dataclass(frozen=True, slots=True)
class PrometheusPort:
    """An open port. `reader` belongs to the meter provider, which shuts it down."""

    reader: MetricReader
    close: Callable[[], None]


def serve_prometheus(host: str, port: int, *, vllm_model: str | None) -> PrometheusPort:
    """Serve /metrics at host:port from a thread. vllm_model: also under vLLM's names, for this model's name.

    Raises ConfigError if the port cannot be bound.
    """
    registry = CollectorRegistry()
    reader = PrometheusMetricReader(
        scope_info_enabled=False, resource_attribute_filter=_LABELS.__contains__, registry=registry
    )
    exposed = CollectorRegistry()
    exposed.register(registry)  # a registry collects, too
    if vllm_model is not None:
        exposed.register(VllmNames(registry, vllm_model))
    try:
        server, thread = start_http_server(port, host, exposed)
    except OSError as error:
        reader.shutdown()
        raise ConfigError.of(
            "metrics_port", str(port), f"cannot be bound ({error.strerror}); give a free port"
        ) from error
    return PrometheusPort(reader, lambda: _close(server, thread))


def _close(server: WSGIServer, thread: threading.Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join()
