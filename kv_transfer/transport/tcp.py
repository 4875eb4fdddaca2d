"""KV over TCP, with TLS where the worker has certificates."""

from __future__ import annotations

from kv_transfer.ticket import Endpoint
from kv_transfer.transport.base import Dial, Transport, TransportConfig
from kv_transfer.transport.stream import StreamListener
from kv_transfer.transport.tcp_stream import TcpConnection, TcpServerStream, bind, connected
from kv_transfer.transport.tls import listen_tls, tls_dialer


def _listen(config: TransportConfig) -> StreamListener:
    if config.tls:
        return listen_tls(config, config.tls)
    sock, address = bind(config)
    return StreamListener(sock, Endpoint("tcp", address), TcpServerStream)


def _dialer(config: TransportConfig) -> Dial:
    if config.tls:
        return tls_dialer(config, config.tls)

    def dial(address: str, timeout_s: float) -> TcpConnection:
        return TcpConnection(connected(address, timeout_s), config.send_timeout_s)

    return dial


TRANSPORT = Transport(_listen, _dialer)
