"""How much to draft: sizes, acceptance, costs, and the search for most tokens per second."""
