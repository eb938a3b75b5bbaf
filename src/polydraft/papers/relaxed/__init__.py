"""Verifiers that accept more than they may: typical acceptance and the tolerance of SpecDec: docs/papers/relaxed.md."""
