"""Complete a prompt with asyncio, and print the text as it comes.

python examples/complete_async.py "class Stack:"
"""

import argparse
import asyncio

from baton.client import DEFAULT_ADDRESS, AsyncClient, BatonError


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="class Stack:\n")
    parser.add_argument("--address", default=DEFAULT_ADDRESS)
    args = parser.parse_args()
    async with (
        AsyncClient(args.address) as client,
        client.stream(args.prompt, max_tokens=64, temperature=0) as stream,
    ):
        print(args.prompt, end="")
        async for chunk in stream:
            print(chunk.text, end="", flush=True)
        print(f"\n-- request {stream.request_id}")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except BatonError as error:
        raise SystemExit(f"error: {error}") from None
