"""Runs items of the benchmark in this process: see runner.py, which starts it.

Standard input: names of items, one per line. Standard output: JSON objects, one per line:
{"started": name}, then {"name": name, "result": {...}}. A failing item ends the process, because a
failed kernel breaks its CUDA context.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys

import torch

from bench.gpu.setting import Setting


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    if options.dry_run:
        from bench.gpu.interpreter import mend_interpreter

        mend_interpreter()
        torch.set_num_threads(1)
        setting = Setting(torch.device("cpu"), torch.float16, options.seed, options.rehearse)
    else:
        setting = Setting(torch.device("cuda"), torch.bfloat16, options.seed, options.rehearse)
    from bench.gpu.items import ITEMS

    for line in sys.stdin:
        name = line.rstrip("\n")
        _tell({"started": name})
        with torch.inference_mode():
            result = ITEMS[name](setting)
        _tell({"name": name, "result": result})
        gc.collect()
        if not setting.is_dry:
            torch.cuda.empty_cache()


def _tell(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
