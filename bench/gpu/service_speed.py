"""The service as a user starts it, with random weights in Qwen3-8B's shapes: both tiers on one GPU,
requests over gRPC."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.gpu.setting import Result, Setting
from bench.machine import BUNDLED_MODEL
from bench.measure import percentile
from engine.families.read import parse_config
from engine.torch.parameters import empty_parameters

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "dtype": "bfloat16",
}
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}
#: Time limit in seconds of the whole item: making, writing and loading weights (two workers),
#: compiling kernels.
LIMIT_S = 420.0
_SHARD_BYTES = 4 << 30


def _write_model(folder: Path, setting: Setting) -> None:
    """Write config.json, sharded random weights, and the bundled model's tokenizer."""
    raw = QWEN3_8B | (_SMALL if setting.is_dry else {})
    (folder / "config.json").write_text(json.dumps(raw))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(BUNDLED_MODEL) / name, folder / name)
    config = parse_config(raw)
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(places.values())):05}.safetensors"
        save_file(shard, folder / name)
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    meta = empty_parameters(config, torch.bfloat16, torch.device("meta"))
    for name, target in meta.targets():
        made = torch.empty(target.shape, dtype=torch.bfloat16, device=setting.device)
        made.normal_(std=0.02, generator=setting.generator())
        shard[name] = made.cpu()
        if sum(tensor.nbytes for tensor in shard.values()) >= _SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@contextmanager
def _serving(folder: Path, setting: Setting) -> Iterator[str]:
    """Yield the gateway's address. Raises RuntimeError with the end of the log if it does not get
    ready."""
    command = [sys.executable, "-m", "baton", "serve", str(folder), "--port=0", "--http-port=0"]
    command += ["--num-prefill-workers=1", "--num-decode-workers=1"]
    if setting.is_dry:
        command += ["--device=cpu", "--num-gpu-blocks-override=256"]
    else:
        command += ["--device=cuda", "--max-model-len=8192", "--max-num-seqs=64"]
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip())
                if line.startswith("Baton is ready at "):
                    yield line.removeprefix("Baton is ready at ").split(": ")[0]
                    return
            raise RuntimeError("baton serve ended: " + " / ".join(lines[-8:]))
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


async def _load(address: str, setting: Setting) -> dict[str, float]:
    """Send all requests at once, with random token ids."""
    # Imported here: its dependencies are packed for this item only, see bench.gpu.pack.
    from baton.client import AsyncClient

    num_requests = setting.pick(64, 2)
    num_prompt, num_out = setting.pick(512, 24), setting.pick(64, 4)
    vocab_size = setting.pick(int(str(QWEN3_8B["vocab_size"])), 1000)
    generator = torch.Generator().manual_seed(setting.seed)
    prompts = torch.randint(10, vocab_size, (num_requests, num_prompt), generator=generator)
    first_ms: list[float] = []
    gaps_ms: list[float] = []

    async def run(client: AsyncClient, prompt: list[int]) -> None:
        before = start = time.perf_counter()
        async with client.stream(
            prompt, max_tokens=num_out, temperature=0.0, ignore_eos=True
        ) as stream:
            async for _ in stream:
                now = time.perf_counter()
                (first_ms if before == start else gaps_ms).append((now - before) * 1000)
                before = now

    async with AsyncClient(address) as client:
        await run(client, prompts[0].tolist())
        first_ms.clear()
        gaps_ms.clear()
        start = time.perf_counter()
        await asyncio.gather(*(run(client, prompt) for prompt in prompts.tolist()))
        seconds = time.perf_counter() - start
    return {
        "output_tokens_per_s": num_requests * num_out / seconds,
        "ttft_p50_ms": percentile(sorted(first_ms), 0.5),
        "itl_p50_ms": percentile(sorted(gaps_ms), 0.5),
        "itl_p99_ms": percentile(sorted(gaps_ms), 0.99),
    }


def _service(setting: Setting) -> Result:
    """ready_s: from `baton serve` to its ready line, with kernels compiled. Then requests: see
    _load."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.perf_counter()
        _write_model(folder, setting)
        written_s = time.perf_counter() - start
        if not setting.is_dry:
            torch.cuda.empty_cache()
        with _serving(folder, setting) as address:
            ready_s = time.perf_counter() - start - written_s
            found = asyncio.run(_load(address, setting))
    return {**found, "written_s": written_s, "ready_s": ready_s}


ITEMS: Mapping[str, Callable[[Setting], Result]] = {"service, Qwen3-8B shapes": _service}
