"""Ask one question by the model's own chat template. The model needs one.

python examples/chat.py "Write a function that reverses a list."
"""

import argparse

from baton.client import DEFAULT_ADDRESS, BatonError, ChatMessage, Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="Write a function that reverses a list.")
    parser.add_argument("--address", default=DEFAULT_ADDRESS)
    args = parser.parse_args()
    conversation = [ChatMessage("user", args.prompt)]
    with Client(args.address) as client:
        num_tokens = len(client.tokenize(conversation).token_ids)
        print(f"-- {num_tokens} tokens with the template")
        answer = client.generate(conversation, max_tokens=128, temperature=0)
        print(answer.text)
        print(f"-- {answer.finish_reason.name.lower()}, {answer.usage.completion_tokens} tokens")


if __name__ == "__main__":
    try:
        main()
    except BatonError as error:
        raise SystemExit(f"error: {error}") from None
