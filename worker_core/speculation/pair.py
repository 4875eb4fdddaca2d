"""Whether a draft model's tokens are the target's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baton.engine.interface import EngineSpec
from baton.errors import ConfigError


def check_specs(target: EngineSpec, draft: EngineSpec) -> None:
    """Raises ConfigError unless each draft is a token id of the target."""
    if draft.vocab_size != target.vocab_size:
        raise _mismatch(
            draft.model,
            f"its vocabulary has {draft.vocab_size} tokens, that of {target.model} has "
            f"{target.vocab_size}",
        )


def check_tokenizers(target: Path, draft: Path) -> None:
    """Raises ConfigError unless both folders' tokenizers give every token the same id. One without
    a file is trusted."""
    ours, theirs = target / "tokenizer.json", draft / "tokenizer.json"
    if not (ours.is_file() and theirs.is_file()):
        return
    if _vocabulary(ours) != _vocabulary(theirs):
        raise _mismatch(str(draft), f"its tokenizer differs from that of {target}")


def _vocabulary(path: Path) -> tuple[Any, Any]:
    """Tokens with their ids, and the added ones."""
    content = json.loads(path.read_text(encoding="utf-8"))
    added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    return content["model"].get("vocab"), added


def _mismatch(draft: str, reason: str) -> ConfigError:
    return ConfigError.of(
        "speculative_model", draft, f"{reason}; give a model with the same tokenizer"
    )
