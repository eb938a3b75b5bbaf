"""Mask queries: the network in torch with what is stored, its training, and the drafter."""
