"""The decode tier: continuous batching over sequences that prefill workers hand over."""
