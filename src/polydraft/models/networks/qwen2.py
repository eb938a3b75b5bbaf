"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases of queries, keys and values."""

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.networks.base import Network

QWEN2 = Network("qwen2", "qwen2", attention=AttentionWeights(bias=True))
