"""`python -m engine.doctor`: checks torch, the device and a model's files; prints findings as one
JSON list.

A separate process, so that the command line does not import torch and survives a crash of that
import.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from baton.doctor.finding import Finding, ok, problem, warning
from baton.errors import StartupError
from baton.types import NO_LEVEL

if TYPE_CHECKING:
    from engine.model_source import ModelSource


def main() -> int:
    """Always returns 0; problems are findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--block-size", type=int, default=16)
    given = parser.parse_args()
    findings = [check_torch(), check_kernels(), check_device(given.device)]
    if given.model:
        findings += check_model(given.model, given.dtype, given.block_size)
    sys.stdout.write(json.dumps([dataclasses.asdict(finding) for finding in findings]) + "\n")
    return 0


def check_torch() -> Finding:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    cores = len(os.sched_getaffinity(0))
    found = f"torch {torch.__version__}, CPU {capability}, {cores} cores"
    if capability in ("DEFAULT", "NO AVX"):
        return warning("torch", found, "a CPU with AVX2 or newer computes several times faster")
    return ok("torch", found)


def check_kernels() -> Finding:
    """Level of the native CPU kernels. Builds them if necessary."""
    from baton_kernels.cpu.library import (
        LevelError,
        chosen_level,
        level,
        levels_of_machine,
        why_none,
    )

    try:
        found = level()
    except LevelError as error:
        return problem("CPU kernels", str(error), "leave BATON_CPU_LEVEL out, or give one of these")
    if found == NO_LEVEL:
        if chosen_level() != NO_LEVEL:
            fix = "install a C++ compiler, or a wheel that has them; see docs/kernels.md"
        elif levels_of_machine():
            fix = "leave BATON_CPU_LEVEL out"
        else:
            fix = "a CPU with AVX2 or NEON has them; see docs/kernels.md"
        return warning("CPU kernels", f"none ({why_none()}): torch's operations run instead", fix)
    return ok("CPU kernels", f"level {found}")


def check_device(device: str) -> Finding:
    import torch

    if torch.cuda.is_available():
        names = [
            f"cuda:{index} {torch.cuda.get_device_name(index)}, "
            f"{torch.cuda.mem_get_info(index)[0] / 2**30:.1f} GiB free"
            for index in range(torch.cuda.device_count())
        ]
        return ok("device", "; ".join(names))
    if device.startswith("cuda"):
        fix = "give --device=cpu, or install a CUDA build of torch and the driver"
        return problem("device", f"{device}: torch sees no GPU", fix)
    return ok("device", "cpu; torch sees no GPU")


def check_model(model: str, dtype: str, block_size: int) -> list[Finding]:
    """Check config, weights, tokenizer and memory of the model, as far as its files are local.
    Downloads nothing."""
    from engine.checkpoint import local_folder

    try:
        folder = local_folder(model)
    except StartupError as error:
        return [problem("model", model, error.message)]
    if folder is None:
        fix = "it is fetched at the first start; mind the spelling, the network and HF_TOKEN"
        return [warning("model", f"{model} is not on this machine", fix)]
    return [*_check_weights(folder, dtype, block_size), _check_tokenizer(folder)]


def _check_weights(folder: Path, dtype: str, block_size: int) -> Iterator[Finding]:
    import torch

    from engine.checkpoint import find_shards
    from engine.choose_source import model_source
    from engine.dtype import choose_dtype

    try:
        source = model_source(folder, "auto")
        layers = f"{source.num_layers} layers"
        if source.num_state_layers:
            layers += f" with attention and {source.num_state_layers} with a state"
        what = f"{source.name}, {layers}, {source.max_len} tokens, {source.dtype}"
        yield ok("model", what)
        shards = find_shards(folder)
        yield _check_shards(list(shards))
        where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        name = choose_dtype(dtype, source.dtype, where).name
        yield from _memory_plan(source, name, block_size)
    except StartupError as error:
        yield problem("model", str(folder), error.message)


def _check_shards(shards: list[Path]) -> Finding:
    """Open each shard, which compares its header with the file's length."""
    from safetensors import SafetensorError, safe_open

    from baton.gguf.folder import SUFFIX

    for path in shards:
        if path.suffix == SUFFIX:
            continue  # its header was read for its config
        try:
            with safe_open(path, framework="pt", device="cpu"):
                pass
        except (SafetensorError, OSError) as error:
            return problem("weights", f"{path.name}: {error}", "fetch this file again")
    size = sum(path.stat().st_size for path in shards)
    form = shards[0].suffix.removeprefix(".")
    return ok("weights", f"{len(shards)} {form}, {size / 2**20:.1f} MiB")


def _memory_plan(source: ModelSource, dtype: str, block_size: int) -> Iterator[Finding]:
    """Memory plan of one worker on the host, with defaults for all other options."""
    import torch

    from baton.config import DecodeOptions
    from engine.host_memory import host_budget
    from engine.kv.tensors.state_memory import state_bytes
    from engine.load import kv_layout, max_window_slots
    from engine.memory_plan import plan_blocks
    from engine.ranks.mesh import ONE_RANK

    options = DecodeOptions(model="-")
    num_seqs, longest = options.max_num_seqs, source.max_len
    layout = kv_layout(source, dtype, block_size)
    device, num_batched = torch.device("cpu"), options.max_num_batched_tokens
    host = host_budget(options.gpu_memory_utilization)
    plan = plan_blocks(
        layout,
        dtype=dtype,
        weights=source.weight_bytes(dtype, device, ONE_RANK),
        states=state_bytes(layout, num_seqs),
        activations=source.activation_bytes(
            dtype, options.max_num_batched_tokens, num_seqs, longest
        ),
        graphs=0,
        max_model_len=longest,
        max_num_seqs=num_seqs,
        available_bytes=host.available_bytes,
        default_kv_bytes=host.default_kv_bytes,
        degrees=ONE_RANK,
        kv_cache_memory_bytes=None,
        num_blocks=None,
        max_window_slots=max_window_slots(source, layout, num_seqs, num_batched),
    )
    yield ok("memory of a worker on the CPU", "; ".join(f"{what}: {n}" for what, n in plan.rows()))


def _check_tokenizer(folder: Path) -> Finding:
    import tokenizers

    path = folder / "tokenizer.json"
    fix = "name a folder or Hub id that has one with --tokenizer"
    if not path.is_file():
        return problem("tokenizer", "no tokenizer.json", fix)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001, the library raises nothing narrower
        return problem("tokenizer", f"tokenizer.json cannot be read ({error})", fix)
    return ok("tokenizer", f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    sys.exit(main())
