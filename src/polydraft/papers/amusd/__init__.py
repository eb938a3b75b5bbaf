"""Drafting while the target verifies (arXiv 2410.17375): docs/papers/amusd.md."""
