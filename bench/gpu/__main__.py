"""The whole GPU benchmark of Baton in one command.

    python -m bench.gpu [--stage NAME ...] [--only TEXT] [--out FOLDER] [--dry-run]

Order: a rehearsal, which runs every item once in many processes, so that Triton's cache has all
kernels before anything is timed; correctness of every kernel against float64, on fresh random
inputs; the roofs; steps and prompts of the engine as shares of the roofs; peers; KV; the service;
single kernels; tiles. An item that fails or hangs is reported, and the others continue.

Each outcome is appended to gpu-DATE.jsonl; gpu-DATE.md and .json are written at the end.

Needs torch, Triton, transformers, and the packages that bench.gpu.pack packs; PYTHONPATH=.:kernels
replaces an install. A dry run runs everything on tiny sizes in Triton's interpreter on a CPU; its
times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from bench.gpu.items import LIMITS_S, STAGES, rehearsal_groups
from bench.gpu.report import goal_table, shares, table
from bench.gpu.runner import Limits, Outcome, child_command, rehearse, run_items
from bench.machine import describe_commit, describe_machine, describe_versions

_RESULTS = Path(__file__).resolve().parents[1] / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if anything was wrong or failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--stage", nargs="+", choices=list(STAGES), default=list(STAGES), help="default: all"
    )
    parser.add_argument("--only", default="", help="items whose name contains this")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of the results")
    parser.add_argument(
        "--total-s", type=float, default=560.0, help="after that, the rest is left out"
    )
    parser.add_argument(
        "--rehearsal-processes",
        type=int,
        default=min(16, os.cpu_count() or 1),
        help="that compile before all else; 0: none does",
    )
    parser.add_argument("--rehearsal-s", type=float, default=150.0, help="after that, it ends")
    parser.add_argument("--item-s", type=float, default=90.0, help="after that, an item has failed")
    parser.add_argument("--seed", type=int, default=None, help="default: another one in each run")
    parser.add_argument("--dry-run", action="store_true", help="in miniature, on the CPU")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    stages = [name for name in STAGES if name in options.stage]
    started = time.monotonic()
    about = {
        "dry_run": options.dry_run,
        "seed": seed,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "commit": describe_commit(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    stem = f"gpu-{datetime.now(UTC):%Y-%m-%d-%H%M%S}"
    outcomes: list[Outcome] = []
    with (options.out / f"{stem}.jsonl").open("w") as lines:

        def report(record: object) -> None:
            print(json.dumps(record), file=lines, flush=True)

        def on_outcome(outcome: Outcome) -> None:
            report(asdict(outcome))
            print(table([outcome]).splitlines()[-1], file=sys.stderr, flush=True)
            outcomes.append(outcome)

        def left_s() -> float:
            return max(0.0, float(options.total_s) - (time.monotonic() - started))

        report(about)
        if options.rehearsal_processes:
            # A dry run compiles nothing: a few items suffice.
            most = 2 if options.dry_run else None
            groups = [
                [name for name in group if options.only in name][:most]
                for group in rehearsal_groups(stages, options.rehearsal_processes)
            ]
            command = child_command(seed, is_dry=options.dry_run, is_rehearsal=True)
            limit_s = min(options.rehearsal_s, left_s())
            limits = Limits(limit_s, limit_s)
            on_outcome(rehearse([group for group in groups if group], *command, limits))
        command = child_command(seed, is_dry=options.dry_run)
        for stage in stages:
            names = [name for name in STAGES[stage] if options.only in name]
            run_items(names, *command, Limits(options.item_s, left_s(), LIMITS_S), on_outcome)
    _write(options.out / stem, {**about, "seconds": time.monotonic() - started}, outcomes)
    return int(any(o.failure or o.result.get("verdict") == "WRONG" for o in outcomes))


def _write(path: Path, about: dict[str, object], outcomes: Sequence[Outcome]) -> None:
    """path: without suffix."""
    everything = {
        **about,
        "items": [asdict(outcome) for outcome in outcomes],
        "share_of_roof": shares(outcomes),
    }
    path.with_suffix(".json").write_text(json.dumps(everything, indent=1) + "\n")
    head = "\n".join(f"- {name}: {json.dumps(value)}" for name, value in about.items())
    body = f"{goal_table(outcomes)}\n\n{table(outcomes)}"
    path.with_suffix(".md").write_text(f"# GPU\n\n{head}\n\n{body}\n")
    print(body)


if __name__ == "__main__":
    raise SystemExit(main())
