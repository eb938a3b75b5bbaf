"""The loop that drives drafters, targets and verifiers: batching, stopping, streaming, statistics."""
