"""Ranks that follow as threads of this process: engines of several ranks without the seconds that
processes take to start."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace

from engine.follower import follow
from engine.ranks.link import Link
from engine.ranks.rank_spec import RankSpec
from engine.ranks.team import RankProcess


def start_thread(spec: RankSpec) -> RankProcess:
    """See engine.ranks.team.start_process."""
    ours, theirs = socket.socketpair()
    our_link, its_link = socket.socketpair()
    closed = threading.Event()
    link = Link(its_link, spec.name, on_closed=closed.set, on_silent=lambda _: closed.set())
    kv_fd, meeting_fd = (fd if fd < 0 else os.dup(fd) for fd in (spec.kv_fd, spec.meeting_fd))
    own = replace(spec, kv_fd=kv_fd, meeting_fd=meeting_fd)

    def run() -> None:
        with theirs:
            try:
                follow(theirs, link)
            finally:
                for fd in own.fds:
                    os.close(fd)

    thread = threading.Thread(target=run, name=f"rank-{spec.rank}", daemon=True)
    thread.start()
    ours.sendall(own.to_line())

    def ending() -> str:
        thread.join()
        link.close()
        return "ended"

    return RankProcess(thread.name, ours, our_link, ending, lambda: None)
