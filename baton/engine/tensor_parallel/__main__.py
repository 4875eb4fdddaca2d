"""The process of a rank that follows: `python -m baton.engine.tensor_parallel FD`, FD being a socket to rank 0.

First comes a line, see RankSpec; when the rank has loaded, it answers with a line, {"digest": ...}; then come commands. The
process ends with the socket, whatever it is doing.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading

import torch

from baton.engine.tensor_parallel.commands import read_commands
from baton.engine.tensor_parallel.rank import Rank
from baton.engine.tensor_parallel.rank_spec import RankSpec


def main() -> None:
    # Whoever ends the worker ends rank 0, which first lets its sequences end.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(control,), name="leader-watch", daemon=True).start()
    with control.makefile("rb") as stream:
        rank = Rank(RankSpec.from_line(stream.readline()))
        control.sendall(json.dumps({"digest": rank.digest}).encode() + b"\n")
        with torch.inference_mode():
            for command in read_commands(stream):
                rank.follow(command)


def _end_with(control: socket.socket) -> None:
    """Rank 0 may go while this one waits for it in shared memory, where nobody would tell."""
    poll = select.poll()
    poll.register(control, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
