"""A target and a draft model that are tables: the distribution of the next token depends on the last two tokens."""

from collections import Counter

import numpy as np
import torch
from scipy.stats import chi2

from polydraft import Engine, SamplingParams
from polydraft.core import Needs, Scores, Target, TokenTree
from polydraft.sampling.softmax import softmax


class TableModel(Target):
    """`core.Target` over a random table. Contexts are remembered in slots, as a cache would.

    Rules have their walks for float32; float64, for strict equality, goes by their verdicts.
    """

    def __init__(self, V=7, seed=0, sharp=2.0, max_model_len=64, max_num_seqs=4, dtype=np.float64):
        self.vocab_size = V
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        generator = torch.Generator().manual_seed(seed)  # tests are tuned to these numbers
        drawn = torch.randn(V, V, V, generator=generator, dtype=torch.float64).numpy()
        self.logits = (sharp * drawn).astype(dtype)
        self.width = -(-V // 8) * 8
        self.eos_token_ids = ()
        self.texts = [[] for _ in range(max_num_seqs)]
        self._scored = {}
        self.passes = 0

    @property
    def lengths(self):
        return [len(text) for text in self.texts]

    def cut(self, slot, length):
        assert length <= len(self.texts[slot])
        del self.texts[slot][length:]

    def copy(self, source, slot, length):
        self.texts[slot] = self.texts[source][:length]

    offers = Needs(hidden=(0, 1), embeddings=True, head=True, logits=True, every_step=True)
    """State 0 of a token says which it is, the last state is its row of logits; both with zeros behind, up to a width of eights."""

    def embed(self, token_ids):
        return np.eye(self.vocab_size, self.width, dtype=self.logits.dtype)[token_ids]

    def head(self, hidden):
        return hidden[..., : self.vocab_size]

    def prefill(self, slots, token_ids, *, hidden=()):
        before = [self.texts[slot][-1] if self.texts[slot] else 0 for slot in slots]
        for slot, ids in zip(slots, token_ids, strict=True):
            self.texts[slot] += list(ids)
        longest = max(map(len, token_ids))
        padded = np.array(
            [[first, *ids, *[0] * (longest - len(ids))] for first, ids in zip(before, token_ids, strict=True)]
        )
        states = self._states(padded[:, :-1], padded[:, 1:], hidden)
        last = np.array([ids[-1] for ids in token_ids])
        return Scores(TokenTree.roots(last), np.tile(self.logits[0, :1], (len(slots), 1, 1)), states)

    def _states(self, above, tokens, hidden):
        if not hidden:
            return {}
        last = np.zeros((*tokens.shape, self.width), self.logits.dtype)
        last[..., : self.vocab_size] = self.logits[above, tokens]
        made = {0: self.embed(tokens), 1: last}
        return {layer: made[layer] for layer in hidden}

    def score(self, slots, tree, *, hidden=(), since=0):
        self.passes += 1
        self._scored |= dict(zip(slots, tree.tokens.tolist(), strict=True))
        before = np.array([[self.texts[s][-1] if self.texts[s] else 0] for s in slots])
        parents = tree.parents
        above = np.where(parents >= 0, np.take_along_axis(tree.tokens, parents.clip(min=0), 1), before)
        scored = TokenTree(tree.tokens[:, since:], tree.parents[:, since:])
        states = self._states(above[:, since:], scored.tokens, hidden)
        return Scores(scored, self.logits[above, tree.tokens][:, since:], states)

    def commit(self, slots, outcome):
        for b, slot in enumerate(slots):
            nodes = [0, *outcome.path[b, : outcome.num_accepted[b]].tolist()]
            self.texts[slot] += [self._scored[slot][n] for n in nodes]

    def release(self, slots):
        for slot in slots:
            self.texts[slot] = []


def plain_greedy(model, prompt, count):
    """Greedy decoding straight from the table."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(model.logits[text[-2] if len(text) > 1 else 0, text[-1]].argmax()))
    return text[len(prompt) :]


def distribution(model, prompt, count):
    """Probability of every continuation of this length, [V] * count."""
    probs = softmax(model.logits.astype(np.float64))
    states = probs[prompt[-2] if len(prompt) > 1 else 0, prompt[-1]]
    if count == 1:
        return states
    pairs = states[:, None] * probs[prompt[-1]]
    for _ in range(count - 2):
        pairs = pairs[..., None] * probs
    return pairs


def table_engine(kind="paths", verifier="auto", depth=3, num_paths=2, seqs=4, **model):
    target = TableModel(max_num_seqs=seqs, **model)
    small = TableModel(seed=1, sharp=1.0, max_num_seqs=seqs, **model)
    small.logits = 0.7 * target.logits + 0.3 * small.logits
    num_paths = 1 if kind == "chain" else num_paths
    return Engine.of(
        target,
        draft_model=small,
        verifier=verifier,
        depth=depth,
        num_paths=num_paths,
        drafter_options={"kind": kind},
    )


def p_value(make, prompt, count, seeds, against=None, **params):
    """Chi-square of the engine's first tokens against the table (another one's where given), cells of small expectation pooled."""
    sizes = [min(512, seeds - done) for done in range(0, seeds, 512)]
    each = [
        SamplingParams(max_tokens=count + 3, n=size, seed=5 + i, **params) for i, size in enumerate(sizes)
    ]
    samples = [sample for made in make.generate([prompt] * len(sizes), each) for sample in made.samples]
    V = make.target.vocab_size
    expected = distribution(against or make.target, prompt, count).ravel() * seeds
    code = [sum(t * V ** (count - 1 - i) for i, t in enumerate(s.token_ids[:count])) for s in samples]
    seen = np.zeros_like(expected)
    for c, times in Counter(code).items():
        seen[c] = times
    big = expected >= 5
    e, s = [np.concatenate([x[big], x[~big].sum()[None]]) for x in (expected, seen)]
    return chi2.sf(float(((s - e) ** 2 / e.clip(min=1e-9)).sum()), int(big.sum()))
