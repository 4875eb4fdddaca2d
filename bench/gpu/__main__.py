"""Everything that there is to know of Baton on this machine's GPU, in one command and under 8
minutes.

    python -m bench.gpu [--only TEXT] [--out FOLDER] [--dry-run]

First whether every kernel is right, on fresh random inputs, against float64; then the roofs; then
each kernel and the engine as a share of them; then peers. An item that fails or hangs is reported
as such, and the rest goes on. Writes gpu-DATE.json and gpu-DATE.md.

It needs torch, Triton and transformers, and none of Baton's other dependencies:
PYTHONPATH=.:kernels will do for an install. A dry run does all of it in miniature in Triton's
interpreter, on a CPU: its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from bench.gpu.report import goal_table, shares, table
from bench.gpu.runner import Limits, Outcome, child_command, run_items
from bench.machine import describe_commit, describe_machine, describe_versions

_RESULTS = Path(__file__).resolve().parents[1] / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if anything was wrong or failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="items whose name contains this")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of the results")
    parser.add_argument(
        "--total-s", type=float, default=460.0, help="after that, the rest is left out"
    )
    parser.add_argument("--item-s", type=float, default=90.0, help="after that, an item has failed")
    parser.add_argument("--seed", type=int, default=None, help="default: another one in each run")
    parser.add_argument("--dry-run", action="store_true", help="in miniature, on the CPU")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    names = [name for name in _names() if options.only in name]
    command, environment = child_command(seed, is_dry=options.dry_run)
    limits = Limits(options.item_s, options.total_s)
    started = time.monotonic()
    outcomes = run_items(names, command, environment, limits, _tell)
    about = {
        "dry_run": options.dry_run,
        "seed": seed,
        "seconds": time.monotonic() - started,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "commit": describe_commit(),
    }
    _write(options.out, about, outcomes)
    return int(any(o.failure or o.result.get("verdict") == "WRONG" for o in outcomes))


def _names() -> list[str]:
    from bench.gpu.items import ITEMS

    return list(ITEMS)


def _tell(outcome: Outcome) -> None:
    print(table([outcome]).splitlines()[-1], file=sys.stderr, flush=True)


def _write(folder: Path, about: dict[str, object], outcomes: Sequence[Outcome]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"gpu-{datetime.now(UTC):%Y-%m-%d-%H%M%S}"
    everything = {
        **about,
        "items": [asdict(outcome) for outcome in outcomes],
        "share_of_roof": shares(outcomes),
    }
    (folder / f"{stem}.json").write_text(json.dumps(everything, indent=1) + "\n")
    head = "\n".join(f"- {name}: {json.dumps(value)}" for name, value in about.items())
    body = f"{goal_table(outcomes)}\n\n{table(outcomes)}"
    (folder / f"{stem}.md").write_text(f"# GPU\n\n{head}\n\n{body}\n")
    print(body)


if __name__ == "__main__":
    raise SystemExit(main())
