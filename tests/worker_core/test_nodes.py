"""From a worker's options to the nodes of its engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config import DecodeOptions, PrefillOptions
from baton.config.load import torchrun_options
from baton.errors import ConfigError
from engine.ranks.mesh import Degrees
from engine.ranks.nodes import ONE_NODE
from worker_core.nodes import degrees_of, nodes_of

NODES = {"model": "m", "nnodes": 2, "master_addr": "10.0.0.1", "nodes_timeout_s": 7}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "LOCAL_WORLD_SIZE": "1",
    "WORLD_SIZE": "3",
    "RANK": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}


def test_degrees_are_those_of_the_options() -> None:
    degrees = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    assert degrees_of(DecodeOptions(model="m", **degrees)) == Degrees(2, 3)
    options = PrefillOptions(model="m", context_parallel_size=4, **degrees)
    assert degrees_of(options) == Degrees(2, 3, 4)
    of_sequences = DecodeOptions(model="m", data_parallel_size=2)
    assert degrees_of(of_sequences) == Degrees(context=2, by_sequence=True)


def test_nodes_share_the_secret_of_workers(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef0123456789abcdef")
    without, with_secret, again = (
        nodes_of(DecodeOptions(colocated=True, **NODES, **more))
        for more in ({}, {"kv_secret_file": str(file)}, {"kv_secret": file.read_text()})
    )
    assert (without.size, without.address, without.port) == (2, "10.0.0.1", 29500)
    assert (without.timeout_s, without.secret) == (7, b"")
    assert with_secret == again
    assert len(with_secret.secret) == 32
    assert with_secret.secret.hex() not in repr(with_secret)
    assert nodes_of(DecodeOptions(model="m")) is ONE_NODE


def test_a_node_rank_beyond_the_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="--node-rank=2: --nnodes=2 counts hosts from 0"):
        DecodeOptions(node_rank=2, **NODES)


def test_torchrun_gives_the_options_of_nodes() -> None:
    options = DecodeOptions(model="m", **torchrun_options(TORCHRUN))  # type: ignore[arg-type]
    assert (options.nnodes, options.node_rank) == (3, 2)
    assert (options.master_addr, options.master_port) == ("10.0.0.1", 29401)
    assert torchrun_options({**TORCHRUN, "TORCHELASTIC_RUN_ID": ""}) != {}
    assert not torchrun_options({"WORLD_SIZE": "2", "RANK": "0"})
    with pytest.raises(ConfigError, match=r"LOCAL_WORLD_SIZE=2: .* torchrun --nproc-per-node 1"):
        torchrun_options({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"})
