"""Tiers of KV below the device: records of full prefix blocks, the places that keep them, and the
threads that move them. A kind of tier is one file behind engine.kv.tiers.interface.Tier."""
