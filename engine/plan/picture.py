"""A plan as a picture; needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.errors import ConfigError
from engine.plan.degrees import name_of
from engine.plan.plan import BATCHES, CONTEXTS, PROMPTS, Plan, Shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = ("-", "--", "-.", ":")
_USES = {"weights": "0.35", "activations": "0.6", "graphs, transfers": "0.75", "KV": "#9ecae1"}
#: Shapes drawn: more would hide each other.
_MOST_SHAPES = 10
_GIB = 1 << 30
_DPI = 100


def draw(plan: Plan, path: Path) -> None:
    """Write a PNG: memory of a rank, users by context, steps by batch, prompts by length, with one
    colour per shape. Raises ConfigError."""
    save_png(lambda figure: _draw(figure, plan), (12, 8), path, "picture")


def save_png(
    draw: Callable[[Figure], None], size: tuple[float, float], path: Path, option: str
) -> None:
    """Draw a figure of `size` inches and write it. option: the one that gives the path. Raises
    ConfigError without matplotlib, and for a path that cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fix = "drawing needs matplotlib: pip install matplotlib"
        raise ConfigError.of(option, path, fix) from None
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    try:
        figure.savefig(path, format="png", dpi=_DPI)
    except OSError as error:
        raise ConfigError.of(option, path, f"give a path that can be written ({error})") from None


def _draw(figure: Figure, plan: Plan) -> None:
    memory, users, steps, prompts = figure.subplots(2, 2).flat
    shapes = plan.shapes[:_MOST_SHAPES]
    _draw_memory(memory, plan, shapes)
    for index, shape in enumerate(shapes):
        look = {"label": name_of(shape.degrees), "linestyle": _LINES[index % len(_LINES)]}
        contexts = {length: shape.users[name] for name, length in CONTEXTS.items()}
        _line(users, {length: n for length, n in contexts.items() if n}, look)
        _line(steps, {batch: ms for batch, ms in shape.steps_ms.items() if ms is not None}, look)
        _line(prompts, {PROMPTS[name]: ms for name, ms in shape.prompts_ms.items()}, look)
    _label(users, "context, tokens", "users of a worker", CONTEXTS)
    batches = {str(batch): batch for batch in BATCHES}
    _label(steps, "batch", f"decode step, ms, {plan.step_context} tokens each", batches)
    _label(prompts, "prompt, tokens", "prompt, ms", PROMPTS)
    figure.legend(*users.get_legend_handles_labels(), loc="outside lower center", ncols=10)
    figure.suptitle(f"{plan.model} ({plan.dtype}) on {plan.num_devices} x {plan.device.name}")


def _draw_memory(axis: Axes, plan: Plan, shapes: Sequence[Shape]) -> None:
    names = [name_of(shape.degrees) for shape in shapes]
    ranks = [shape.tightest for shape in shapes]
    heights = (
        [rank.weight_bytes for rank in ranks],
        [rank.reserved.activations for rank in ranks],
        [(rank.reserved.graphs or 0) + rank.reserved.transfers for rank in ranks],
        [rank.kv_bytes for rank in ranks],
    )
    bottom = [0.0] * len(shapes)
    for (use, color), values in zip(_USES.items(), heights, strict=True):
        gib = [value / _GIB for value in values]
        axis.bar(names, gib, bottom=bottom, label=use, color=color)
        bottom = [low + height for low, height in zip(bottom, gib, strict=True)]
    axis.axhline(plan.device.memory_bytes / _GIB, color="black", linewidth=1, label="device")
    axis.set_ylim(0, 1.25 * plan.device.memory_bytes / _GIB)
    axis.set_ylabel("memory of a rank, GiB")
    axis.tick_params(axis="x", rotation=30)
    axis.legend(fontsize="small", loc="upper center", ncols=3)


def _line(axis: Axes, points: Mapping[int, float], look: Mapping[str, Any]) -> None:
    axis.plot(list(points), list(points.values()), marker="o", **look)


def _label(axis: Axes, x: str, y: str, ticks: Mapping[str, int]) -> None:
    axis.set(xlabel=x, ylabel=y, xscale="log", yscale="log")
    axis.set_xticks(list(ticks.values()), list(ticks))
    axis.xaxis.minorticks_off()
    axis.grid(alpha=0.3)
