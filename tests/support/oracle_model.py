"""A model's folder for oracle engines: a tokenizer of just as many tokens as they have, and a chat
template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

#: Vocabulary of OracleOptions.
VOCAB_SIZE = 1000

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LETTERS = "etaoinshrdlucmfwygpbvkqxjz .,:{}[]\"'"

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.content == 'bad' %}{{ raise_exception('no bad ones') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% elif is_brief %}<think></think>{% endif %}{% endif %}"
)


def make_oracle_model(folder: Path, chat_template: str = CHAT_TEMPLATE) -> Path:
    """Ids 0..255 are single bytes, those after them pairs of letters, the last three special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(sorted(alphabet, key=lambda c: (not c.isascii(), c)))}
    spelled = ["Ġ" if letter == " " else letter for letter in _LETTERS]
    pairs = [(a, b) for a in spelled for b in spelled]
    merges = pairs[: VOCAB_SIZE - len(vocab) - len(_SPECIAL)]
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(chat_template)
    config = {"max_position_embeddings": 4096, "eos_token_id": VOCAB_SIZE - 3}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": _SPECIAL[0]}))
    return folder
