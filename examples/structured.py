"""Make a model answer in a given form: by a JSON Schema, a regular expression, and a list of
choices.

python examples/structured.py
"""

import argparse
import json

from baton.client import DEFAULT_ADDRESS, BatonError, Client, StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z_]{1,12}$"},
        "num_arguments": {"type": "integer", "minimum": 0, "maximum": 9},
        "is_async": {"type": "boolean"},
    },
    "required": ["name", "num_arguments", "is_async"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="def read_lines(path, limit):\n")
    parser.add_argument("--address", default=DEFAULT_ADDRESS)
    args = parser.parse_args()
    with Client(args.address) as client:
        by_schema = client.generate(
            args.prompt,
            structured_output=StructuredOutput(json_schema=SCHEMA),
            n=2,
            seed=1,
            max_tokens=200,
        )
        for choice in by_schema.choices:
            function = json.loads(choice.text)
            print(f"-- {function['name']} takes {function['num_arguments']} arguments")
        by_regex = client.generate(
            args.prompt,
            structured_output=StructuredOutput(regex="[a-z]{2,8}\\.[a-z]{2,8}\\(\\)"),
            temperature=0,
        )
        print(f"-- {by_regex.text}")
        by_choice = client.generate(
            args.prompt,
            structured_output=StructuredOutput(choice=["good", "bad", "unclear"]),
            temperature=0,
        )
        print(f"-- {by_choice.text}")


if __name__ == "__main__":
    try:
        main()
    except BatonError as error:
        raise SystemExit(f"error: {error}") from None
