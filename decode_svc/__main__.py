"""`python -m decode_svc`: one decode worker."""

from baton.config import DecodeOptions
from baton.service import main
from decode_svc.server import serve_decode

if __name__ == "__main__":
    main(DecodeOptions, serve_decode, "decode")
