"""What runs in a helper process: answers question by question, within limits of memory and time.

JSON lines. First in: what the helper is made with, and "answer_timeout_s"; first out: {"ready":
true}. Then one line out for each line in. A long "text" of a question or an answer follows its line
as it is, with its length there as "num_text_bytes": who asks serves other requests meanwhile, and
to write megabytes as JSON holds the interpreter. An answer that takes twice its time ends the
process (SIGALRM), should nobody be left to kill it.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: Characters of text from which on it follows its line.
_LONG_TEXT_CHARS = 65_536

_TEXT_BYTES = "num_text_bytes"

#: A question to its answer; both are the objects of one line.
Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]

#: Makes the helper from its first line.
Make = Callable[[Mapping[str, Any]], Answer]


def limit_memory(num_bytes: int) -> None:
    """Let the process have at most this much address space."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def address_space_bytes() -> int:
    """The address space that the process has now."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return num_pages * resource.getpagesize()


def serve(make: Make) -> None:
    """Answer what comes on stdin until it ends."""
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints is no answer
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
    """A question or an answer as it travels, one part after the other: its line, and its text if
    that is long."""
    text = message.get("text")
    if not isinstance(text, str) or len(text) < _LONG_TEXT_CHARS:
        return (json.dumps(message).encode() + b"\n",)
    raw = text.encode(errors="surrogatepass")
    line = json.dumps({**message, "text": "", _TEXT_BYTES: len(raw)})
    return line.encode() + b"\n", raw


def text_of(raw: bytes) -> str:
    """The text that followed a line."""
    return raw.decode(errors="surrogatepass")


def num_text_bytes(message: Mapping[str, Any]) -> int:
    """Bytes that follow a message's line, and are its text; 0 if its line has all of it."""
    return int(message.get(_TEXT_BYTES, 0))
