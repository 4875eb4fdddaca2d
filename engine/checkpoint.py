"""Locates a checkpoint's files and checks that Baton can read them. Imports no torch, so a broken
checkpoint is reported before a process spends seconds on imports.

`python -m engine.checkpoint MODEL` checks one, and prints an error as a JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from baton.errors import MissingTensor, ModelError, UnsafeCheckpoint
from baton.gguf.folder import LINK, gguf_folder
from engine.families.overrides import NO_OVERRIDES, ConfigOverrides
from engine.families.read import choose_implementation, read_config

#: Files to download from the hub: safetensors, and the configuration of model and tokenizer.
ALLOW_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """Files of one or several draft heads. method: "eagle", "medusa" or "mtp"; for mtp, folder is
    the model's."""

    method: str
    folder: Path


def resolve_checkpoint(model: str, revision: str | None = None) -> Path:
    """Folder of a checkpoint: `model` itself, a snapshot of the hub id, or that of a GGUF file.
    Raises ModelError, UnsafeCheckpoint."""
    if unfolded := gguf_folder(model, revision):
        return unfolded
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    # A hub id is a name, or two names with a slash between.
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model:
        raise ModelError(
            f"{model}: no such folder; give the folder of a transformers checkpoint, a GGUF file, "
            "or a Hub id"
        )
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    patterns = list(ALLOW_PATTERNS)
    try:
        found = Path(
            huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=patterns)
        )
        names: list[str] = []
        if not any(found.glob("*.safetensors")):
            names = huggingface_hub.list_repo_files(model, revision=revision)
    except (OSError, HFValidationError) as error:
        raise ModelError(
            f"{model}: neither a folder here nor a checkpoint that the hub gives: {error}; "
            "check the spelling, the network and, for a gated model, HF_TOKEN"
        ) from error
    _refuse_pickles(model, [name for name in names if any(fnmatch(name, p) for p in _PICKLES)])
    return found


def local_folder(model: str) -> Path | None:
    """Folder of a model that is on this machine, a Hub id, a folder or a GGUF file; else None.
    Downloads nothing. Raises ModelError for a GGUF file that cannot be read."""
    try:
        if unfolded := gguf_folder(model, is_local=True):
            return unfolded
    except ModelError:
        if Path(model).expanduser().is_file():
            raise
        return None
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(huggingface_hub.snapshot_download(model, local_files_only=True))
    except (OSError, HFValidationError):
        return None


def check_checkpoint(
    model: str,
    revision: str | None = None,
    model_impl: str = "auto",
    overrides: ConfigOverrides = NO_OVERRIDES,
) -> Path:
    """Folder of a checkpoint, after a check that its files exist in readable formats. Reads no
    weights. model_impl: see choose_implementation.

    Raises ModelError and its subclasses.
    """
    folder = resolve_checkpoint(model, revision)
    if (folder / "config.json").is_file():
        find_shards(folder)
    if choose_implementation(folder, model_impl, overrides).name == "baton":
        read_config(folder, overrides)
    return folder


def _refuse_pickles(where: str, pickles: Sequence[str]) -> None:
    if pickles:
        raise UnsafeCheckpoint(
            f"{where}: weights as pickles only ({', '.join(pickles[:3])}), which run code when "
            "read; save the model with transformers' save_pretrained, which writes safetensors"
        )


def find_shards(folder: Path) -> dict[Path, frozenset[str] | None]:
    """Shards of a checkpoint, each with its tensors according to the index (None without an index);
    the GGUF file of a folder that was made of one.

    Raises UnsafeCheckpoint, MissingTensor, ModelError.
    """
    if (folder / LINK).is_file():
        return {folder / LINK: None}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_shards(folder, index)
    single = folder / "model.safetensors"
    shards = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if shards:
        return dict.fromkeys(shards)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    _refuse_pickles(str(folder), pickles)
    raise MissingTensor(f"{folder}: no *.safetensors; give a whole transformers checkpoint")


def _indexed_shards(folder: Path, index: Path) -> dict[Path, frozenset[str] | None]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names: dict[Path, set[str]] = {}
        for tensor, shard in weight_map.items():
            names.setdefault(folder / Path(shard).name, set()).add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: cannot be read as an index of shards: {error!r}") from error
    missing = sorted(path.name for path in names if not path.is_file())
    if missing:
        raise MissingTensor(f"{folder}: the index names shards that are not here: {missing}")
    return {path: frozenset(names[path]) for path in sorted(names)}


@contextmanager
def naming_model(model: str) -> Iterator[None]:
    """Prefix errors of the checkpoint with the option that chose it."""
    try:
        yield
    except ModelError as error:
        reason = error.message.removeprefix(f"{model}: ")
        raise type(error)(f"MODEL={model}: {reason}", **error.metadata) from error


def main() -> int:
    """Return 0 if the checkpoint can be served; else 1, with the ModelError on stdout."""
    parser = argparse.ArgumentParser(prog="engine.checkpoint")
    parser.add_argument("model")
    parser.add_argument("--revision")
    parser.add_argument("--model-impl", default="auto")
    parser.add_argument("--hf-overrides")
    parser.add_argument("--rope-scaling")
    given = parser.parse_args()
    try:
        with naming_model(given.model):
            overrides = ConfigOverrides.parse(given.hf_overrides, given.rope_scaling)
            check_checkpoint(given.model, given.revision, given.model_impl, overrides)
    except ModelError as error:
        sys.stdout.write(json.dumps({"message": error.message, "metadata": error.metadata}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
