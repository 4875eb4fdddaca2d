"""Form of service addresses."""

from __future__ import annotations


def is_address(text: str) -> bool:
    """Whether `text` is exactly host:port, with a port in 1..65535; an IPv6 host is in []."""
    host, colon, port = text.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536
    is_plain = host.isprintable() and not any(c.isspace() or c in "/,@" for c in host)
    is_host = host.startswith("[") and host.endswith("]") if ":" in host else bool(host)
    return bool(colon) and is_port and is_plain and is_host
