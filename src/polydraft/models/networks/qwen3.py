"""Qwen3 (arXiv 2505.09388): Llama with norms of queries and keys."""

from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.qwen2 import DEFAULTS
from polydraft.models.networks.settings import windows_if_used

QWEN3 = Network(
    "qwen3",
    "qwen3 qwen3vl",
    attention=AttentionWeights(norms=HEAD_NORMS),
    defaults={**DEFAULTS, "head_dim": 128, "attention_bias": False},
    mended=windows_if_used,
)
