"""Several answers to one prompt, as they come; then the most probable one of as many.

python examples/several_choices.py --n 3 "class Stack:"
"""

import argparse

from baton.client import DEFAULT_ADDRESS, BatonError, Client, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="def fibonacci(n):\n")
    parser.add_argument("--address", default=DEFAULT_ADDRESS)
    parser.add_argument("--n", type=int, default=3)
    args = parser.parse_args()
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=7)
    texts = [""] * args.n
    with Client(args.address) as client:
        with client.stream(args.prompt, params, n=args.n) as stream:
            for chunk in stream:
                texts[chunk.choice] += chunk.text
                if chunk.usage:
                    print(
                        f"-- {chunk.usage.prompt_tokens} tokens of prompt read once, "
                        f"{chunk.usage.completion_tokens} written, "
                        f"{chunk.usage.accepted_tokens} of {chunk.usage.draft_tokens} drafts right"
                    )
        for index, text in enumerate(texts):
            print(f"choice {index}: {text!r}")
        best = client.generate(args.prompt, params, best_of=args.n)
        print(f"best, {best.choices[0].score:.3f} a token: {best.text!r}")


if __name__ == "__main__":
    try:
        main()
    except BatonError as error:
        raise SystemExit(f"error: {error}") from None
