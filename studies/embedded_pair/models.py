"""Shapes of the embedded pair, and its models before and after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from studies.embedded_pair.tokenizer import END_OF_TEXT_ID, MAX_CONTEXT

VOCAB_SIZE = 2048
TARGET = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
DRAFT = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def llama(shape: dict[str, Any], *, seed: int) -> LlamaForCausalLM:
    """A LlamaForCausalLM with tied embeddings and freshly drawn weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        **shape,
    )
    return LlamaForCausalLM(config)


def from_checkpoint(shape: dict[str, Any], checkpoint: Path) -> LlamaForCausalLM:
    """The model of a training checkpoint after the bfloat16 round trip, in float32."""
    model = llama(shape, seed=0)
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    return model.bfloat16().float().eval()


def load_float32(folder: Path) -> Any:
    """The exported model, bfloat16 weights computed with in float32, in evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
