"""How surprising a text is to the model: its perplexity, and its least expected tokens.

python examples/score_prompt.py "for i in range(10):"
"""

import argparse
import math

from baton.client import DEFAULT_ADDRESS, BatonError, Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", default="for i in range(10):\n    print(i)\n")
    parser.add_argument("--address", default=DEFAULT_ADDRESS)
    args = parser.parse_args()
    with Client(args.address) as client:
        done = client.generate(args.text, prompt_logprobs=1, max_tokens=1)
        scored = done.prompt_logprobs
        print(f"perplexity {math.exp(-sum(one.logprob for one in scored) / len(scored)):.2f}")
        for one in sorted(scored, key=lambda one: one.logprob)[:3]:
            (likeliest, _), *_ = one.top
            found, expected = (client.detokenize([i]) for i in (one.token_id, likeliest))
            print(f"{math.exp(one.logprob):8.5f} {found!r}, where {expected!r} was likeliest")


if __name__ == "__main__":
    try:
        main()
    except BatonError as error:
        raise SystemExit(f"error: {error}") from None
