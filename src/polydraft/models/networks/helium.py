"""Helium (https://kyutai.org/helium): Llama whose rotations lie side by side."""

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import special_tokens

HELIUM = Network(
    "helium",
    attention=AttentionWeights(bias="attention_bias"),
    feed_forward=FeedForwardWeights(bias="mlp_bias"),
    pairs=True,
    defaults={
        **special_tokens(1, 2, 3),
        "head_dim": 128,
        "num_key_value_heads": 20,
        "rms_norm_eps": 1e-8,
        "rope_theta": 1e5,
        "attention_bias": False,
        "mlp_bias": False,
    },
)
