"""A checkpoint is loaded whole or refused with what to do about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import (
    ConfigError,
    MissingTensor,
    ModelError,
    TensorMismatch,
    UnsafeCheckpoint,
    UnsupportedModel,
)
from baton_kernels.cpu.library import level
from engine.checkpoint import find_shards
from engine.memory_plan import MemoryPlan
from engine.memory_reservations import Reservations
from engine.torch import weights
from engine.torch.weights import (
    ShardProgress,
    _read,
    _read_shards,
    _stored_tensors,
    digest_checkpoint,
)
from tests.support.engines import load_engine
from tests.support.tiny_models import make_tiny_model

MakeModel = Callable[..., Path]
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def checkpoint(tiny_model: MakeModel, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return shutil.copytree(tiny_model("llama"), tmp_path / "model")


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def fingerprint(path: Path, dtype: str = "auto") -> str:
    return load_engine(str(path), num_blocks=1, dtype=dtype).spec.layout.fingerprint


def test_a_missing_tensor_is_named_with_its_shape(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda tensors: tensors.pop(Q_PROJ))
    with pytest.raises(MissingTensor, match=r"layers\.1\.self_attn\.q_proj\.weight' \[64, 64\]"):
        fingerprint(checkpoint)


def test_a_wrong_shape_is_named_with_both_shapes(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda tensors: tensors.update({Q_PROJ: torch.zeros(32, 64)}))
    with pytest.raises(
        TensorMismatch, match=r"q_proj\.weight' is \[32, 64\], .* makes it \[64, 64\]"
    ):
        fingerprint(checkpoint)


def test_a_tensor_without_a_place_is_refused(checkpoint: Path) -> None:
    """Leaving out a bias that the weights have would serve another model."""
    name = Q_PROJ.replace("weight", "bias")
    edit_weights(checkpoint, lambda tensors: tensors.update({name: torch.zeros(64)}))
    with pytest.raises(TensorMismatch, match=r"q_proj\.bias"):
        fingerprint(checkpoint)


def test_tensors_of_another_type_are_refused(checkpoint: Path) -> None:
    integers = torch.zeros(64, 64, dtype=torch.int8)
    edit_weights(checkpoint, lambda tensors: tensors.update({Q_PROJ: integers}))
    with pytest.raises(TensorMismatch, match="int8"):
        fingerprint(checkpoint)


def test_pickles_are_never_read(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(UnsafeCheckpoint, match=r"pytorch_model\.bin.*save_pretrained"):
        fingerprint(checkpoint)


def test_a_hub_id_is_fetched_without_pickles(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def fetch(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo_id, revision, allow_patterns))
        return str(checkpoint)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    load_engine("some/model", revision="abc", num_blocks=1)
    repo_id, revision, patterns = asked[0]
    assert (repo_id, revision) == ("some/model", "abc")
    assert not any(fnmatch("pytorch_model.bin", pattern) for pattern in patterns)


def test_a_hub_checkpoint_of_pickles_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint / "model.safetensors").unlink()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(checkpoint))
    files = ["config.json", "pytorch_model.bin"]
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_, **__: files)
    with pytest.raises(UnsafeCheckpoint, match=r"some/model.*pytorch_model\.bin"):
        load_engine("some/model", num_blocks=1)


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelError, match=r"some/model: neither a folder.*no route"):
        load_engine("some/model", num_blocks=1)


def test_no_weights_at_all(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(MissingTensor, match="no \\*\\.safetensors"):
        fingerprint(checkpoint)


def test_a_file_cut_short_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        fingerprint(checkpoint)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": ""}, "model_type=''.*llama, mistral, qwen2, qwen3"),
        ({"model_type": "unheard"}, "no such model.*unheard"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes.*unquantised"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"dtype": "float8_e4m3fn"}, "float8"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
    ],
)
def test_what_is_not_known_is_refused(
    checkpoint: Path, changes: dict[str, object], words: str
) -> None:
    edit_config(checkpoint, **changes)
    with pytest.raises(UnsupportedModel, match=words):
        fingerprint(checkpoint)


def test_no_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        fingerprint(checkpoint)


def test_shards_load_as_the_single_file_does(tmp_path: Path) -> None:
    single = make_tiny_model(tmp_path / "single", seed=3)
    sharded = make_tiny_model(tmp_path / "sharded", seed=3, max_shard_size="60KB")
    assert len(find_shards(sharded)) > 3
    seen: list[ShardProgress] = []
    engine = load_engine(str(sharded), num_blocks=1, progress=seen.append)
    assert engine.spec.layout.fingerprint == fingerprint(single)
    assert {step.index for step in seen} == set(range(seen[0].num_shards))
    assert all(step.done_bytes <= step.num_bytes for step in seen)
    assert seen[-1].done_bytes == seen[-1].num_bytes


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    sharded = make_tiny_model(tmp_path, max_shard_size="60KB")
    sorted(sharded.glob("*.safetensors"))[1].unlink()
    with pytest.raises(MissingTensor, match="model-00002"):
        fingerprint(sharded)


def test_the_fingerprint_tells_weights_and_settings_apart(checkpoint: Path) -> None:
    before = fingerprint(checkpoint)
    assert fingerprint(checkpoint) == before
    edit_weights(checkpoint, lambda tensors: tensors[Q_PROJ][0].mul_(1.5))
    changed = fingerprint(checkpoint)
    assert changed != before
    edit_config(checkpoint, rms_norm_eps=1e-3)
    assert fingerprint(checkpoint) not in (before, changed)


def test_auto_takes_the_checkpoints_type(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, dtype=torch.bfloat16)
    assert load_engine(str(path), num_blocks=1).spec.layout.dtype == "bfloat16"
    assert load_engine(str(path), num_blocks=1, dtype="float32").spec.layout.dtype == "float32"


def test_an_engine_knows_its_numerics_class(checkpoint: Path) -> None:
    numerics = load_engine(str(checkpoint), num_blocks=1, dtype="bfloat16").spec.numerics
    assert (numerics.device, numerics.level, numerics.dtype) == ("cpu", level(), "bfloat16")
    assert torch.__version__.partition("+")[0] in numerics.kernels


def test_who_has_no_native_kernels_is_told_in_one_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.numerics.level", lambda: "none")
    monkeypatch.setattr("engine.load.why_none", lambda: "no C++ compiler")
    with caplog.at_level("WARNING"):
        spec = load_engine(str(checkpoint), num_blocks=1).spec
    assert spec.numerics.is_fallback
    assert len(caplog.messages) == 1
    assert "no native CPU kernels" in caplog.text
    assert "no C++ compiler" in caplog.text


def test_the_plan_comes_before_the_weights(checkpoint: Path) -> None:
    told: list[object] = []
    load_engine(str(checkpoint), num_blocks=7, on_plan=told.append, progress=told.append)
    plan, *progress = told
    assert isinstance(plan, MemoryPlan)
    assert plan.num_blocks == 7
    assert progress
    assert not any(isinstance(step, MemoryPlan) for step in progress)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"dtype": "int3"}, "dtype"),
        ({"device": "tape"}, "device"),
        ({"block_size": 0}, "block_size"),
        ({"max_model_len": 100000}, "max_model_len"),
        ({"kv_cache_memory_bytes": 10}, "kv_cache_memory_bytes"),
    ],
)
def test_wrong_options_are_named(checkpoint: Path, options: dict[str, object], option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine(str(checkpoint), **options)  # type: ignore[arg-type]
    assert caught.value.metadata["option"] == option


def test_what_is_read_ahead_comes_in_order_whatever_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a single tensor is more than may be read ahead."""
    sharded = make_tiny_model(tmp_path, seed=3, max_shard_size="60KB")
    digest = digest_checkpoint(sharded)
    monkeypatch.setattr("engine.torch.weights._AHEAD_BYTES", 1)
    assert digest_checkpoint(sharded) == digest


def test_no_more_is_read_ahead_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tensors of 4 bytes, a limit of 8: two wait, and the one given back is the third."""
    monkeypatch.setattr("engine.torch.weights._AHEAD_BYTES", 8)
    num_seen = 0

    def stored() -> Iterator[weights.StoredTensor]:
        nonlocal num_seen
        for number in range(10):
            num_seen += 1
            yield weights.StoredTensor(0, Path("a"), str(number), torch.zeros(1))

    read = weights.read_ahead(stored(), lambda *_: lambda _: None, lambda tensor: (tensor, ""))
    most = [num_seen - number for number, _ in enumerate(read)]
    assert max(most) == 3
    assert most[-1] == 1


def test_a_broken_shard_is_named_while_others_are_read_ahead(tmp_path: Path) -> None:
    sharded = make_tiny_model(tmp_path, seed=3, max_shard_size="60KB")
    last = list(find_shards(sharded))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(ModelError, match=rf"{last.name}: not a whole safetensors file"):
        fingerprint(sharded)


def test_for_a_gpu_tensors_are_read_into_page_locked_memory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page-locked copy is digested and passed on."""
    pinned: list[torch.Tensor] = []

    def pin(mapped: torch.Tensor) -> torch.Tensor:
        pinned.append(mapped.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    taken: list[torch.Tensor] = []
    digest = _read_shards(checkpoint, lambda *_: taken.append, None, True)
    assert digest == digest_checkpoint(checkpoint)
    assert {tensor.data_ptr() for tensor in taken} == {tensor.data_ptr() for tensor in pinned}


def test_for_a_cpu_tensors_are_read_as_they_are_mapped(checkpoint: Path) -> None:
    for stored in _stored_tensors(list(find_shards(checkpoint))):
        assert _read(stored.tensor, False)[0] is stored.tensor


def test_a_tensor_that_nobody_wants_is_not_read(checkpoint: Path) -> None:
    read: list[tuple[str, tuple[int, ...]]] = []

    def taker_of(name: str, *_: object) -> Callable[[torch.Tensor], None] | None:
        wanted = name == Q_PROJ
        return (lambda tensor: read.append((name, tuple(tensor.shape)))) if wanted else None

    _read_shards(checkpoint, taker_of, None)
    assert [name for name, _ in read] == [Q_PROJ]


def test_progress_each_second_says_how_fast_weights_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all shards together: two of 4 MiB, the second half read after two seconds."""
    phases: list[str] = []
    now = 10.0
    monkeypatch.setattr(weights, "report_phase", phases.append)
    report = weights._reporter(lambda: now)
    report(ShardProgress("a", 0, 2, 4 << 20, 4 << 20))
    now = 10.5
    report(ShardProgress("b", 1, 2, 1 << 20, 4 << 20))
    now = 12.0
    report(ShardProgress("b", 1, 2, 2 << 20, 4 << 20))
    assert phases == ["loading weights (2 MiB of 4 MiB, file 2 of 2, 3 MiB/s)"]


def test_memory_is_reserved_until_the_engine_is_closed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    plans: list[MemoryPlan] = []
    engine = load_engine(str(checkpoint), on_plan=plans.append)
    (plan,) = plans
    assert plan.is_kv_default
    assert 0 < Reservations.of_user().pending_bytes() <= plan.rank_bytes
    engine.close()
    assert Reservations.of_user().pending_bytes() == 0
