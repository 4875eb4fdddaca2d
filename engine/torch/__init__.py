"""Our own decoders over torch: parameters, steps, forward."""
