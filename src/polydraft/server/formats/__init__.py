"""Formats of answers: how a model writes calls of tools and what it thinks, as one value; its parser, its grammar, and how it is derived from a template."""
