"""A drafter from zero: it guesses that what followed the last token the time before follows again."""

import numpy as np

from polydraft import Draft, DraftSampling, Engine, Method, Needs, Offers, SamplingParams, TreeShape
from polydraft.core.geometry import pad


class LastTime:
    """Chains copied from behind the latest earlier place of the last token. Deterministic: POINT_MASS, without a q."""

    info = Method(
        name="last_time",
        title="What followed last time",
        authors="an example",
        year=2026,
        arxiv="",
        draft_sampling=frozenset({DraftSampling.POINT_MASS}),
        shapes=frozenset({TreeShape.CHAIN}),
    )
    needs = Needs()
    offers = Offers()

    def start(self, requests):
        return [tuple(request.prompt_token_ids) for request in requests]  # the state is the text

    def propose(self, states, budgets):
        rows = []
        for text, budget in zip(states, budgets, strict=True):
            earlier = [i for i, token in enumerate(text[:-1]) if token == text[-1]]
            begin = earlier[-1] + 1 if earlier else len(text)
            tokens = [text[-1], *text[begin : begin + min(budget.max_depth, budget.max_nodes)]]
            rows.append((tokens, list(range(-1, len(tokens) - 1))))
        tree = pad(rows)
        return Draft(tree, DraftSampling.POINT_MASS, TreeShape.CHAIN, None, np.full_like(tree.tokens, -1))

    def observe(self, states, outcome, scores):
        emitted = outcome.emitted(scores.tree)
        return [text + tuple(new) for text, new in zip(states, emitted, strict=True)]

    def release(self, states):
        """Nothing is held."""


greedy = SamplingParams(temperature=0, max_tokens=32)
prompt = "import os\nimport sys\nimport os\n"
drafted = Engine.embedded(drafter=LastTime(), depth=4).generate(prompt, greedy)[0]
plain = Engine.embedded(drafter=None).generate(prompt, greedy)[0]
print("the same text:", drafted.text == plain.text)
print(
    f"{drafted.stats.generated_tokens} tokens in {drafted.stats.steps} forward passes, {plain.stats.steps} without drafts"
)

# the same text: True
# 32 tokens in 8 forward passes, 32 without drafts
