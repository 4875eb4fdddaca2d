"""The folder of a scripted model for vLLM's tests: the bundled model's tokenizer with marks of chat
models and common words, and a chat template with tools and thoughts."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

BUNDLED = Path(__file__).parents[3] / "models" / "baton-py-6m" / "tokenizer.json"

#: As large as the ids that vLLM's tests name.
VOCAB_SIZE = 8192
END = "<|im_end|>"
#: Tokens of their own, as in the tokenizers of chat models; not special there.
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_WORDS = ("Hello", " my", " name", " is", " Hello", " robot", " This", " test", " prompt")
#: Of a prompt of a thousand words that is to have as many tokens.
_LONG_WORDS = ("Cache", " Cache", " coverage", " sentinel")

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if not (tools and loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and m.role == 'assistant' %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def make_model(folder: Path, template: str = TEMPLATE) -> Path:
    """Write the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    written = json.loads(BUNDLED.read_text())
    written["added_tokens"][0]["special"] = False  # as in GPT-2's, where tests take it for a word
    tokenizer = Tokenizer.from_str(json.dumps(written))
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    words = (*_MARKS, *_WORDS, *_LONG_WORDS)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in words])
    rest = VOCAB_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<|word {i}|>", normalized=False) for i in range(rest)])
    tokenizer.save(str(folder / "tokenizer.json"))
    end_id = tokenizer.token_to_id(END)
    config = {"max_position_embeddings": 40960, "eos_token_id": end_id, "vocab_size": VOCAB_SIZE}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    (folder / "chat_template.jinja").write_text(template)
    names = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder
