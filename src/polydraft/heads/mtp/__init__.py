"""Multi-token prediction: the module in torch, its training, and the drafter; the rest is EAGLE-3's."""
