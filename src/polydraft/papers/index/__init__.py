"""`polydraft index`: corpora in files, which drafters of the wing read. See `command`."""
