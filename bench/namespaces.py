"""Hosts made of network namespaces: each with its own address and loopback, on one bridge by veth,
with a rate by tc's tbf; and wires between two hosts, which delay and lose packets.

They need Linux, iproute2, util-linux and root. `run_inside` runs a command in namespaces of its
own, with which everything made here ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_BRIDGE = "hosts"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
#: Bytes of a wire's packets, so that Python forwards fewer of them.
_WIRE_MTU = 9000
#: Packets of one wire that are forwarded before the loop does anything else.
_MAX_BURST = 64


def run_inside(module: str) -> int:
    """Run `python -m module --is-inside`, with this process's arguments after it, in a network and
    a process namespace of its own. Returns its exit status."""
    users = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    inside = ("--net", "--pid", "--fork", "--kill-child", "--mount-proc")
    command = (sys.executable, "-m", module, "--is-inside", *sys.argv[1:])
    return subprocess.run(("unshare", *users, *inside, *command), check=False).returncode


def begin_inside() -> None:
    """Bring up the loopback of the new namespace, and take signals."""
    # The first process of a namespace ignores what it does not handle.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run("ip", "link", "set", "lo", "up")


def run(*command: str) -> None:
    """Run a command of iproute2. Raises CalledProcessError."""
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


class Host:
    """A namespace, while its holding process lives."""

    def __init__(self, name: str, address: str, rate: str) -> None:
        """address: with the length of the prefix. rate: of what it sends over the bridge, as tc
        writes it."""
        self.name = name
        self.address = address.partition("/")[0]
        hold = ("unshare", "--net", "sh", "-c", "echo; exec sleep infinity")
        self._holder = subprocess.Popen(hold, stdout=subprocess.PIPE)
        if self._holder.stdout is None or not self._holder.stdout.readline():
            raise OSError(f"no namespace for host {name}")
        peer = ("peer", "name", "eth0", "netns", str(self._holder.pid))
        run("ip", "link", "add", name, "type", "veth", *peer)
        run("ip", "link", "set", name, "master", _BRIDGE, "up")
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "address", "add", address, "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.limit("eth0", rate)
        self.wires: dict[str, Wire] = {}
        """By the other host's name."""

    def command(self, *command: str) -> tuple[str, ...]:
        """The command, run on this host."""
        return ("nsenter", f"--target={self._holder.pid}", "--net", "--", *command)

    def run(self, *command: str) -> None:
        run(*self.command(*command))

    def limit(self, device: str, rate: str) -> None:
        """Limit what the host sends by a device. rate: empty for no limit."""
        if rate:
            shape = ("root", "tbf", "rate", rate, "burst", "128k", "latency", "200ms")
            self.run("tc", "qdisc", "replace", "dev", device, *shape)
        else:
            self.run("tc", "qdisc", "del", "dev", device, "root")

    def plug(self, *, is_in: bool) -> None:
        """Take the host off the network, or put it back: its packets are lost without a word."""
        run("ip", "link", "set", self.name, "up" if is_in else "down")
        for wire in self.wires.values():
            wire.loss = 0.0 if is_in else 1.0

    def take(self, device: str, other: Host) -> None:
        """Move a device here, and send packets for another host by it."""
        run("ip", "link", "set", device, "netns", str(self._holder.pid))
        self.run("ip", "link", "set", device, "mtu", str(_WIRE_MTU), "up")
        route = (f"{other.address}/32", "dev", device, "src", self.address)
        self.run("ip", "route", "add", *route)

    def pids(self, program: str = "") -> list[int]:
        """Processes of the host with this text in their command lines, without the one that holds
        the namespace."""
        own = os.readlink(f"/proc/{self._holder.pid}/ns/net")
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                is_own = os.readlink(path / "ns" / "net") == own
                if is_own and program in (path / "cmdline").read_bytes().decode():
                    found.append(int(path.name))
        return [pid for pid in found if pid != self._holder.pid]

    def signal(self, signum: signal.Signals, program: str = "") -> None:
        """Signal those processes."""
        for pid in self.pids(program):
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self._holder.kill()
        self._holder.wait()


class Wire:
    """All traffic between two hosts, forwarded by this process's event loop."""

    def __init__(self, name: str, hosts: tuple[Host, Host], fds: tuple[int, int]) -> None:
        """name: of its device on both hosts. fds: of these devices; not blocking, owned from here
        on."""
        self.name = name
        self.delay_s = 0.0
        """Added to each packet."""
        self.loss = 0.0
        """Share of packets that are lost, each by itself."""
        self._hosts, self._fds = hosts, fds
        self._rng = random.Random(name)
        loop = asyncio.get_running_loop()
        for source, target in (fds, fds[::-1]):
            loop.add_reader(source, self._forward, source, target)

    def limit(self, rate: str) -> None:
        """See Host.limit; either way."""
        for host in self._hosts:
            host.limit(self.name, rate)

    def close(self) -> None:
        for fd in self._fds:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def _forward(self, source: int, target: int) -> None:
        for _ in range(_MAX_BURST):
            try:
                packet = os.read(source, 1 << 16)
            except BlockingIOError:
                return
            if self._rng.random() < self.loss:
                continue
            if self.delay_s:
                asyncio.get_running_loop().call_later(self.delay_s, _write, target, packet)
            else:
                _write(target, packet)


def _write(fd: int, packet: bytes) -> None:
    with suppress(OSError):  # the device is down: lost
        os.write(fd, packet)


def wire_between(name: str, one: Host, other: Host) -> Wire:
    """A new wire."""
    wire = Wire(name, (one, other), (_open_tun(name, one, other), _open_tun(name, other, one)))
    one.wires[other.name] = other.wires[one.name] = wire
    return wire


def _open_tun(name: str, host: Host, other: Host) -> int:
    """A device of layer 3, moved to a host. Its packets stay with this process."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    request = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(fd, _TUNSETIFF, request)
    host.take(name, other)
    return fd


def make_bridge(address: str) -> None:
    """The bridge of all hosts, at which this process has an address, too."""
    run("ip", "link", "add", _BRIDGE, "type", "bridge")
    run("ip", "address", "add", address, "dev", _BRIDGE)
    run("ip", "link", "set", _BRIDGE, "up")
