"""`python -m prefill_svc`: one prefill worker."""

from baton.config import PrefillOptions
from baton.service import main
from prefill_svc.server import serve_prefill

if __name__ == "__main__":
    main(PrefillOptions, serve_prefill, "prefill")
