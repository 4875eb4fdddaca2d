"""The page at `/`: static files and its live map of the fleet.

The files contain no user data and are served without an API key; the live map requires one, if keys
are configured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Any

from baton import __version__
from gateway.http.connection import JSON, HttpRequest, HttpResponse
from gateway.serving import Models
from gateway.telemetry.recorder import GatewayRecorder

_FOLDER = Path(__file__).parent / "static"

#: File and content type by path. The page uses relative paths, to work below a proxy's prefix.
PAGE_FILES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "/": ("index.html", "text/html; charset=utf-8"),
        "/page/page.css": ("page.css", "text/css; charset=utf-8"),
        "/page/icon.svg": ("icon.svg", "image/svg+xml"),
        "/page/memory.js": ("memory.js", "text/javascript; charset=utf-8"),
        "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    }
)

LIVE_PATH = "/page/live"

#: Same origin only, nothing inline, no framing.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = (
    ("content-security-policy", _POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cache-control", "no-cache"),
)

#: Minimum seconds between listings of the fleet, for any number of viewers.
_MIN_INTERVAL_S = 0.25


class Page:
    """Serves the page. Belongs to one event loop. clock: in seconds."""

    def __init__(
        self, models: Models, recorder: GatewayRecorder, clock: Callable[[], float]
    ) -> None:
        self._models = models
        self._recorder = recorder
        self._clock = clock
        self._files: dict[str, bytes] = {}
        """Files already read, by name."""
        self._live = b""
        self._listed_s = 0.0

    async def file(self, request: HttpRequest, response: HttpResponse) -> None:
        """Send one of PAGE_FILES."""
        name, content_type = PAGE_FILES[request.path]
        if name not in self._files:
            self._files[name] = (_FOLDER / name).read_bytes()
        response.headers += PAGE_HEADERS
        await response.send(HTTPStatus.OK, content_type, self._files[name])

    async def live(self, request: HttpRequest, response: HttpResponse) -> None:  # noqa: ARG002
        """Send the current models, gateway load, workers and last handoffs."""
        now_s = self._clock()
        if not self._live or now_s - self._listed_s >= _MIN_INTERVAL_S:
            self._live = json.dumps(self._listing(), separators=(",", ":")).encode()
            self._listed_s = now_s
        response.headers += PAGE_HEADERS
        await response.send(HTTPStatus.OK, JSON, self._live)

    def _listing(self) -> dict[str, Any]:
        models, recorder = [serving.model() for serving in self._models], self._recorder
        num_waiting = sum(serving.num_waiting for serving in self._models)
        # Workers of unknown models are listed with each model.
        workers = {worker.address: worker for model in models for worker in model.workers}
        return {
            "version": __version__,
            "models": [
                {
                    "name": model.name,
                    "max_model_len": model.max_model_len,
                    "has_chat_template": model.has_chat_template,
                }
                for model in models
            ],
            "gateway": {"num_waiting": num_waiting, "num_active": recorder.num_active},
            "workers": [
                {
                    "id": worker.worker_id or worker.address,
                    "tier": worker.tier,
                    "state": worker.state,
                    "reason": worker.reason,
                    "num_running": worker.num_running,
                    "num_waiting": worker.num_waiting,
                    "leased_blocks": worker.num_leased_blocks,
                    "cached_blocks": worker.num_cached_blocks,
                    "num_blocks": worker.num_blocks,
                    "leased_window_slots": worker.num_leased_window_slots,
                    "num_window_slots": worker.num_window_slots,
                    "kv_tiers": [
                        {
                            "name": tier.name,
                            "off_reason": tier.off_reason,
                            "pays": tier.pays,
                            "num_bytes": tier.num_bytes,
                            "num_hits": tier.num_hits,
                            "num_misses": tier.num_misses,
                            "num_evictions": tier.num_evictions,
                            "saved_ms": tier.saved_ms,
                            "lost_ms": tier.lost_ms,
                        }
                        for tier in worker.kv_tiers
                    ],
                }
                for worker in workers.values()
            ],
            "handoffs": {
                "total": recorder.handoffs.total,
                "total_bytes": recorder.handoffs.total_bytes,
                "last": [
                    [number, handoff.source, handoff.target, handoff.num_bytes]
                    for number, handoff in recorder.handoffs.numbered()
                ],
            },
        }
