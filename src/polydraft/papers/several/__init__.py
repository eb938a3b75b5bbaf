"""A path from each of several draft models: it did not pay on our pages. See `drafter`."""
