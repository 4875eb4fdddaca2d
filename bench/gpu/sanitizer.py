"""Runs every kernel once under NVIDIA's compute-sanitizer, to find invalid reads and writes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from bench.gpu.case import TINY
from bench.gpu.cases import all_cases
from bench.gpu.setting import Result, Setting

_TOOL = "compute-sanitizer"


def _sanitized(setting: Setting) -> Result:
    """errors: counted by the tool. A dry run runs a few kernels without it."""
    most = setting.pick(len(all_cases()), 3)
    command = [sys.executable, "-m", "bench.gpu.sanitizer", str(setting.device), str(most)]
    if not setting.is_dry:
        if shutil.which(_TOOL) is None:
            return {"skipped": f"{_TOOL} is not installed"}
        command = [_TOOL, "--tool=memcheck", "--print-limit=5", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    summary = re.search(r"ERROR SUMMARY: (\d+) error", output)
    num_errors = float(summary[1]) if summary else 0.0
    num_cases = output.count("case ")
    is_right = not (done.returncode or num_errors)
    found = {"errors": num_errors, "num_cases": num_cases}
    if is_right:
        return {**found, "verdict": "right"}
    return {**found, "verdict": "WRONG", "output": output[-1500:]}


def main() -> None:
    """Run the first cases on small inputs; print a line for each."""
    device = torch.device(sys.argv[1])
    if device.type == "cpu":
        from bench.gpu.interpreter import mend_interpreter

        mend_interpreter()
    sizes = replace(TINY, half=torch.float16 if device.type == "cpu" else torch.bfloat16)
    arch = 90
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = 10 * major + minor
    with torch.inference_mode():
        for case in all_cases()[: int(sys.argv[2])]:
            if case.min_arch <= arch and (device.type == "cuda" or case.is_interpretable):
                case.build(torch.Generator(device).manual_seed(0), sizes).run()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                print("case", case.name, flush=True)


ITEMS: Mapping[str, Callable[[Setting], Result]] = {"check memory accesses": _sanitized}

if __name__ == "__main__":
    main()
