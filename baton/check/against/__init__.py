"""`baton check --against URL`: verifies answers and streams of any server of OpenAI's HTTP API."""
