"""Faces inside other libraries."""
