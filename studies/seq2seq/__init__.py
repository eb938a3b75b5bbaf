"""An encoder-decoder that fits a CPU, the Spec-Drafter of it, and what drafts gain there."""
