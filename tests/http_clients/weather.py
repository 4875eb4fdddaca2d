"""The tool that the conversations offer, for scripts that run in environments of their own: they
find it beside them."""

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS},
}
