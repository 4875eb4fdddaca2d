"""A process that renders chat templates, so that one which does not end can be killed: python -m gateway.chat_renderer

It is made with {"template": str, "special_tokens": {name: text}}, and answers {"messages": [{"role": str, "content": str}]}
with {"text": str} or {"error": str}. See gateway.child_main.
Uses transformers' own rendering (a sandboxed jinja environment with its extensions), without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from gateway.child_main import Answer, limit_memory, serve

#: Memory that a template may make the process take, in bytes.
_MAX_MEMORY_BYTES = 4 * 2**30


def make_answer(start: Mapping[str, Any]) -> Answer:
    """See the module's text."""
    # transformers imports torch wherever it finds it; a template needs none.
    sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers.utils import chat_template_utils

    # Its annotations tell less than it does: it gives a pair, and takes what a template may use by keyword.
    render_template: Callable[..., Any] = chat_template_utils.render_jinja_template

    def answer(question: Mapping[str, Any]) -> Mapping[str, str]:
        try:
            rendered, _ = render_template(
                conversations=[[dict(message) for message in question["messages"]]],
                chat_template=start["template"],
                add_generation_prompt=True,
                **start["special_tokens"],
            )
            return {"text": str(rendered[0])}
        except Exception as error:  # noqa: BLE001 - whatever a template raises is the answer
            return {"error": f"{type(error).__name__}: {error}"}

    return answer


if __name__ == "__main__":
    limit_memory(_MAX_MEMORY_BYTES)
    serve(make_answer)
