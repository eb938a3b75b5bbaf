"""Samplers of others, called or re-stated for `polydraft.conformance`: a file a project."""
