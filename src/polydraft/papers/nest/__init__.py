"""NEST (arXiv 2405.19325): passages of a corpus beside the target distribution, quoted in spans: docs/papers/nest.md."""
