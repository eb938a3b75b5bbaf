"""Heads: small networks trained on the target's own states."""
