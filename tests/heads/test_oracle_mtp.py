"""Published modules for multi-token prediction draft what their authors' code drafts, round by round."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from polydraft import Engine, SamplingParams
from polydraft.core import Needs, Outcome, TokenTree
from polydraft.errors import IncompatibleError, ModelLoadError
from polydraft.heads.folders import kind_of
from polydraft.heads.mtp.network import MtpCheckpoint
from polydraft.heads.mtp.published import MtpModule
from tests.heads import oracle
from tests.heads.oracle import SLOT

IN_TARGETS = ["mtp-qwen3.5", "mtp-deepseek-v3"]


class Ends:
    """The embedding and the output rows of a model of which nothing more is kept."""

    max_model_len, max_num_seqs, device, dtype, name = 128, 2, torch.device("cpu"), torch.float32, "ends"

    def __init__(self, kind):
        tensors = load_file(oracle.folder(kind) / "model.safetensors")
        self.rows, self.output = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        self.vocab_size, self.offers = len(self.rows), Needs(hidden=(0, 1, 2), embeddings=True, head=True)

    def embed(self, tokens):
        return self.rows[tokens]

    def head(self, states):
        return states @ self.output.T


def logits_along(model, tokens):
    """At the root and behind each token of a chain but the last."""
    chain = torch.tensor([tokens])
    rows = [model.score([SLOT], TokenTree.chain(chain[:, : n + 1]), since=n).logits[0, 0] for n in range(len(tokens))]
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ["speculators-mtp", *IN_TARGETS])
def test_drafts_are_the_references(kind):
    assert kind_of(oracle.folder(kind)) == "mtp"
    target = Ends(kind) if kind in IN_TARGETS else oracle.target(kind)
    model = MtpModule(MtpCheckpoint.load(oracle.folder(kind)), target)
    states = None if kind in IN_TARGETS else oracle.states(kind, (6,))
    for r in oracle.rounds(kind):
        entries, drafts, start = r["tokens"], r["draft_tokens"][0].tolist(), r["start"]
        given = r["target_hidden"][0] if states is None else states[r["first"] : start]
        model.give(SLOT, given)
        if len(entries) > 1:
            model.prefill([SLOT], [entries[:-1]])
        logits = logits_along(model, [entries[-1], *drafts[:-1]])
        oracle.assert_close(logits, r["draft_logits"])
        assert logits.argmax(-1).tolist() == drafts
        model.commit([SLOT], Outcome.of(np.empty((1, 0), np.int64), np.array([0]), np.array([0])))
        assert model.lengths[SLOT] == start


def test_text_is_the_targets_with_the_module_of_speculators():
    greedy, prompts, target = (
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        [[5, 6, 7, 8], [9, 10, 11]],
        oracle.target(""),
    )
    plain = Engine.of(target, drafter=None).generate(prompts, greedy)
    for name in ("auto", "mtp:top_k", "mtp:without_replacement"):
        engine = Engine.of(target, drafter=name, drafter_options={"weights": oracle.folder("speculators-mtp")}, depth=3)
        drafted = engine.generate(prompts, greedy)
        assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
        assert all(r.stats.drafter_error is None and r.stats.drafted_tokens > 0 for r in drafted)


def test_a_module_of_another_model_or_with_other_tensors_is_refused(tmp_path):
    kind = "speculators-mtp"
    tensors, said = (
        load_file(oracle.folder(kind) / "model.safetensors"),
        json.loads((oracle.folder(kind) / "config.json").read_text()),
    )

    def refused(said_of_layer=(), **changes):
        layer = said["transformer_layer_config"] | dict(said_of_layer)
        (tmp_path / "config.json").write_text(json.dumps(said | {"transformer_layer_config": layer}))
        kept = {name: x for name, x in (tensors | changes).items() if x is not None}
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises((IncompatibleError, ModelLoadError)) as error:
            MtpModule(MtpCheckpoint.load(tmp_path), oracle.target(kind))
        return str(error.value)

    assert "num_hidden_layers=36; " in refused({"num_hidden_layers": 36})
    assert "vocab_size=100; " in refused({"vocab_size": 100})
    assert "input_proj" in refused(**{"mtp_layers.0.input_proj.weight": None})
    assert "self_attn.k_norm.weight" in refused(**{"mtp_layers.0.self_attn.k_norm.weight": None})
    assert "self_attn.sinks" in refused(**{"mtp_layers.0.self_attn.sinks": torch.ones(4)})
