"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases of queries, keys and values."""

from polydraft.models.compiled.architectures.base import Architecture

QWEN2 = Architecture("qwen2", "qwen2", qkv_bias=True)
