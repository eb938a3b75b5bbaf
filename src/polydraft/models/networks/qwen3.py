"""Qwen3 (arXiv 2505.09388): Llama with norms of queries and keys."""

from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.networks.base import Network

QWEN3 = Network("qwen3", "qwen3", attention=AttentionWeights(norms=HEAD_NORMS))
