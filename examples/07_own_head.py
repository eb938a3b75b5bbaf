"""A draft head from zero: from the target's last state and the next token's embedding it guesses the next state, by least squares."""

import numpy as np

from polydraft import Draft, DraftSampling, Engine, Method, Needs, Offers, SamplingParams, TreeShape
from polydraft.core.geometry import pad
from polydraft.models import pair


class LinearHead:
    """state[n] ~ [state[n-1], embedding[n], 1] @ weights, as EAGLE does with a transformer layer (arXiv 2401.15077); greedy chains."""

    info = Method(
        "linear_head",
        "A linear map of states",
        "an example",
        2026,
        "",
        frozenset({DraftSampling.POINT_MASS}),
        frozenset({TreeShape.CHAIN}),
    )

    def __init__(self, target, texts):
        self.target = target
        layer = max(target.offers.hidden)
        self.needs = Needs(hidden=(layer,), embeddings=True, head=True)
        self.offers = Offers(read=self.read)  # or it is refused
        pasts = []
        nexts = []
        for text in texts:
            target.release([0])  # an engine may keep a text in it
            states = target.prefill([0], [text], hidden=(layer,)).hidden[layer][0]
            pasts.append(self.features(states[:-1], np.array(text[1:])))
            nexts.append(states[1:])
        target.release([0])
        self.weights, *_ = np.linalg.lstsq(np.concatenate(pasts), np.concatenate(nexts))

    def features(self, states, tokens):
        ones = np.ones((len(states), 1), states.dtype)
        return np.concatenate([states, self.target.embed(tokens), ones], 1)

    def start(self, requests):
        return [
            (request.prompt_token_ids[-1], None) for request in requests
        ]  # the last token, and the state before it

    def read(self, states, scores):
        return [(token, scores.hidden[self.needs.hidden[0]][b, -1]) for b, (token, _) in enumerate(states)]

    def propose(self, states, budgets):
        rows = []
        for (token, state), budget in zip(states, budgets, strict=True):
            tokens = [token]
            while state is not None and len(tokens) <= min(budget.max_depth, budget.max_nodes):
                state = (self.features(state[None], np.array(tokens[-1:])) @ self.weights)[0]
                tokens.append(int(self.target.head(state).argmax()))
            rows.append((tokens, list(range(-1, len(tokens) - 1))))
        tree = pad(rows)
        return Draft(tree, DraftSampling.POINT_MASS, TreeShape.CHAIN, None, np.full_like(tree.tokens, -1))

    def observe(self, states, outcome, scores):
        last = [
            path[-1] if path else 0 for path in outcome.lists.paths
        ]  # the node whose row gave the extra token
        hidden = scores.hidden[self.needs.hidden[0]]
        return [(token, hidden[b, last[b]]) for b, token in enumerate(outcome.lists[1])]

    def release(self, states):
        """Nothing is held."""


plain = Engine.embedded(drafter=None)
prompts = [prompt.text for prompt in pair.prompts()]
own = plain.generate(
    prompts[4:] * 4, SamplingParams(max_tokens=192, seed=0, temperature=0.7)
)  # what the target itself writes
head = LinearHead(plain.target, [result.prompt_token_ids + result.token_ids for result in own])
greedy = SamplingParams(temperature=0, max_tokens=64)
drafted = Engine.of(plain.target, tokenizer=plain.tokenizer, drafter=head, depth=3).generate(
    prompts[:4], greedy
)
print("the same texts:", [r.text for r in drafted] == [r.text for r in plain.generate(prompts[:4], greedy)])
print("tokens per step:", *(round(r.stats.generated_tokens / r.stats.steps, 2) for r in drafted))

# the same texts: True
# tokens per step: 1.21 2.67 1.0 2.56
