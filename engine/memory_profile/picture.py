"""A memory profile as pictures; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.memory_plan import format_bytes
from engine.memory_profile.attention import AttentionRun
from engine.memory_profile.longest import LongestPrompt
from engine.memory_profile.recorder import Point, peak_bytes
from engine.memory_profile.users import UserRun
from engine.memory_profile.waste import Waste
from engine.plan.picture import save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIB = 1 << 20
_USES = {
    "tokens": "#3182bd",
    "reserved for later tokens": "#9ecae1",
    "internal fragmentation": "#fdae6b",
    "free, or external fragmentation": "0.85",
}


def draw_users(runs: Sequence[UserRun], path: Path) -> None:
    """KV by step and memory of the device over time, a column for each number of users."""

    def draw(figure: Figure) -> None:
        columns = figure.subplots(2, len(runs), squeeze=False, sharey="row")
        for axis, run in zip(columns[0], runs, strict=True):
            _draw_kv(axis, run)
        for axis, run in zip(columns[1], runs, strict=True):
            _draw_memory(axis, run.memory)
            axis.set_xlabel("time, s")
        most = max(peak_bytes(run.memory) for run in runs) / _MIB
        columns[0][0].set_ylim(0)
        # Less than this is noise.
        columns[1][0].set_ylim(0, max(16, 1.1 * most))
        columns[0][0].set_ylabel("KV, tokens")
        columns[1][0].set_ylabel("growth of memory in use, MiB")
        figure.legend(
            *columns[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4
        )

    save_png(draw, (4 * max(2, len(runs)), 6.5), path, "output")


def _draw_kv(axis: Axes, run: UserRun) -> None:
    times = [0.0, *(point.at_s for point in run.kv)]
    tokens = [0, *(point.num_tokens for point in run.kv)]
    leased = [0, *(point.leased_tokens for point in run.kv)]
    axis.fill_between(times, tokens, step="post", color="#3182bd", label="hold tokens", linewidth=0)
    axis.fill_between(
        times,
        tokens,
        leased,
        step="post",
        color="#fdae6b",
        label="rest of last blocks",
        linewidth=0,
    )
    axis.axhline(run.pool_tokens, color="black", linewidth=1, label="pool")
    most = max(point.num_running for point in run.kv)
    users = "1 user" if run.load.num_users == 1 else f"{run.load.num_users} users"
    axis.set_title(users if most == run.load.num_users else f"{users}, at most {most} at once")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.grid(alpha=0.3)


def _draw_memory(axis: Axes, points: Sequence[Point], label: str | None = None) -> None:
    used = [point.used_bytes / _MIB for point in points]
    times = [point.at_s for point in points]
    (line,) = axis.step(times, used, where="post", linewidth=1, label=label)
    if any(point.used_bytes != point.reserved_bytes for point in points):
        reserved = [point.reserved_bytes / _MIB for point in points]
        axis.step(times, reserved, where="post", linewidth=1, linestyle=":", color=line.get_color())
    axis.grid(alpha=0.3)


def draw_attention(runs: Sequence[AttentionRun], path: Path) -> None:
    """Memory over time of eager and paged attention, a column for each length, and their peaks."""
    lengths = sorted({run.num_tokens for run in runs})

    def draw(figure: Figure) -> None:
        *columns, last = figure.subplots(1, len(lengths) + 1)
        for axis, length in zip(columns, lengths, strict=True):
            for run in runs:
                if run.num_tokens == length and run.points:
                    _draw_memory(axis, run.points, run.kind)
            axis.set(title=f"{length:,} tokens", xlabel="time, s")
            axis.yaxis.set_major_formatter("{x:,.0f}")
        for axis in columns:
            axis.set_ylim(0)
        columns[0].set_ylabel("growth of memory in use, MiB")
        columns[0].legend()
        for kind in dict.fromkeys(run.kind for run in runs):
            some = [run for run in runs if run.kind == kind and run.points]
            peaks = [max(1, peak_bytes(run.points) / _MIB) for run in some]
            last.plot([run.num_tokens for run in some], peaks, marker="o", label=kind)
        last.set(
            title="peaks, of a MiB at least", xlabel="prompt, tokens", xscale="log", yscale="log"
        )
        last.set_xticks(lengths, [f"{length:,}" for length in lengths])
        last.xaxis.minorticks_off()
        last.grid(alpha=0.3)
        last.legend()

    save_png(draw, (4 * (len(lengths) + 1), 4), path, "output")


def draw_waste(found: Sequence[Waste], path: Path) -> None:
    """Shares of KV memory, a bar for each way to allocate."""

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        names = [f"{waste.allocation}\n{waste.num_running:.0f} requests" for waste in found]
        left = [0.0] * len(found)
        shares = zip(*((w.tokens, w.reserved, w.internal, w.external) for w in found), strict=True)
        for (use, color), values in zip(_USES.items(), shares, strict=True):
            percents = [100 * value for value in values]
            bars = axis.barh(names, percents, left=left, label=use, color=color)
            texts = [f"{value:.0f}" if value >= 3 else "" for value in percents]
            axis.bar_label(bars, texts, label_type="center", fontsize="small")
            left = [low + value for low, value in zip(left, percents, strict=True)]
        axis.set(xlabel="share of KV memory, %", xlim=(0, 100))
        axis.invert_yaxis()
        figure.legend(loc="outside lower center", ncols=4, fontsize="small")

    save_png(draw, (10, 1.2 + 0.7 * len(found)), path, "output")


def draw_longest(found: Sequence[LongestPrompt], model_len: int, path: Path) -> None:
    """Longest prompt over the memory bound, a line for each type of weights."""

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        for weights in dict.fromkeys(each.weights for each in found):
            some = [each for each in found if each.weights == weights and each.num_tokens]
            bounds = [each.memory_bytes / _MIB for each in some]
            label = f"{weights} weights, {format_bytes(some[0].weight_bytes)}" if some else weights
            axis.plot(bounds, [each.num_tokens for each in some], marker=".", label=label)
        axis.axhline(model_len, color="black", linewidth=1, linestyle="--", label="model's length")
        axis.set(
            xlabel="memory for weights, activations and KV, MiB", ylabel="longest prompt, tokens"
        )
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.set_ylim(0)
        axis.grid(alpha=0.3)
        axis.legend()

    save_png(draw, (8, 5), path, "output")
