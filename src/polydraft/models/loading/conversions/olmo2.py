"""OLMo 2 (arXiv 2501.00656): Llama with norms behind attention and feed-forward, and norms of all queries and of all keys together."""

from polydraft.models.loading.conversions.base import Conversion

OLMO2 = Conversion(
    "olmo2",
    names={"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
)
