"""Optima of acceptance, expected tokens and speeds, in formulas."""
