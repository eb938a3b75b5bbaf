"""Several drafters in one tree, chosen by how often each was right. See `drafter` and `credit`."""
