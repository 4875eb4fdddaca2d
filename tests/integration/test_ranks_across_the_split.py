"""Tiers of unlike numbers of ranks, as `baton serve` starts them: the tokens are those of
transformers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncClient, SamplingParams
from baton.config import ServeOptions
from baton.supervisor import Cluster
from tests.support.architectures import make_checkpoint
from tests.support.fault_streams import until_quiet
from tests.support.processes import child_pids
from tests.support.tiny_models import make_tiny_model, write_byte_tokenizer
from tests.support.transformers_greedy import greedy_outputs

pytestmark = pytest.mark.slow

PROMPTS = [[(11 * i + 5 * j) % 250 for i in range(n)] for j, n in enumerate((3, 40, 90, 17))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("model"), num_attention_heads=8, num_key_value_heads=4
    )


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Granite 4 hybrid: layers with a state before, between and after two with KV."""
    types = ["mamba", "attention", "mamba", "mamba", "attention", "mamba"]
    path = tmp_path_factory.mktemp("hybrid")
    write_byte_tokenizer(path)
    return make_checkpoint(
        *(path, "granitemoehybrid"), num_hidden_layers=6, layer_types=types, vocab_size=260
    )


@asynccontextmanager
async def cluster_of(model: Path, **options: Any) -> AsyncIterator[tuple[Cluster, AsyncClient]]:
    serve = ServeOptions(
        model=str(model),
        dtype="float32",
        port=0,
        num_gpu_blocks_override=200,
        prefill_block_size=32,
        decode_block_size=8,
        max_local_prefill_tokens=0,
        log_level="error",
        drain_timeout_s=5,
        **options,
    )
    async with Cluster(serve) as cluster, AsyncClient(cluster.address) as client:
        yield cluster, client


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


@pytest.mark.long
async def test_many_ranks_prefill_for_one(model: Path) -> None:
    options = {"prefill_tensor_parallel_size": 2, "distributed_backend": "gloo"}
    async with cluster_of(model, **options) as (cluster, client):
        assert len(child_pids(cluster.pid_of("prefill-0"))) == 1
        assert not child_pids(cluster.pid_of("decode-0"))
        done = await asyncio.gather(*(client.generate(p, greedy(30)) for p in PROMPTS))
    assert [list(each.token_ids) for each in done] == greedy_outputs(model, PROMPTS, 30)
    assert all(each.timing.transfer_bytes for each in done)


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_tensor_parallel_size": 2, "decode_pipeline_parallel_size": 2},
        pytest.param(
            {"prefill_pipeline_parallel_size": 2, "decode_tensor_parallel_size": 2},
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"tensor_parallel_size": 2, "tensor_parallel_cut": "sums"}, marks=pytest.mark.long
        ),
    ],
)
async def test_each_rank_sends_its_own_kv(model: Path, options: dict[str, Any]) -> None:
    async with cluster_of(model, **options, kv_per_rank=True) as (_, client):
        done = await asyncio.gather(*(client.generate(p, greedy(30)) for p in PROMPTS))
        # A further turn, so that the decode worker holds what the prefill worker lacks.
        turns = [[*p, *each.token_ids, 7, 8] for p, each in zip(PROMPTS, done, strict=True)]
        more = await asyncio.gather(*(client.generate(p, greedy(9)) for p in turns))
    assert [list(each.token_ids) for each in done] == greedy_outputs(model, PROMPTS, 30)
    assert [list(each.token_ids) for each in more] == greedy_outputs(model, turns, 9)
    assert all(each.timing.transfer_bytes for each in done)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"prefill_tensor_parallel_size": 2},
        {"prefill_pipeline_parallel_size": 2, "decode_tensor_parallel_size": 2},
    ],
)
async def test_each_rank_sends_its_own_states(hybrid: Path, options: dict[str, Any]) -> None:
    """Each rank of a tensor-parallel group has all states of its stage; they arrive once."""
    own = {**options, "kv_per_rank": True, "distributed_backend": "gloo"}
    async with cluster_of(hybrid, **own) as (_, client):
        done = await asyncio.gather(*(client.generate(p, greedy(30)) for p in PROMPTS))
        sampling = SamplingParams(temperature=0.0, max_tokens=9, n=2, ignore_eos=True)
        forked = await client.generate(PROMPTS[1], sampling)
    wanted = greedy_outputs(hybrid, PROMPTS, 30)
    assert [list(each.token_ids) for each in done] == wanted
    assert [list(each.token_ids) for each in forked.choices] == [wanted[1][:9]] * 2
    assert all(each.timing.transfer_bytes for each in done)


@pytest.mark.long
async def test_stages_on_either_tier(model: Path) -> None:
    options = {"prefill_pipeline_parallel_size": 2, "decode_pipeline_parallel_size": 2}
    async with cluster_of(model, decode_tensor_parallel_size=2, **options) as (cluster, client):
        assert len(child_pids(cluster.pid_of("prefill-0"))) == 1
        assert len(child_pids(cluster.pid_of("decode-0"))) == 3
        done = await asyncio.gather(*(client.generate(p, greedy(30)) for p in PROMPTS))
    assert [list(each.token_ids) for each in done] == greedy_outputs(model, PROMPTS, 30)
    assert all(each.timing.transfer_bytes for each in done)


async def test_a_prompt_is_computed_by_several_ranks(model: Path) -> None:
    async with cluster_of(model, context_parallel_size=2) as (cluster, client):
        assert len(child_pids(cluster.pid_of("prefill-0"))) == 1
        assert not child_pids(cluster.pid_of("decode-0"))
        done = await asyncio.gather(*(client.generate(p, greedy(10)) for p in PROMPTS))
    assert [list(each.token_ids) for each in done] == greedy_outputs(model, PROMPTS, 10)
    assert all(each.timing.transfer_bytes for each in done)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["shm", "gloo"])
async def test_ranks_with_sequences_of_their_own_share_experts(
    tmp_path: Path, backend: str
) -> None:
    model = make_tiny_model(tmp_path, "deepseek_v3")
    options = {"data_parallel_size": 2, "distributed_backend": backend}
    async with cluster_of(model, **options) as (cluster, client):
        for name in ("prefill-0", "decode-0"):
            assert len(child_pids(cluster.pid_of(name))) == 1
        done = await asyncio.gather(*(client.generate(p, greedy(30)) for p in PROMPTS))
    assert [list(each.token_ids) for each in done] == greedy_outputs(model, PROMPTS, 30)
    assert all(each.timing.transfer_bytes for each in done)


@pytest.mark.long
async def test_one_prefills_for_many_ranks_and_a_lost_rank_costs_no_token(model: Path) -> None:
    num_tokens = 160
    wanted = greedy_outputs(model, PROMPTS, num_tokens)
    options = {"decode_tensor_parallel_size": 2, "num_decode_workers": 2}
    async with cluster_of(model, **options) as (cluster, client):
        for signum in (signal.SIGKILL, signal.SIGSTOP):
            num_resumes = 0
            while not num_resumes:  # the signal may come after a rank's last token
                await until_quiet(client, 3)
                done = await through_a_signal(cluster, client, signum, num_tokens)
                assert [list(tokens) for tokens, _ in done] == wanted
                num_resumes = sum(num for _, num in done)


async def busiest_decode_worker(
    client: AsyncClient, streams: Sequence[asyncio.Task[Any]]
) -> str | None:
    """None if the streams end before a gateway has heard who runs them."""
    while not all(stream.done() for stream in streams):
        running = {
            worker.worker_id: worker.num_running
            for worker in (await client.model()).workers
            if worker.worker_id.startswith("decode")
        }
        if any(running.values()):
            return max(running, key=running.__getitem__)
        await asyncio.sleep(0.01)
    return None


async def through_a_signal(
    cluster: Cluster, client: AsyncClient, signum: signal.Signals, num_tokens: int
) -> list[tuple[tuple[int, ...], int]]:
    """Tokens and resumes of all prompts' streams; while they run, if they run for long enough, a
    rank of a decode worker that has some gets the signal."""
    has_begun = asyncio.Event()

    async def stream(prompt: Sequence[int]) -> tuple[tuple[int, ...], int]:
        tokens: list[int] = []
        num_resumes = 0
        async with client.stream(prompt, greedy(num_tokens)) as chunks:
            async for chunk in chunks:
                assert chunk.token_index == len(tokens)
                tokens += chunk.token_ids
                if len(tokens) > 3:
                    has_begun.set()
                if chunk.timing:
                    num_resumes += chunk.timing.num_resumes
        return tuple(tokens), num_resumes

    streams = [asyncio.create_task(stream(prompt)) for prompt in PROMPTS]
    await has_begun.wait()
    busiest = await busiest_decode_worker(client, streams)
    if busiest is None:
        return await asyncio.gather(*streams)
    (rank,) = child_pids(cluster.pid_of(busiest))
    os.kill(rank, signum)
    done = await asyncio.gather(*streams)
    if signum is signal.SIGSTOP:
        with suppress(ProcessLookupError):  # frozen ranks are ended, too, some seconds later
            os.kill(rank, signal.SIGCONT)
    return done
