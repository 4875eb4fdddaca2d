"""A worker's telemetry, with its load as metrics, read when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from baton import __version__
from baton.config import WorkerOptions
from baton.telemetry import Telemetry, TelemetrySettings, names, open_telemetry
from baton.telemetry.metrics import observe_build, observe_numerics
from baton.types import BlockCounts, TierLoad, WorkerLoad
from engine.interface import EngineSpec
from worker_core.loop import LoadBoard


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


def kv_usage(load: WorkerLoad) -> float:
    """Share of the blocks that are leased, 0..1."""
    return load.blocks.leased / load.blocks.total if load.blocks.total else 0.0


def observe_worker(meter: Meter, board: LoadBoard) -> None:
    """Have the board's last load observed. Loads are immutable, so reading one from another thread
    is safe."""

    def gauge(name: str, text: str, read: Callable[[WorkerLoad], float], unit: str = "") -> None:
        def callback(options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG001
            return [Observation(read(board.load))]

        meter.create_observable_gauge(name, [callback], description=text, unit=unit)

    gauge("baton.requests.running", "Sequences in the batch.", lambda load: load.num_running)
    gauge("baton.requests.waiting", "Sequences that wait here.", lambda load: load.num_waiting)
    gauge(
        "baton.prefill.pending", "Prompt tokens to compute.", lambda load: load.num_pending_tokens
    )
    gauge("baton.tickets.open", "Handoffs under way.", lambda load: load.num_open_tickets)
    gauge(
        "baton.kv.orphan_blocks",
        "Leased KV blocks that belong to no sequence, prompt or ticket.",
        lambda load: load.num_orphan_blocks,
    )
    gauge(
        "baton.sequences.orphaned",
        "Sequences ended since the start because their gateway did not know them.",
        lambda load: load.num_orphan_sequences,
    )
    gauge(
        "baton.swaps",
        "Times since the start that a sequence was preempted to host memory.",
        lambda load: load.num_swaps,
    )
    gauge("baton.kv.usage", "Share of KV blocks that are leased.", kv_usage, "1")

    def blocks(options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG001
        return _by_state(board.load.blocks)

    def slots(options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG001
        counts = board.load.window_slots
        return _by_state(counts) if counts.total else ()

    def steps(options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG001
        return [Observation(board.load.num_steps)]

    meter.create_observable_gauge("baton.kv.blocks", [blocks], description="KV blocks by state.")
    meter.create_observable_gauge(
        "baton.kv.window_slots",
        [slots],
        description="Slots for windowed layers' KV by state, where it lies apart.",
    )
    _observe_tiers(meter, board)
    meter.create_observable_counter("baton.engine.steps", [steps], description="Engine steps.")


#: Metrics of a tier of KV: name, whether it only grows, text, unit, and how to read it.
_OF_TIERS: tuple[tuple[str, bool, str, str, Callable[[TierLoad], float]], ...] = (
    ("on", False, "1 if the tier is used: it works, and reading it pays.", "", lambda t: t.is_used),
    ("bytes", False, "Bytes held.", "By", lambda t: t.num_bytes),
    ("hits", True, "Blocks that prompts lacked and the tier had.", "", lambda t: t.num_hits),
    ("misses", True, "Blocks that prompts lacked, as did the tier.", "", lambda t: t.num_misses),
    ("evictions", True, "Blocks given up for others.", "", lambda t: t.num_evictions),
    ("saved", True, "Estimated time saved by reads.", "s", lambda t: t.saved_ms / 1e3),
    ("lost", True, "Estimated time lost by reads.", "s", lambda t: t.lost_ms / 1e3),
)


def _observe_tiers(meter: Meter, board: LoadBoard) -> None:
    """Have the tiers of KV observed, by name; nothing without any."""

    def observed(
        options: CallbackOptions,  # noqa: ARG001
        read: Callable[[TierLoad], float],
    ) -> Iterable[Observation]:
        tiers = board.load.kv_tiers
        return [Observation(float(read(tier)), {names.KV_TIER: tier.name}) for tier in tiers]

    for name, grows, text, unit, read in _OF_TIERS:
        create = meter.create_observable_counter if grows else meter.create_observable_gauge
        callback = partial(observed, read=read)
        create(f"baton.kv.tier.{name}", [callback], description=text, unit=unit)


def _by_state(counts: BlockCounts) -> list[Observation]:
    by_state = {"free": counts.free, "cached": counts.cached, "leased": counts.leased}
    return [Observation(count, {names.STATE: state}) for state, count in by_state.items()]
