"""Client channels: one set of options, for which baton.rpc.server grants the matching
permissions."""

from __future__ import annotations

from typing import TypeAlias

import grpc
import grpc.aio

from baton.rpc.tls import TlsFiles, client_credentials

Options: TypeAlias = tuple[tuple[str, int | str], ...]

MAX_MESSAGE_BYTES = 8 * 2**20
"""Largest message in either direction: a prompt of a million token ids, or the text of as many,
with room to spare. A text is made of its bytes in one go, which holds up all other streams: 60 ms
for 16 MiB beyond ASCII."""

MAX_CONCURRENT_STREAMS = 100
"""Calls of one connection that a server answers at once. With 256 and more, a client that opens
streams and resets them without end has the server of grpc 1.85 cancel the calls of others
(tests/security/test_rapid_reset.py)."""

KEEPALIVE_MS = 2000
"""A peer that is silent, asked, and silent again for this long each time is lost: at most 4 s in
all."""

CLIENT_KEEPALIVE_MS = 5000
"""In its place towards gateways: one that stands still for some seconds, for its machine is busy or
is being moved, loses no stream by it, and there is no other copy of it to go on with."""


def common_options(keepalive_ms: int = KEEPALIVE_MS) -> Options:
    """What both ends have. keepalive_ms: in place of KEEPALIVE_MS."""
    return (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        # Without it a frozen peer is noticed after a minute only, whatever the two above say.
        ("grpc.http2.ping_timeout_ms", keepalive_ms),
        ("grpc.http2.max_pings_without_data", 0),
    )


_CHANNEL_OPTIONS: Options = (
    # Workers and gateways are named by address: a proxy of the environment is none of theirs.
    ("grpc.enable_http_proxy", 0),
    # Its own connection: one channel's back-off never delays another's.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # How long one attempt to connect may take, too: a frozen peer's kernel still accepts
    # connections.
    ("grpc.min_reconnect_backoff_ms", 4000),
    # A call fails at once and is retried by its caller, who knows what was already received.
    ("grpc.enable_retries", 0),
)


def aio_channel(
    address: str,
    tls: TlsFiles | None = None,
    *,
    receive_window_bytes: int | None = None,
    keepalive_ms: int = KEEPALIVE_MS,
) -> grpc.aio.Channel:
    """A channel to "host:port" for the running event loop; connects when first used. Close it.

    tls: None for plain text. Its files are read now: raises ConfigError.
    receive_window_bytes: how far the peer's side of a stream may be ahead of who reads it here; a
    message may be larger. If not given, gRPC chooses: 64 KiB at first, and as much as the
    connection carries in a round trip later.
    keepalive_ms: see common_options.
    """
    options = channel_options(tls, keepalive_ms)
    if receive_window_bytes is not None:
        window = (
            ("grpc.http2.lookahead_bytes", receive_window_bytes),
            # It would widen the window again.
            ("grpc.http2.bdp_probe", 0),
        )
        options = (*options, *window)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, client_credentials(tls), options=options)


def sync_channel(
    address: str, tls: TlsFiles | None = None, *, keepalive_ms: int = KEEPALIVE_MS
) -> grpc.Channel:
    """As aio_channel, for any thread."""
    options = channel_options(tls, keepalive_ms)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, client_credentials(tls), options=options)


def channel_options(tls: TlsFiles | None = None, keepalive_ms: int = KEEPALIVE_MS) -> Options:
    """Of a channel."""
    options = (*common_options(keepalive_ms), *_CHANNEL_OPTIONS)
    if tls is None or not tls.server_name:
        return options
    return (*options, ("grpc.ssl_target_name_override", tls.server_name))
