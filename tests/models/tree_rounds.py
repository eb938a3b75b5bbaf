"""Small models with random weights, and rounds of random trees compared with fresh passes of transformers."""

import random
from copy import deepcopy

import numpy as np
import torch
import transformers as hf

from polydraft.core import Outcome, TokenTree
from polydraft.core.geometry import pad
from polydraft.models.torch.hf import HFTarget
from tests.support.tiny import GROUPED, SIZES, V

CONTEXT = 640
_COMMON = SIZES | {"max_position_embeddings": CONTEXT}
_GROUPED = GROUPED | {"max_position_embeddings": CONTEXT}

ARCHITECTURES = {
    "llama": hf.LlamaConfig(**_GROUPED),
    "llama_tied": hf.LlamaConfig(**_GROUPED, tie_word_embeddings=True),
    "qwen3": hf.Qwen3Config(**_GROUPED, head_dim=8),
    "gpt2": hf.GPT2Config(vocab_size=V, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4),
    "mistral": hf.MistralConfig(**_GROUPED, sliding_window=None),
    "qwen2": hf.Qwen2Config(**_GROUPED),
    "gemma": hf.GemmaConfig(**{**_GROUPED, "num_key_value_heads": 1}, head_dim=8),
    "gpt_neox": hf.GPTNeoXConfig(**_COMMON),
    "opt": hf.OPTConfig(**_COMMON, ffn_dim=48, word_embed_proj_dim=32),
    "phi3": hf.Phi3Config(**_GROUPED, pad_token_id=0),
}


def small_model(
    config: hf.PreTrainedConfig, seed: int = 0, automatic: type = hf.AutoModelForCausalLM, **options: object
) -> hf.PreTrainedModel:
    """A model whose weights are large enough for a wrong context to show in the logits."""
    torch.manual_seed(seed)
    model = automatic.from_config(deepcopy(config), **options).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 0.0, 0.3) if weight.ndim > 1 else torch.nn.init.normal_(
            weight, 1.0, 0.1
        )
    for name, factor in model.named_buffers():
        if name.endswith("layer_scalar"):
            factor.fill_(0.75)
    return model


@torch.no_grad()
def fresh(model: hf.PreTrainedModel, token_ids: list[int]) -> np.ndarray:
    """Logits of a pass without a cache, [tokens, V]."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()


def outcome(paths: list[list[int]], extra: list[int]) -> Outcome:
    longest = max(map(len, paths))
    padded = np.array([p + [-1] * (longest - len(p)) for p in paths], np.int64)
    return Outcome(padded.reshape(len(paths), longest), np.array([len(p) for p in paths]), np.array(extra))


def branch(parents: list[int], node: int) -> list[int]:
    path: list[int] = []
    while node > 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


class Play:
    """Sequences that join, grow by random trees with random acceptance, and leave."""

    def __init__(self, model: hf.PreTrainedModel, target: HFTarget, seed: int = 0) -> None:
        self.model = model
        self.target = target
        self.random = random.Random(seed)
        self.texts: dict[int, list[int]] = {}

    def token(self) -> int:
        return self.random.randrange(V)

    def join(self, *slots: int) -> None:
        texts = [[self.token() for _ in range(self.random.randint(2, 20))] for _ in slots]
        self.target.prefill(slots, [text[:-1] for text in texts])
        self.texts |= dict(zip(slots, texts, strict=True))

    def leave(self, slot: int) -> None:
        self.target.release([slot])
        del self.texts[slot]

    def round(self, accept: str) -> float:
        """One round for all sequences in random order; largest error of the logits along the accepted paths."""
        slots = self.random.sample(sorted(self.texts), len(self.texts))
        sizes = [self.random.randint(1, 10) for _ in slots]
        parents = [[-1, *(self.random.randrange(max(0, n - 4), n) for n in range(1, size))] for size in sizes]
        tokens = [
            [self.texts[s][-1], *(self.token() for _ in range(1, size))]
            for s, size in zip(slots, sizes, strict=True)
        ]
        tree = pad(list(zip(tokens, parents, strict=True)))
        scores = self.target.score(slots, tree)
        last = [{"all": size - 1, "none": 0, "some": self.random.randrange(size)}[accept] for size in sizes]
        paths = [branch(above, node) for above, node in zip(parents, last, strict=True)]
        kept = outcome(paths, [self.token() for _ in slots])
        errors = [
            self._error(s, path, tokens[b], scores.logits[b])
            for b, (s, path) in enumerate(zip(slots, paths, strict=True))
        ]
        self.target.commit(slots, kept)
        for slot, emitted in zip(slots, kept.emitted(tree), strict=True):
            self.texts[slot] += emitted
            assert self.target.lengths[slot] == len(self.texts[slot]) - 1
        return max(errors)

    def rounds_with_joins(self, count: int) -> float:
        """So many rounds while sequences leave and others join; largest error of the logits, and of those after all texts at the end."""
        self.join(*range(8))
        errors = []
        for step in range(count):
            errors.append(self.round(("some", "some", "all", "none")[step % 4]))
            if step % 3 == 2:
                self.leave(step % 8)
            if step % 3 == 0 and step:
                self.join(*(s for s in range(8) if s not in self.texts))
        return max(*errors, self.next_error(list(self.texts)))

    def _error(self, slot: int, path: list[int], tokens: list[int], logits: np.ndarray) -> float:
        expected = fresh(self.model, self.texts[slot] + [tokens[n] for n in path])[-len(path) - 1 :]
        return float(np.abs(logits[[0, *path]] - expected).max())

    def next_error(self, slots: list[int]) -> float:
        """Largest error of the logits after the committed text of each slot."""
        roots = TokenTree.roots(np.array([self.texts[s][-1] for s in slots]))
        logits = self.target.score(slots, roots).logits[:, 0]
        return max(
            float(np.abs(logits[b] - fresh(self.model, self.texts[s])[-1]).max()) for b, s in enumerate(slots)
        )
