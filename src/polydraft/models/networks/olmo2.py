"""OLMo 2 (arXiv 2501.00656): Llama with norms behind attention and feed-forward, and norms of all queries and of all keys together."""

from polydraft.models.networks.base import Network

OLMO2 = Network(
    "olmo2",
    "olmo2",
    lacks="norms of all queries together, and of all keys; layers with norms behind attention and feed-forward alone",
    names={"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
)
