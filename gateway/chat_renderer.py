"""A process that renders chat templates, so that one which does not end can be killed: python -m gateway.chat_renderer

JSON lines. First in: {"template": str, "special_tokens": {name: text}, "render_timeout_s": float}; first out: {"ready": true}.
Then for each line in, {"messages": [{"role": str, "content": str}]}, one line out: {"text": str} or {"error": str}.
A render that takes twice its time ends the process (SIGALRM), should nobody be left to kill it.
Uses transformers' own rendering (a sandboxed jinja environment with its extensions), without torch.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

#: Memory that a template may make the process take, in bytes.
_MAX_MEMORY_BYTES = 4 * 2**30

_Render = Callable[[Sequence[Mapping[str, str]]], str]


def _make_render(template: str, special_tokens: Mapping[str, str]) -> _Render:
    # transformers imports torch wherever it finds it; a template needs none.
    sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers.utils import chat_template_utils

    # Its annotations tell less than it does: it gives a pair, and takes what a template may use by keyword.
    render_template: Callable[..., Any] = chat_template_utils.render_jinja_template

    def render(messages: Sequence[Mapping[str, str]]) -> str:
        rendered, _ = render_template(
            conversations=[[dict(message) for message in messages]],
            chat_template=template,
            add_generation_prompt=True,
            **special_tokens,
        )
        return str(rendered[0])

    return render


def _answer(render: _Render, messages: Sequence[Mapping[str, str]]) -> dict[str, str]:
    try:
        return {"text": render(messages)}
    except Exception as error:  # noqa: BLE001 - whatever a template raises is the answer
        return {"error": f"{type(error).__name__}: {error}"}


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer line by line until the requests end."""

    def write(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    start = json.loads(requests.readline() or "null")
    if start is None:
        return
    render = _make_render(start["template"], start["special_tokens"])
    write({"ready": True})
    for line in requests:
        signal.setitimer(signal.ITIMER_REAL, 2 * start["render_timeout_s"])
        answer = _answer(render, json.loads(line)["messages"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        write(answer)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
