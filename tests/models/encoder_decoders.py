"""Small encoder-decoders with random weights, one of each family, and what transformers says of them."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import transformers as hf

V = 61
START = 0
EOS = 1
_SIDES = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
}
_IDS = {"pad_token_id": 0, "eos_token_id": EOS, "decoder_start_token_id": START}
_ABSOLUTE = {
    "vocab_size": V,
    "d_model": 32,
    "max_position_embeddings": 96,
    **_SIDES,
    **_IDS,
    "bos_token_id": 2,
    "forced_eos_token_id": None,
}
_RELATIVE = {"vocab_size": V, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, **_IDS}
_NEAR = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}

FAMILIES: dict[str, hf.PreTrainedConfig] = {
    "t5": hf.T5Config(**_RELATIVE, **_NEAR),
    "t5 gated": hf.T5Config(**_RELATIVE, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": hf.MT5Config(**_RELATIVE, **_NEAR),
    "bart": hf.BartConfig(**_ABSOLUTE),
    "mbart": hf.MBartConfig(**_ABSOLUTE, scale_embedding=True),
    "marian": hf.MarianConfig(**_ABSOLUTE),
    "pegasus": hf.PegasusConfig(**_ABSOLUTE),
}


def small(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 0.3) -> Any:
    """A model whose weights are large enough for a wrong context to show in the logits."""
    torch.manual_seed(seed)
    model = hf.AutoModelForSeq2SeqLM.from_config(deepcopy(FAMILIES[name])).to(dtype).eval()
    for weight in (w for w in model.parameters() if w.requires_grad):
        torch.nn.init.normal_(weight, 0.0, scale) if weight.ndim > 1 else torch.nn.init.normal_(
            weight, 1.0, 0.1
        )
    return model


@torch.no_grad()
def fresh(model: Any, source: Sequence[int], ids: Sequence[int]) -> np.ndarray:
    """Logits of a pass over everything, without a cache: [tokens, V]."""
    return (
        model(
            input_ids=torch.tensor([list(source)]),
            decoder_input_ids=torch.tensor([list(ids)]),
            use_cache=False,
        )
        .logits[0]
        .numpy()
    )


@torch.no_grad()
def generated(model: Any, source: Sequence[int], count: int) -> list[int]:
    """Greedy output of transformers, without its start token."""
    ids = torch.tensor([list(source)])
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, num_beams=1
    )[0, 1:].tolist()
