"""Tools, calls and thoughts in the formats of others' chat templates, read back."""
