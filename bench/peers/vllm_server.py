"""vLLM's server as a contender."""

from __future__ import annotations

from bench.peers.models import checkpoint
from bench.peers.processes import installed_python
from bench.peers.server import Bounds, PeerServer


def vllm_server(model: str, chunk: int, bounds: Bounds, port: int) -> PeerServer:
    """In bfloat16. model: of bench.peers.models.NAMES. chunk: tokens of a step. Raises
    PeerMissing."""
    folder = str(checkpoint(model, "bfloat16"))
    command = (
        *(str(installed_python("vllm")), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", folder, "--dtype", "bfloat16", "--served-model-name", "model"),
        *("--host", "127.0.0.1", "--port", str(port), "--no-enable-prefix-caching"),
        *("--max-model-len", str(bounds.max_model_len)),
        *("--max-num-seqs", str(bounds.max_num_seqs), "--max-num-batched-tokens", str(chunk)),
    )
    environment = {
        "OMP_NUM_THREADS": str(bounds.num_threads),
        # In whole GiB.
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, bounds.kv_bytes >> 30)),
    }
    return PeerServer(command, environment, port, "Application startup complete")
