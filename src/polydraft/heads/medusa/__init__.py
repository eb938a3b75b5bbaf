"""Medusa: what is stored, the network in torch, its training, its compiled form, and the drafter."""
