"""Send the same prompt many times at once, with different seeds; the tiers batch the answers.

python examples/many_at_once.py "def "
"""

import argparse
import asyncio

from baton.client import DEFAULT_ADDRESS, AsyncClient, BatonError


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="def ")
    parser.add_argument("--address", default=DEFAULT_ADDRESS)
    args = parser.parse_args()
    # The gateway may be full for a moment: try again when it says so.
    async with AsyncClient(args.address, max_retries=5) as client:
        answers = await asyncio.gather(
            *(client.generate(args.prompt, max_tokens=24, seed=seed) for seed in range(16))
        )
    for seed, answer in enumerate(answers):
        print(f"{seed:3}  {answer.timing.total_ms:6.0f} ms  {args.prompt + answer.text!r}")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except BatonError as error:
        raise SystemExit(f"error: {error}") from None
