"""`python -m gateway`: the front door."""

from baton.config import GatewayOptions
from baton.service import main
from gateway.server import serve_gateway

if __name__ == "__main__":
    main(GatewayOptions, serve_gateway, "gateway")
