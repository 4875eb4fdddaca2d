"""Runs every kernel once under NVIDIA's compute-sanitizer, to find invalid reads and writes.

A first run without the tool compiles the kernels, which takes much longer under it. Each line goes
to standard error as it comes, so that a run that is cut off says which case it was in.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from bench.gpu.case import TINY
from bench.gpu.cases import all_cases
from bench.gpu.setting import Result, Setting

_TOOL = "compute-sanitizer"
#: Time for both runs.
LIMIT_S = 300.0


def _sanitized(setting: Setting) -> Result:
    """errors: counted by the tool. A dry run runs a few kernels without it."""
    most = setting.pick(len(all_cases()), 3)
    command = [sys.executable, "-m", "bench.gpu.sanitizer", str(setting.device), str(most)]
    if not setting.is_dry:
        if shutil.which(_TOOL) is None:
            return {"skipped": f"{_TOOL} is not installed"}
        compiled, output = streamed(command)
        if compiled:
            return {"verdict": "WRONG", "output": f"without {_TOOL}: {output[-1500:]}"}
        command = [_TOOL, "--tool=memcheck", "--print-limit=5", *command]
    status, output = streamed(command)
    summary = re.search(r"ERROR SUMMARY: (\d+) error", output)
    num_errors = float(summary[1]) if summary else 0.0
    num_cases = output.count("case ")
    is_right = not (status or num_errors)
    found = {"errors": num_errors, "num_cases": num_cases}
    if is_right:
        return {**found, "verdict": "right"}
    return {**found, "verdict": "WRONG", "output": output[-1500:]}


def streamed(command: Sequence[str]) -> tuple[int, str]:
    """Exit status and output of a command, which also goes to standard error line by line."""
    lines: list[str] = []
    with subprocess.Popen(
        list(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        for line in child.stdout or ():
            lines.append(line)
            print(line, end="", file=sys.stderr, flush=True)
    return child.returncode, "".join(lines)


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
