"""ADED: a table of token pairs, searched as a game tree. See `drafter`."""
