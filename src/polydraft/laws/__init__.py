"""Laws beyond sampling parameters on the target's logits; each is a `core.Law`, built by name from `registry.LAWS`."""
