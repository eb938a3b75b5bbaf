"""Lookahead decoding (arXiv 2402.02057): phrases that the target itself guessed, from a window of extra rows."""
