"""A memory profile as tables, and as one HTML file with its pictures inside."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.memory_plan import format_bytes
from engine.memory_profile.attention import AttentionRun
from engine.memory_profile.longest import LongestPrompt
from engine.memory_profile.recorder import peak_bytes
from engine.memory_profile.users import UserRun
from engine.memory_profile.waste import Waste


@dataclass(frozen=True, slots=True)
class Section:
    """One picture and its table. rows: cells, the first row headings."""

    name: str
    title: str
    note: str
    rows: Sequence[Sequence[str]]


def users_section(runs: Sequence[UserRun]) -> Section:
    """Peaks of each run."""
    rows = [["Users", "At once", "Seconds", "KV tokens", "Held by blocks", "Pool", "Growth"]]
    for run in runs:
        peak = max(run.kv, key=lambda point: point.leased_tokens)
        rows.append(
            [
                f"{run.load.num_users}",
                f"{max(point.num_running for point in run.kv)}",
                f"{run.kv[-1].at_s:.2f}",
                f"{peak.num_tokens:,}",
                f"{peak.leased_tokens:,}",
                f"{run.pool_tokens:,}",
                format_bytes(peak_bytes(run.memory)),
            ]
        )
    load = runs[0].load
    shape = f"{load.num_input_tokens:,} tokens of prompt, {load.num_output_tokens:,} of answer"
    note = (
        f"Each user: {shape}. At most {load.chunk:,} new tokens a step. The KV pool is allocated "
        "before the runs, so memory grows by activations only."
    )
    return Section("users", "Memory over time, by number of users", note, rows)


def attention_section(runs: Sequence[AttentionRun]) -> Section:
    """Peak of each run."""
    rows = [["Attention", "Prompt, tokens", "Peak"]]
    rows += [
        [
            run.kind,
            f"{run.num_tokens:,}",
            format_bytes(peak_bytes(run.points)) if run.points else "not run: too little memory",
        ]
        for run in runs
    ]
    note = "Growth while two layers of the model's heads attend to one prompt, on random data."
    return Section("attention", "Eager and paged attention", note, rows)


def waste_section(found: Sequence[Waste], capacity: int, trace: str) -> Section:
    """Shares of each way to allocate."""
    uses = ("Tokens", "Reserved", "Internal", "Free or external")
    rows = [["Allocation", *uses, "Requests", "Never fit"]]
    for waste in found:
        shares = (waste.tokens, waste.reserved, waste.internal, waste.external)
        percents = [f"{share:.1%}" for share in shares]
        numbers = f"{waste.num_running:.1f}", f"{waste.num_refused:,}"
        rows.append([waste.allocation, *percents, *numbers])
    note = f"{trace}, {capacity:,} tokens of KV memory. Requests that never fit are left out."
    return Section("waste", "Waste of KV memory", note, rows)


def longest_section(found: Sequence[LongestPrompt], model_len: int) -> Section:
    """Longest prompts at the highest bound."""
    most = max(each.memory_bytes for each in found)
    rows = [["Weights", "Bytes", "Memory", "Longest prompt, tokens"]]
    rows += [
        [
            each.weights,
            format_bytes(each.weight_bytes),
            format_bytes(most),
            f"{each.num_tokens:,}",
        ]
        for each in found
        if each.memory_bytes == most
    ]
    note = (
        "By the plan's arithmetic: weights, activations of a step and KV of one prompt. The model "
        f"reads {model_len:,} tokens unless it is stretched."
    )
    return Section("longest", "Longest prompt by weights", note, rows)


def as_text(section: Section) -> str:
    """Title, note and table in columns."""
    widths = [max(map(len, column)) for column in zip(*section.rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in section.rows]
    return "\n".join([section.title, section.note, "", *lines])


def as_html(title: str, sections: Sequence[tuple[Section, Path]]) -> str:
    """A page that needs no other file. sections: with the PNG of each."""
    parts = []
    for section, picture in sections:
        image = base64.b64encode(picture.read_bytes()).decode()
        head, *body = section.rows
        table = "".join([_row("th", head), *(_row("td", row) for row in body)])
        parts.append(
            f"<h2>{html.escape(section.title)}</h2><p>{html.escape(section.note)}</p>"
            f'<img alt="{html.escape(section.title)}" src="data:image/png;base64,{image}">'
            f"<table>{table}</table>"
        )
    name = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style><h1>{name}</h1>{''.join(parts)}</html>\n"
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem}"
    "img{max-width:100%}table{border-collapse:collapse}"
    "td,th{border:1px solid #ccc;padding:.2rem .7rem;text-align:right}"
    "td:first-child,th:first-child{text-align:left}"
)
