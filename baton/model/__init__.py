"""Models as we run them: configuration, weights, memory, and the decoder."""
