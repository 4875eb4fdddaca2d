"""A GGUF file as a checkpoint's folder: config.json, tokenizer.json, chat template, and a link to
the file, which has the weights.

Everything that reads a checkpoint's folder reads such a one, too; its weights are read by
engine.torch.gguf_tensors. The folder lies in the user's cache, and is made once for each file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from baton.errors import ModelError
from baton.gguf.architectures import architecture_of, config_fields, tensor_name
from baton.gguf.reader import GgufFile, read_gguf

#: Of what is written; folders of other versions are not used.
_VERSION = 1
SUFFIX = ".gguf"
LINK = f"model{SUFFIX}"


def gguf_folder(model: str, revision: str | None = None, *, is_local: bool = False) -> Path | None:
    """Folder of a model that is a GGUF file, or one of a Hub repository, as in
    `owner/name/file.gguf` or `owner/name:file.gguf`; None for other models. is_local: download
    nothing. Raises ModelError."""
    if not model.endswith(SUFFIX):
        return None
    path = Path(model).expanduser()
    if not path.is_file():
        path = _hub_file(model, revision, is_local=is_local)
    return unfold(path)


def _hub_file(model: str, revision: str | None, *, is_local: bool) -> Path:
    repository, has_colon, name = model.partition(":")
    if not has_colon:
        owner, _, rest = model.partition("/")
        repository, name = f"{owner}/{rest.partition('/')[0]}", rest.partition("/")[2]
    if model.startswith((".", "/", "~")) or not name:
        raise ModelError(
            f"{model}: no such file; give a GGUF file, or owner/name/FILE.gguf of the Hub"
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(hf_hub_download(repository, name, revision=revision, local_files_only=is_local))
    except (OSError, HFValidationError) as error:
        raise ModelError(
            f"{model}: neither a file here nor one that the hub gives: {error}; check the "
            "spelling, the network and, for a gated model, HF_TOKEN"
        ) from error


def unfold(path: Path) -> Path:
    """The folder of a GGUF file. Raises ModelError."""
    path = path.resolve()
    found = path.stat()
    key = f"{_VERSION} {path} {found.st_size} {found.st_mtime_ns}"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "gguf"
    folder = base / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    file = read_gguf(path)
    try:
        base.mkdir(parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(prefix=".unfolding-", dir=base))
        try:
            _write(file, own)
            own.rename(folder)
        except OSError:
            # Another process was first.
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(own, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"{path}: its config cannot be written below {base} ({error}); set XDG_CACHE_HOME to a "
            "folder that can be written"
        ) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path}: its metadata describe no model ({error!r}); fetch it again"
        ) from error
    return folder


def _write(file: GgufFile, folder: Path) -> None:
    # Imported here, because only gateways and workers need tokenizers.
    from baton.gguf.vocabulary import end_tokens, make_tokenizer, tokenizer_config

    config = config_fields(file) | _weight_fields(file)
    if ends := end_tokens(file):
        config["eos_token_id"] = ends
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = make_tokenizer(file)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(file)))
    if template := file.metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / LINK).symlink_to(file.path)


def _weight_fields(file: GgufFile) -> dict[str, Any]:
    """Types of weights. An output layer that shares quantised weights with the embeddings is
    declared as one of its own, because embeddings are dequantised."""
    architecture, layers = architecture_of(file), dict[str, str]()
    plain = set[str]()
    for info in file.tensors.values():
        try:
            name = tensor_name(architecture, info.name)
        except KeyError:
            raise ModelError(
                f"{file.path}: tensor {info.name!r} has no place in a {architecture.model_type} "
                "model; use the model's safetensors"
            ) from None
        if name is None:
            continue
        if info.type.is_quantized:
            layers[name.removesuffix(".weight")] = info.type.name
        elif len(info.shape) > 1:
            plain.add(info.type.name)
    embedding = layers.get("model.embed_tokens")
    has_head = "output.weight" in file.tensors
    if embedding and not has_head:
        layers["lm_head"] = embedding
    of_plain = {"F32": "float32", "F16": "float16"}
    dtype = of_plain.get(plain.pop(), "bfloat16") if len(plain) == 1 and not layers else "bfloat16"
    fields: dict[str, Any] = {
        "tie_word_embeddings": not has_head and not embedding,
        "dtype": dtype,
    }
    if layers:
        fields["quantization_config"] = {"quant_method": "gguf", "layers": layers}
    return fields
