"""Ouroboros (arXiv 2402.13720): phrases of the text and of a draft model, one behind another."""
