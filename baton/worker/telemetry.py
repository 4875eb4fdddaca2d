"""A worker's telemetry, with what both tiers tell the same way."""

from __future__ import annotations

from baton import __version__
from baton.config import WorkerOptions
from baton.engine.interface import EngineSpec
from baton.telemetry import Telemetry, TelemetrySettings, open_telemetry
from baton.telemetry.build_info import observe_build, observe_numerics
from baton.worker.gauges import observe_worker
from baton.worker.load_board import LoadBoard


def open_worker_telemetry(options: WorkerOptions, board: LoadBoard, spec: EngineSpec) -> Telemetry:
    """By the options and the environment; the caller closes it. Raises ConfigError if it cannot be
    as they say."""
    tier = options.tier.name.lower()
    telemetry = open_telemetry(
        TelemetrySettings(
            service=tier,
            instance=options.worker_name,
            version=__version__,
            model=spec.model,
            metrics_host=options.host,
            metrics_port=options.metrics_port,
            metrics_compat=options.metrics_compat,
        )
    )
    observe_build(telemetry.meter, __version__)
    observe_numerics(telemetry.meter, spec.numerics)
    observe_worker(telemetry.meter, board)
    return telemetry
