"""Block diffusion in several forward passes, by an order: one pass was faster. See `drafter`."""
