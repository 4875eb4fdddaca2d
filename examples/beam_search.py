"""Complete a prompt by beam search, beside what greedy decoding gives.

python examples/beam_search.py --width 4 "class Stack:"
"""

import argparse

from baton.client import DEFAULT_ADDRESS, BatonError, BeamSearch, Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="class Stack:\n")
    parser.add_argument("--address", default=DEFAULT_ADDRESS)
    parser.add_argument("--width", type=int, default=4)
    args = parser.parse_args()
    search = BeamSearch(args.width)
    with Client(args.address) as client:
        greedy = client.generate(args.prompt, max_tokens=24, temperature=0, logprobs=0)
        logprobs = [position.logprob for position in greedy.choices[0].logprobs]
        found = client.generate(args.prompt, max_tokens=24, beam_search=search, n=args.width)
    print(f"greedy, score {sum(logprobs) / len(logprobs):.4f}: {greedy.text!r}")
    for choice in found.choices:
        print(f"beam {choice.index}, score {choice.score:.4f}: {choice.text!r}")


if __name__ == "__main__":
    try:
        main()
    except BatonError as error:
        raise SystemExit(f"error: {error}") from None
