"""Qwen3 (arXiv 2505.09388): Llama with norms of queries and keys."""

from polydraft.models.compiled.architectures.base import HEAD_NORMS, Architecture

QWEN3 = Architecture("qwen3", "qwen3", head_norms=HEAD_NORMS)
