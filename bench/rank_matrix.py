"""Whether tokens are those of one process, for tiers of many degrees of parallelism, equal or not,
on models of each kind of layers.

    python -m bench.rank_matrix [--model NAME ...] [--requests 16] [--max-ranks 8] [--minutes M]
        [--json FILE [--resume]] [--write | --add]

Models are small and random; each is checked as by `baton check`, against one process, with pairs of
degrees: tensor parallel 1, 2 and 4 by 1 and 2 stages. In six pairs each of the six degrees is once
on either tier; which ones meet differs by model, so that five models have 30 of the 36 pairs.
Ranks exchange results through shared memory or over gloo, by turns; KV leaves from rank 0 or, with
--kv-per-rank, from each rank. --resume: pairs that FILE has are not checked again; it is written
after each. --write: renews the table of docs/parallelism.md; --add: checks the pairs that it lacks
and adds them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

from baton.check.run import Shape, Verdict, check_shape, reference
from baton.supervisor.child import ChildFailed
from bench.machine import BUNDLED_MODEL, ROOT, document_of, now, publish, write_json
from bench.suite.markdown import about, part_of, replaced, table
from engine.ranks.mesh import Degrees

PAGE = ROOT / "docs" / "parallelism.md"
ALL = tuple(Degrees(tensor, pipeline) for pipeline in (1, 2) for tensor in (1, 2, 4))
_LENGTH = 512
_COMMON: Mapping[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": _LENGTH,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}
_MAMBA: Mapping[str, Any] = {
    "layer_types": ["mamba", "attention"] * 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 4,
}
#: By name: kind of layers, class of transformers, fields of its config.
MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "dense": ("Llama", "Llama", {}),
    "windows": ("Gemma 3", "Gemma3Text", {"sliding_window": 24}),
    "latent": ("DeepSeek-V3", "DeepseekV3", _LATENT),
    "mixture": ("Qwen 3 MoE", "Qwen3Moe", _EXPERTS),
    "states": ("Granite 4 hybrid", "GraniteMoeHybrid", _MAMBA),
}


def make_model(name: str, folder: Path) -> Path:
    """Write a random checkpoint."""
    import torch
    import transformers

    _, kind, fields = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**_COMMON, **fields})
    torch.manual_seed(0)
    of_text = kind.removesuffix("Text")
    getattr(transformers, f"{of_text}ForCausalLM")(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(BUNDLED_MODEL) / file, folder)
    return folder


def pairs(index: int) -> Iterator[tuple[Degrees, Degrees]]:
    """Degrees of prefill and decode workers, for the model with this index."""
    for at, own in enumerate(ALL):
        yield own, ALL[(at + index + 1) % len(ALL)]


def shape_of(name: str, number: int, prefill: Degrees, decode: Degrees) -> Shape:
    """The number-th pair of a model."""
    backend = ("shm", "gloo")[number % 2]
    is_per_rank = number % 3 == 1 and name != "states"
    degrees = {
        f"{tier}_{kind}_parallel_size": getattr(own, kind)
        for tier, own in (("prefill", prefill), ("decode", decode))
        for kind in ("tensor", "pipeline")
    }
    return Shape(
        f"{name}: {text_of(prefill)} to {text_of(decode)} over {backend}"
        + (", KV per rank" if is_per_rank else ""),
        {
            **degrees,
            "distributed_backend": backend,
            "kv_per_rank": is_per_rank,
            "prefill_block_size": (16, 32, 8)[number % 3],
            "decode_block_size": (16, 8)[number % 2],
            "max_num_batched_tokens": 64,
        },
        concurrency=8,
    )


def text_of(degrees: Degrees) -> str:
    """For a table."""
    return f"{degrees.tensor}x{degrees.pipeline}"


async def check_model(
    name: str,
    folder: Path,
    max_ranks: int,
    num_requests: int,
    on: Callable[[Verdict], None],
    end_s: float = inf,
    known: Container[str] = (),
) -> int:
    """Check one model; returns the number of pairs that did not start, twice. on: called with each
    verdict. end_s: on the monotonic clock, when no further pair begins. known: pairs, see pair_of,
    that are left out."""
    num_failed = 0
    if time.monotonic() > end_s:
        return num_failed
    options = {
        "model": str(make_model(name, folder)),
        "dtype": "float32",
        "log_level": "error",
        "kv_cache_memory_bytes": "64MiB",
        "max_num_seqs": 8,
        "max_local_prefill_tokens": 0,
    }
    requests, expected = await reference(options, num_requests, seed=1)
    for number, (prefill, decode) in enumerate(pairs(list(MODELS).index(name))):
        if max(prefill.num_ranks, decode.num_ranks) > max_ranks or time.monotonic() > end_s:
            continue
        shape = shape_of(name, number, prefill, decode)
        if pair_of(shape) in known:
            continue
        for is_last in (False, True):
            try:
                on(await check_shape(options, shape, requests, expected))
                break
            except ChildFailed as error:
                print(f"{shape.name} did not start: {error}", flush=True)
                num_failed += is_last
    return num_failed


@dataclass(frozen=True, slots=True)
class Line:
    """A model's line of the table: pairs, and numbers of requests."""

    equal: tuple[str, ...] = ()
    different: tuple[str, ...] = ()
    num_handed_over: int = 0
    num_requests: int = 0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Line:
        """The line of one pair, see row_of."""
        pair, none = (row["pair"],), ()
        equal, different = (pair, none) if row["is_equal"] else (none, pair)
        return cls(equal, different, row["num_handed_over"], row["num_requests"])

    def __add__(self, other: Line) -> Line:
        return Line(
            *(self.equal + other.equal, self.different + other.different),
            *(self.num_handed_over + other.num_handed_over, self.num_requests + other.num_requests),
        )

    @property
    def pairs(self) -> tuple[str, ...]:
        return self.equal + self.different


NO_LINES: Mapping[str, Line] = MappingProxyType({})


def lines_of(text: str) -> dict[str, Line]:
    """The lines of a table that matrix_table wrote, by model."""
    found = {}
    for line in text.splitlines():
        for name, (title, _, _) in MODELS.items():
            if line.startswith(f"| {title} ({name}) |"):
                equal, different, moved = (cell.strip() for cell in line.split("|")[2:5])
                handed_over, requests = moved.split(" of ")
                found[name] = Line(
                    *(_pairs_of(equal), _pairs_of(different), int(handed_over), int(requests))
                )
    return found


def _pairs_of(cell: str) -> tuple[str, ...]:
    return () if cell == "none" else tuple(cell.split(" · "))


def matrix_table(document: Mapping[str, Any], earlier: Mapping[str, Line] = NO_LINES) -> str:
    """Markdown: a line for each model, with the pairs that were equal and those that were not.
    earlier: lines of other runs, which these rows are added to."""
    found = dict(earlier)
    for row in document["rows"]:
        found[row["model"]] = found.get(row["model"], Line()) + Line.of(row)
    lines = [
        [
            f"{MODELS[name][0]} ({name})",
            *(" · ".join(each) or "none" for each in (line.equal, line.different)),
            f"{line.num_handed_over} of {line.num_requests}",
        ]
        for name, line in found.items()
    ]
    text = table(("Model", "Equal", "Different", "Handed over"), lines)
    note = (
        "A pair is the degrees of prefill and of decode workers, each tensor x pipeline; g: over "
        "gloo, else shared memory; r: KV per rank."
    )
    if earlier:
        own = ", ".join(f"{row['pair']} ({row['model']})" for row in document["rows"])
        note += f" This run had {own or 'no pair'}; the others are of earlier runs."
    return "\n\n".join((about(document), text, note))


def pair_of(shape: Shape) -> str:
    """The pair of a model, for the table."""
    options = shape.options
    degrees = [
        "x".join(str(options[f"{tier}_{kind}_parallel_size"]) for kind in ("tensor", "pipeline"))
        for tier in ("prefill", "decode")
    ]
    marks = ("g" if options["distributed_backend"] == "gloo" else "") + (
        "r" if options["kv_per_rank"] else ""
    )
    return "→".join(degrees) + (f" {marks}" if marks else "")


def row_of(name: str, verdict: Verdict) -> dict[str, Any]:
    """A verdict for the document."""
    return {
        "model": name,
        "pair": pair_of(verdict.shape),
        "is_equal": verdict.is_equal,
        "num_handed_over": verdict.num_handed_over,
        "num_requests": verdict.num_requests,
        "seconds": verdict.seconds,
    }


def main() -> None:
    """Check and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-ranks", type=int, default=8, help="of a worker; leaves pairs out")
    parser.add_argument("--minutes", type=float, default=inf, help="no pair begins later")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--write", action="store_true")
    target.add_argument("--add", action="store_true")
    given = parser.parse_args()
    if given.resume and given.json is None:
        parser.error("--resume: name the file of the rows by --json")
    earlier = lines_of(part_of(PAGE.read_text(), "rank-matrix")) if given.add else NO_LINES
    started, rows, num_failed = now(), list[dict[str, Any]](), 0
    end_s = time.monotonic() + 60 * given.minutes
    if given.resume and given.json.exists():
        rows += json.loads(given.json.read_text())["rows"]

    def report(name: str, verdict: Verdict) -> None:
        rows.append(row_of(name, verdict))
        if given.json is not None:
            write_json(given.json, document_of("bench.rank_matrix", started, {"rows": rows}))
        text = "equal" if verdict.is_equal else "DIFFERENT"
        moved = f"{verdict.num_handed_over} of {verdict.num_requests} handed over"
        print(f"{text}  {verdict.shape.name}: {moved}, {verdict.seconds:.1f} s", flush=True)

    for name in given.model:
        with tempfile.TemporaryDirectory() as folder:
            of_model = (name, Path(folder), given.max_ranks, given.requests)
            known = {row["pair"] for row in rows if row["model"] == name}
            known.update(earlier.get(name, Line()).pairs)
            check = check_model(*of_model, partial(report, name), end_s, known)
            num_failed += asyncio.run(check)
    document = document_of("bench.rank_matrix", started, {"rows": rows})
    text = matrix_table(document, earlier)
    publish(document, given.json, lambda _: text)
    if given.write or given.add:
        PAGE.write_text(replaced(PAGE.read_text(), "rank-matrix", text))
    raise SystemExit(0 if all(row["is_equal"] for row in rows) and not num_failed else 1)


if __name__ == "__main__":
    main()
