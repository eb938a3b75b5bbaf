"""Qwen3 (arXiv 2505.09388): Llama with norms of queries and keys."""

from polydraft.models.networks.base import HEAD_NORMS, Network

QWEN3 = Network("qwen3", "qwen3", head_norms=HEAD_NORMS)
