"""Drafting while verifying: AMUSD, a draft worker that runs ahead of the target's passes."""
