"""Pictures and LANTERN (arXiv 2410.03355, 2502.06352): verifiers that accept a neighbour in the codebook: docs/papers/lantern.md."""
