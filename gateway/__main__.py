"""`python -m gateway`: runs the gateway."""

from baton.config import GatewayOptions
from baton.service import main
from gateway.server import serve_gateway

if __name__ == "__main__":
    main(GatewayOptions, serve_gateway, "gateway")
