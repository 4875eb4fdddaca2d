"""The prefill tier: prompts in, KV and first tokens out."""
