"""What runs in a helper process: answers question by question, within limits of memory and time.

JSON lines. First in: what the helper is made with, and "answer_timeout_s"; first out: {"ready":
true}. Then one line out for each line in. An answer that takes twice its time ends the process
(SIGALRM), should nobody be left to kill it.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer

    def write(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    start = json.loads(sys.stdin.readline() or "null")
    if start is None:
        return
    answer_of = make(start)
    write({"ready": True})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, 2 * start["answer_timeout_s"])
        answer = answer_of(json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        write(answer)
