"""What speculation gains: tokens a second with and without, by turns, over the same requests.

    python -m bench.speculation [--model DIR] [--draft DIR] [--rounds 8] [--batch 48]

One set of services for each method (none, ngram, draft), all running all the time and all but one idle, so that whatever
else the machine does falls on each. Turns are short, a second or two, and a round drives every workload through each method,
in turning order; told are medians over the rounds of tokens a second and of the ratio to none within the round, and how many
drafted tokens were accepted. All methods decode the same prompts and seeds in a round.

Workloads, each alone (batch 1) and with as many at once as the worker takes (--batch):
    copy     Prompts are functions of this Python's standard library; the answer is greedy. A model as small as the one in the box
             soon repeats what stands before: text that copies, for which ngram is made.
    sampled  The same prompts at temperature 1: hardly anything repeats. What speculation costs where it cannot gain.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from baton.client import AsyncClient, SamplingParams
from baton.client.results import Completion
from baton.config.options import ServeOptions
from baton.supervisor.cluster import Cluster
from bench.machine import describe_commit, describe_machine, describe_versions

#: Modules whose functions are the prompts.
MODULES = ("calendar", "fnmatch", "heapq", "shutil", "statistics", "textwrap")

#: Sizes of functions that are taken, in characters.
PROMPT_CHARS = range(200, 900)

METHODS = ("none", "ngram", "draft")


@dataclass(frozen=True, slots=True)
class Workload:
    """A turn is num_at_once requests at the same time."""

    name: str
    temperature: float
    num_at_once: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What one set of services did with one workload in one round."""

    tokens_per_s: float
    num_drafted: int
    num_accepted: int
    num_tokens: int
    outputs: tuple[tuple[int, ...], ...]


def prompts() -> list[str]:
    """Sources of functions, from the library that runs this script."""
    root = Path(sysconfig.get_path("stdlib"))
    return [source for name in MODULES for source in _functions((root / f"{name}.py").read_text())]


def _functions(source: str) -> Iterator[str]:
    for node in ast.parse(source).body:
        text = ast.get_source_segment(source, node) or ""
        if isinstance(node, ast.FunctionDef) and len(text) in PROMPT_CHARS:
            yield f"{text}\n\n"


async def drive(client: AsyncClient, workload: Workload, texts: Sequence[str], first: int) -> Turn:
    """One turn, with prompts and seeds that `first` names."""

    async def one(index: int) -> Completion:
        params = SamplingParams(
            temperature=workload.temperature,
            seed=index,
            max_tokens=workload.max_tokens,
            ignore_eos=True,
        )
        return await client.generate(texts[index % len(texts)], params)

    begin_s = time.perf_counter()
    done = await asyncio.gather(*(one(first + i) for i in range(workload.num_at_once)))
    elapsed_s = time.perf_counter() - begin_s
    num_tokens = sum(len(one.token_ids) for one in done)
    return Turn(
        num_tokens / elapsed_s,
        sum(one.usage.draft_tokens for one in done),
        sum(one.usage.accepted_tokens for one in done),
        num_tokens,
        tuple(tuple(one.token_ids) for one in done),
    )


Rounds = dict[tuple[str, str], list[Turn]]


async def measure(
    options: ServeOptions, draft: str, workloads: Sequence[Workload], num_rounds: int
) -> Rounds:
    """Turns by (workload, method)."""
    texts = prompts()
    own: dict[str, dict[str, str]] = {m: {"speculative_method": m} for m in METHODS}
    own["draft"]["speculative_model"] = draft
    found: Rounds = {(w.name, m): [] for w in workloads for m in METHODS}
    async with AsyncExitStack() as stack:
        clients = {}
        for method in METHODS:
            values = options.model_dump(exclude_unset=True) | own[method]
            cluster = await stack.enter_async_context(
                Cluster(ServeOptions.model_validate(values), on_line=_drop)
            )
            clients[method] = await stack.enter_async_context(AsyncClient(cluster.address))
        for number in range(num_rounds + 1):  # the first one warms up
            shift = number % len(METHODS)
            for workload in workloads:
                for method in (*METHODS[shift:], *METHODS[:shift]):
                    turn = await drive(clients[method], workload, texts, number)
                    if number:
                        found[workload.name, method].append(turn)
                        _tell(number, workload, method, turn)
    return found


def summary(turns: Sequence[Turn], plain: Sequence[Turn]) -> dict[str, float]:
    """Figures of one workload and method; plain: the same rounds without speculation."""
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(turns, plain, strict=True)]
    num_drafted = sum(turn.num_drafted for turn in turns)
    num_accepted = sum(turn.num_accepted for turn in turns)
    num_tokens = sum(turn.num_tokens for turn in turns)
    pairs = [
        (a, b)
        for x, y in zip(turns, plain, strict=True)
        for a, b in zip(x.outputs, y.outputs, strict=True)
    ]
    return {
        "tokens_per_s": statistics.median(turn.tokens_per_s for turn in turns),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "drafted_per_token": num_drafted / num_tokens,
        "acceptance": num_accepted / num_drafted if num_drafted else 0.0,
        "tokens_per_step": num_tokens / (num_tokens - num_accepted),
        "share_of_equal_outputs": sum(a == b for a, b in pairs) / len(pairs),
    }


def _tell(number: int, workload: Workload, method: str, turn: Turn) -> None:
    sys.stderr.write(
        f"round {number} {workload.name} {method}: {turn.tokens_per_s:.0f} tok/s, "
        f"{turn.num_accepted}/{turn.num_drafted} accepted\n"
    )


def _drop(name: str, line: str) -> None:
    """Logs of the services are of no interest here."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="models/baton-py-6m")
    parser.add_argument("--draft", default="models/baton-py-6m-draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batch", type=int, default=48)
    given = parser.parse_args()
    options = ServeOptions.model_validate(
        {
            "model": given.model,
            "dtype": given.dtype,
            "colocated": True,
            "port": 0,
            "log_level": "warning",
            "max_num_seqs": given.batch,
            "max_model_len": 1024,
        }
    )
    workloads = [
        Workload(f"{name}, batch {at_once}", temperature, at_once, max_tokens)
        for at_once, max_tokens in ((1, 256), (given.batch, 64))
        for name, temperature in (("copy", 0.0), ("sampled", 1.0))
    ]
    found = asyncio.run(measure(options, given.draft, workloads, given.rounds))
    results = {
        workload.name: {
            method: summary(found[workload.name, method], found[workload.name, "none"])
            for method in METHODS
        }
        for workload in workloads
    }
    told = {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "commit": describe_commit(),
        "dtype": given.dtype,
        "results": results,
    }
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
