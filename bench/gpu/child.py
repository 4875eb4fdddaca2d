"""Runs items of the benchmark in this process: see runner.py, which starts it.

Items are named on standard input, one a line. On standard output there are JSON objects, one a
line: {"started": name}, and {"name": name, "result": {...}} when it is done. An item that fails
ends the process, as a failed kernel ends its CUDA context.
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
