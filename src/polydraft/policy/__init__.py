"""How much to draft: seconds, acceptance, and one marginal rule."""
