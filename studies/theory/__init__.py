"""Formulas that only studies use."""
