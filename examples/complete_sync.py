"""Complete a prompt and print the text as it comes, then what it took.

python examples/complete_sync.py "def fibonacci(n):"
"""

import argparse

from baton.client import DEFAULT_ADDRESS, BatonError, Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="def fibonacci(n):\n")
    parser.add_argument("--address", default=DEFAULT_ADDRESS)
    args = parser.parse_args()
    with (
        Client(args.address) as client,
        client.stream(args.prompt, max_tokens=64, temperature=0) as stream,
    ):
        print(args.prompt, end="")
        for chunk in stream:
            print(chunk.text, end="", flush=True)
            if chunk.usage and chunk.timing:
                print(f"\n-- {chunk.usage.completion_tokens} tokens", end="")
                print(f" in {chunk.timing.total_ms:.0f} ms", end="")
                print(f", the first after {chunk.timing.time_to_first_token_ms:.0f} ms")


if __name__ == "__main__":
    try:
        main()
    except BatonError as error:
        raise SystemExit(f"error: {error}") from None
