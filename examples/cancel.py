"""Stop reading in the middle: leaving the with-block cancels the request on both tiers.

python examples/cancel.py "import os"
"""

import argparse

from baton.client import DEFAULT_ADDRESS, BatonError, Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="import os\n")
    parser.add_argument("--address", default=DEFAULT_ADDRESS)
    args = parser.parse_args()
    with Client(args.address) as client:
        with client.stream(args.prompt, max_tokens=512, ignore_eos=True) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
                if chunk.token_index >= 10:
                    break
        print(f"\n-- cancelled request {stream.request_id} after {chunk.token_index + 1} tokens")


if __name__ == "__main__":
    try:
        main()
    except BatonError as error:
        raise SystemExit(f"error: {error}") from None
