"""The four challenges of long contexts, from rooflines: prefill, users, decode, context switch
(arXiv 2405.08944), over 4K to 1M tokens.

    python -m bench.long_context [--device NAME ...] [--json FILE] [--write]

One model of Llama-3-8B's size, whose attention keeps KV by each layout, with KV of 16 bits, fp8,
int8 and int4. Weights are bfloat16. --device cpu measures this machine. --write: renews the tables
of docs/long_context.md and its picture, docs/figures/long_context.png.

    prefill  prompt alone, in chunks of 8,192 tokens: operations / peak
    users    floor((memory - weights) / KV of one), in blocks of 16 tokens
    step     one sequence: (weights + KV) / bandwidth
    switch   KV to the host's memory and another's back: 2 KV / host link

Tiers of KV: a context that comes back is computed anew, or its KV is read from a tier, and no
faster than over the host link.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from baton.types import KvLayout
from bench.machine import ROOT, write_json
from bench.suite.markdown import number, replaced, table
from engine.families.config import ModelConfig
from engine.families.read import parse_config
from engine.kv.groups.window import windows_of
from engine.memory_plan import format_bytes
from engine.plan.devices import DEVICES, THIS_CPU, Device, find_device
from engine.plan.memory import Reserved, num_users, sequence_bytes, stage_memory
from engine.plan.model import ModelSizes, Storage, native_sizes
from engine.plan.roofline import prompt_s, step_s
from engine.ranks.mesh import ONE_RANK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE, PICTURE = ROOT / "docs" / "long_context.md", ROOT / "docs" / "figures" / "long_context.png"
LENGTHS: Mapping[str, int] = MappingProxyType(
    {"4K": 4096, "16K": 1 << 14, "50K": 50_000, "128K": 1 << 17, "512K": 1 << 19, "1M": 1 << 20}
)
#: Lengths of the tables; the picture has all.
SHOWN = ("4K", "50K", "1M")
KV_TYPES = ("bfloat16", "fp8", "int8", "int4")
_BLOCK_TOKENS, _CHUNK = 16, 8192

_SHAPE: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 1 << 20,
}
_LLAMA: Mapping[str, Any] = {**_SHAPE, "model_type": "llama"}
#: By layout: windowed layers as in Gemma 3 (five of six see 1,024 tokens), latent rows as in
#: DeepSeek V3 (512 and 64 elements).
LAYOUTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "MHA": {**_LLAMA, "num_key_value_heads": 32},
        "GQA": {**_LLAMA, "num_key_value_heads": 8},
        "MQA": {**_LLAMA, "num_key_value_heads": 1},
        "windowed": {
            **_SHAPE,
            "model_type": "gemma3_text",
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": False,
        },
        "latent": {
            **_SHAPE,
            "model_type": "deepseek_v3",
            "num_key_value_heads": 32,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "first_k_dense_replace": 32,
        },
    }
)


#: Bytes per second read from a tier of KV below the device; None: as fast as the host link. Disk:
#: an NVMe drive on PCIe 4 x4; store: Ethernet of 100 Gb/s.
TIERS: Mapping[str, float | None] = MappingProxyType(
    {"host memory": None, "disk": 7e9, "shared store": 12.5e9}
)


@dataclass(frozen=True, slots=True)
class Challenge:
    """One layout with one type of KV on one device at one length. kv_bytes: of a sequence."""

    device: str
    layout: str
    kv_type: str
    length: int
    kv_bytes: int
    prefill_s: float
    users: int
    step_ms: float
    switch_s: float


def sizes_of(raw: Mapping[str, Any], kv_type: str) -> ModelSizes:
    """Sizes of a model with unquantised weights. raw: as config.json."""
    config = parse_config(raw)
    layout = _layout_of(config, kv_type)
    return native_sizes(
        config, Storage(config.dtype), layout, config.derived_max_len, config.longest_len
    )


def _layout_of(config: ModelConfig, kv_type: str) -> KvLayout:
    """KV with a float32 scale a row where scaled. int4 counts as int8 of half as many elements."""
    head_dim = config.head_dim // 2 if kv_type == "int4" else config.head_dim
    dtype = "int8" if kv_type == "int4" else kv_type
    layout = KvLayout("", config.num_layers, config.num_kv_heads, head_dim, dtype, _BLOCK_TOKENS)
    window, layers = windows_of(config.windows)
    return replace(layout, parts=config.kv_parts, window=window, windowed_layers=layers)


def challenge(device: Device, layout: str, kv_type: str, length: int) -> Challenge:
    """The four challenges of one case."""
    model = sizes_of(LAYOUTS[layout], kv_type)
    (kv_bytes,) = sequence_bytes(model, ONE_RANK, length, keeps_windows_apart=True)
    stages = stage_memory(model, ONE_RANK, Reserved(0, 0, 0), device.memory_bytes)
    return Challenge(
        *(device.name, layout, kv_type, length, kv_bytes),
        prefill_s=prompt_s(model, ONE_RANK, device, length, _CHUNK),
        users=num_users(model, ONE_RANK, stages, length, keeps_windows_apart=True),
        step_ms=step_s(model, ONE_RANK, device, 1, length) * 1e3,
        switch_s=2 * kv_bytes / device.host_bytes_per_s,
    )


def challenges(devices: Sequence[Device]) -> Iterator[Challenge]:
    """All layouts and types of KV on the first device; GQA of 16 bits on the others."""
    for index, device in enumerate(devices):
        layouts = list(LAYOUTS) if index == 0 else ["GQA"]
        for layout in layouts:
            for kv_type in KV_TYPES if index == 0 else KV_TYPES[:1]:
                for length in LENGTHS.values():
                    yield challenge(device, layout, kv_type, length)


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """A figure of arXiv 2405.08944, and the same by its formula; printed: as the paper has it."""

    what: str
    length: str
    printed: str
    computed: float
    unit: str


def paper_figures() -> tuple[PaperFigure, ...]:
    """The paper's example, Yi-34B in bfloat16 on an A100 of 80 GiB: 60 layers of width 7,168, 8 KV
    heads of 128; answers of 250 tokens.

    Attention counts as layers * width * length^2 operations, one of its two causal products, which
    is what agrees with the printed times.
    """
    num_weights, num_layers, width, kv_heads, head_dim = 34e9, 60, 7168, 8, 128
    a100 = find_device("a100")
    token_bytes = 2 * num_layers * kv_heads * head_dim * 2
    printed = {
        "4K": (4000, "0.89", "about 20", "8.5"),
        "50K": (50_000, "14.1", "1", "9.8"),
    }
    found = []
    for name, (length, prefill, users, decode) in printed.items():
        flops = length * (2 * num_weights + num_layers * width * length)
        kv_bytes = token_bytes * length
        free = a100.memory_bytes - 2 * num_weights
        step_s = (2 * num_weights + kv_bytes) / a100.read_bytes_per_s
        found += [
            PaperFigure("prefill", name, prefill, flops / a100.flops_per_s["bfloat16"], "s"),
            PaperFigure("users", name, users, float(free // kv_bytes), ""),
            PaperFigure("250 tokens", name, decode, 250 * step_s, "s"),
        ]
    return tuple(found)


def paper_table(figures: Sequence[PaperFigure]) -> str:
    """Markdown: printed beside computed."""
    rows = [
        [
            f.what,
            f.length,
            f"{f.printed} {f.unit}".strip(),
            _shown(f),
        ]
        for f in figures
    ]
    return table(("", "Context", "Printed", "By the formula"), rows)


def _shown(figure: PaperFigure) -> str:
    return f"{number(figure.computed)} s" if figure.unit else f"{figure.computed:.0f}"


def challenge_table(title: str, by_name: Mapping[str, Sequence[Challenge]]) -> str:
    """Markdown: a line per name and shown length."""
    labels = {length: name for name, length in LENGTHS.items() if name in SHOWN}
    rows = [
        [
            name,
            labels[c.length],
            format_bytes(c.kv_bytes),
            _seconds(c.prefill_s),
            f"{c.users:,}",
            f"{number(c.step_ms)} ms",
            _seconds(c.switch_s),
        ]
        for name, found in by_name.items()
        for c in found
        if c.length in labels
    ]
    headings = (title, "Context", "KV of one", "Prefill", "Users", "Decode step", "Switch")
    return table(headings, rows)


def _seconds(value: float) -> str:
    return f"{number(value)} s" if value >= 1 else f"{number(value * 1e3)} ms"


def return_s(case: Challenge, tier: str) -> float:
    """Time to bring a context back from a tier."""
    link = find_device(case.device).host_bytes_per_s
    return case.kv_bytes / min(link, TIERS[tier] or link)


def tier_table(found: Sequence[Challenge]) -> str:
    """Markdown: a line per layout and shown length: computing anew beside each tier, KV of 16
    bits."""
    labels = {length: name for name, length in LENGTHS.items() if name in SHOWN}
    rows = [
        [
            case.layout,
            labels[case.length],
            _seconds(case.prefill_s),
            *(_seconds(return_s(case, tier)) for tier in TIERS),
            f"{(1 << 40) // case.kv_bytes:,}",
        ]
        for case in found
        if case.length in labels and case.kv_type == KV_TYPES[0] and case.device == found[0].device
    ]
    headings = ("Layout", "Context", "Without a tier", *TIERS, "Contexts a TiB of tier holds")
    return table(headings, rows)


def groups_of(found: Sequence[Challenge]) -> dict[str, dict[str, list[Challenge]]]:
    """Cases by title of a table, then by name: each table varies one thing."""
    first = found[0].device
    groups: dict[str, dict[str, list[Challenge]]] = {"Layout": {}, "GQA, KV": {}, "GQA on": {}}
    for c in found:
        if c.device == first and c.kv_type == KV_TYPES[0]:
            groups["Layout"].setdefault(c.layout, []).append(c)
        if c.device == first and c.layout == "GQA":
            groups["GQA, KV"].setdefault(c.kv_type, []).append(c)
        if c.layout == "GQA" and c.kv_type == KV_TYPES[0]:
            groups["GQA on"].setdefault(c.device, []).append(c)
    return groups


def draw(found: Sequence[Challenge], path: Path) -> None:
    """Write a PNG: a row for each table, a column for each challenge. Needs matplotlib."""
    from matplotlib.figure import Figure

    groups = groups_of(found)
    figure = Figure(figsize=(15, 10), layout="constrained")
    rows = figure.subplots(len(groups), len(_COLUMNS))
    for axes, (title, by_name) in zip(rows, groups.items(), strict=True):
        for axis, (name, label) in zip(axes, _COLUMNS.items(), strict=True):
            _draw(axis, by_name, name)
            axis.set_ylabel(label)
        axes[0].legend(title=title, fontsize="small", title_fontsize="small")
    head = f"Llama-3-8B's size, bfloat16 weights; {found[0].device} unless named"
    figure.suptitle(f"{head}; at the roofline")
    figure.savefig(path, format="png", dpi=90)


_COLUMNS = {
    "prefill_s": "prefill, s",
    "users": "users",
    "step_ms": "decode step, ms",
    "switch_s": "context switch, s",
}
_LINES = ("-", "--", "-.", ":")


def _draw(axis: Axes, by_name: Mapping[str, Sequence[Challenge]], field: str) -> None:
    for index, (name, found) in enumerate(by_name.items()):
        points = [(c.length, getattr(c, field)) for c in found if getattr(c, field)]
        lengths, values = [x for x, _ in points], [y for _, y in points]
        axis.plot(lengths, values, _LINES[index % len(_LINES)], marker=".", label=name)
    axis.set(xscale="log", yscale="log")
    axis.set_xticks(list(LENGTHS.values()), list(LENGTHS))
    axis.xaxis.minorticks_off()
    axis.grid(alpha=0.3)


def tables_of(found: Sequence[Challenge]) -> dict[str, str]:
    """Generated parts of the page, by name."""
    first = found[0].device
    parts = [challenge_table(title, by_name) for title, by_name in groups_of(found).items()]
    head = (
        f"On {first} where no device is named ({DEVICES[first].source})."
        if (first in DEVICES)
        else f"On {first} where no device is named."
    )
    made = {"paper": paper_table(paper_figures()), "challenges": "\n\n".join([head, *parts])}
    return made | ({"tiers": tier_table(found)} if first in DEVICES else {})


def _device(name: str) -> Device:
    if name != THIS_CPU:
        return find_device(name)
    from engine.plan.host import CpuProbe

    return CpuProbe(1 << 30, "bfloat16").measure()


def main() -> None:
    """Compute, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [*DEVICES, THIS_CPU]
    default = ["h200", "b200", "h100", "a100", "l40s"]
    parser.add_argument("--device", nargs="+", choices=names, default=default)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    found = list(challenges([_device(name) for name in given.device]))
    parts = tables_of(found)
    print(*parts.values(), sep="\n\n")
    if given.json:
        data = [dataclasses.asdict(each) for each in found]
        paper = [dataclasses.asdict(each) for each in paper_figures()]
        write_json(given.json, {"challenges": data, "paper": paper})
    if given.write:
        draw(found, PICTURE)
        page = PAGE.read_text()
        for name, body in parts.items():
            page = replaced(page, name, body)
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
