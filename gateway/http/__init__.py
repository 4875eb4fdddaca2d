"""The HTTP door: OpenAI's API over the same requests as gRPC's."""
