"""Two tables in float64, a target and a draft, as the checker sees them; the rules for a shape, and the distribution of what an engine emits."""

import numpy as np

from polydraft import SamplingParams
from polydraft.core import DraftSampling
from polydraft.methods import registry
from polydraft.sampling.softmax import softmax
from tests.exactness.runs import every_run


def exact_for(shape):
    """Lossless rules for iid draws of this shape."""
    infos = {name: registry.verifier(name).info for name in registry.names("verifier")}
    return [
        n
        for n, i in infos.items()
        if i.lossless and not i.shared_noise and DraftSampling.IID in i.draft_sampling and shape in i.shapes
    ]


class TwoTables:
    """A target and a draft table as the checker's rows below a prompt."""

    def __init__(self, target, draft, prompt):
        self.V = target.vocab_size
        self.prompt = prompt
        self.models = {"p": target, "q": draft}

    def row(self, which, path):
        text = [*self.prompt, *path]
        return softmax(self.models[which].logits[text[-2], text[-1]])


def emitted_probs(engine, prompt, length, monkeypatch):
    """Probability of every text of this length, from every run of the engine."""
    found = np.zeros((engine.target.vocab_size,) * length, np.float64)
    params = SamplingParams(max_tokens=length, seed=0)
    for probability, (result,) in every_run(lambda: engine.generate([prompt], params), monkeypatch):
        found[tuple(result.token_ids)] += probability
    return found
