"""Decoding methods beyond sampling parameters on the target's logits; each is a `core.Decoding`, built by name from `registry.DECODINGS`."""
