"""Measure, compare with peers."""
