"""REST: continuations from a corpus. See `drafter`."""
