"""A helper process: answers one question at a time, over its standard input and output. Imports the
standard library only, because it is imported at each start of a helper.

Protocol: JSON lines. The first line in configures the helper and holds "answer_timeout_s"; the
first line out is {"ready": true}; then one line out per line in. A long "text" member follows its
line as raw bytes, "num_text_bytes" of them: encoding megabytes as JSON would block the other
requests of the parent. The parent (gateway.intake.child) kills a late process; SIGALRM ends it
after twice its time, in case the parent is gone.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: Characters above which a text follows its line as raw bytes.
_LONG_TEXT_CHARS = 65_536

_TEXT_BYTES = "num_text_bytes"

#: Answers a question; both are the JSON object of one line.
Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]

#: Creates the helper from its first line.
Make = Callable[[Mapping[str, Any]], Answer]


def limit_memory(num_bytes: int) -> None:
    """Limit the address space of this process."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def address_space_bytes() -> int:
    """Current address space of this process."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return num_pages * resource.getpagesize()


def serve(make: Make) -> None:
    """Answer questions from stdin until it closes."""
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # keeps output of libraries out of the protocol
    start = json.loads(questions.readline() or "null")
    if start is None:
        return
    answer_of = make(start)
    answers.writelines(to_parts({"ready": True}))
    answers.flush()
    for line in questions:
        signal.setitimer(signal.ITIMER_REAL, 2 * start["answer_timeout_s"])
        question = json.loads(line)
        if num_bytes := num_text_bytes(question):
            question["text"] = text_of(questions.read(num_bytes))
        parts = to_parts(answer_of(question))
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.writelines(parts)
        answers.flush()


def to_parts(message: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Encode a message: its line, followed by its text if that is long."""
    text = message.get("text")
    if not isinstance(text, str) or len(text) < _LONG_TEXT_CHARS:
        return (json.dumps(message).encode() + b"\n",)
    raw = text.encode(errors="surrogatepass")
    line = json.dumps({**message, "text": "", _TEXT_BYTES: len(raw)})
    return line.encode() + b"\n", raw


def text_of(raw: bytes) -> str:
    """Decode a text that followed a line."""
    return raw.decode(errors="surrogatepass")


def num_text_bytes(message: Mapping[str, Any]) -> int:
    """Number of text bytes after the message's line; 0 if the line is complete."""
    return int(message.get(_TEXT_BYTES, 0))
