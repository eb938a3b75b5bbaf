"""Gemma 4's assistant drafts what transformers' own code drafts, round by round; the text is the target's."""

import json

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from polydraft import Engine, SamplingParams
from polydraft.core import TokenTree
from polydraft.core.geometry import pad
from polydraft.errors import IncompatibleError, ModelLoadError
from polydraft.heads.assistant import AssistantDrafter
from polydraft.heads.assistant.checkpoint import AssistantCheckpoint
from polydraft.heads.assistant.compiled import CompiledAssistant
from polydraft.heads.finding import head_for
from polydraft.heads.folder import kind_of
from polydraft.models.load import load_model
from tests.models.tree_rounds import branch, small_model
from tests.support.closeness import assert_close

V = 64
COMMON = {
    "vocab_size": V,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "hidden_size_per_layer_input": 0,
}
KINDS = ["sliding_attention", "full_attention"]
TARGETS = {
    "shares keys and values": {"num_hidden_layers": 4, "layer_types": KINDS * 2, "num_kv_shared_layers": 2},
    "has its own": {"num_hidden_layers": 4, "layer_types": KINDS * 2},
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def whole_models_that_share(monkeypatch):
    """transformers 5.23 refuses models all of whose layers share, which its assistants are, and gives no states of those of which none does."""
    modes = hf.Gemma4TextConfig.kv_sharing_modes

    def mended(config):
        shared = config.num_kv_shared_layers
        kinds = list(config.layer_types)
        if shared == config.num_hidden_layers:
            return ["reuse"] * shared
        last = {kind: layer for layer, kind in enumerate(kinds)}
        return (
            modes.fget(config)
            if shared
            else ["store" if last[kind] == layer else None for layer, kind in enumerate(kinds)]
        )

    monkeypatch.setattr(hf.Gemma4TextConfig, "kv_sharing_modes", property(mended))


def target_module(name):
    return small_model(hf.Gemma4TextConfig(hidden_size=32, intermediate_size=48, **TARGETS[name], **COMMON))


def assistant_module(ordered):
    inner = hf.Gemma4TextConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        layer_types=["sliding_attention", *KINDS],
        **{**COMMON, "vocab_size_per_layer_input": 0},
    )
    config = hf.Gemma4AssistantConfig(
        text_config=inner,
        backbone_hidden_size=32,
        use_ordered_embeddings=ordered,
        num_centroids=8,
        centroid_intermediate_top_k=3,
    )
    torch.manual_seed(3)
    module = hf.Gemma4AssistantForCausalLM(config).eval()
    for weight in module.parameters():
        torch.nn.init.normal_(weight, 0.0, 0.3) if weight.ndim > 1 else torch.nn.init.normal_(
            weight, 1.0, 0.1
        )
    if ordered:
        module.masked_embedding.token_ordering.copy_(torch.randperm(V))
    return module


def folders(place, name, ordered=False):
    """A target and its assistant, as their authors publish them: modules, and folders side by side."""
    target = target_module(name)
    assistant = assistant_module(ordered)
    target.save_pretrained(place / "gemma-4-tiny-it")
    assistant.save_pretrained(place / "gemma-4-tiny-it-assistant")
    return target, assistant, place / "gemma-4-tiny-it", place / "gemma-4-tiny-it-assistant"


def loaded(folder, **options):
    options = {"max_num_seqs": 2, "max_model_len": 128, "cache_dtype": "float32", **options}
    return load_model(str(folder), backend="compiled", **options)


@torch.no_grad()
def drafted(target, assistant, text, count):
    """Tokens and logits that transformers drafts behind a text, whose last token the target has not read."""
    outputs = target(
        torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=True
    )
    assistant.generation_config.num_assistant_tokens = count
    settings = hf.GenerationConfig(max_length=200)
    drafter = SinglePositionMultiTokenCandidateGenerator(assistant, target.get_input_embeddings(), settings)
    ids = torch.tensor([text])
    kwargs = {"attention_mask": torch.ones_like(ids)}
    tokens, logits = drafter.get_candidates(ids, kwargs, outputs, is_first_iteration=False, n_last_matches=0)
    return tokens[0, len(text) :].tolist(), logits[0].numpy()


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("ordered", [False, True], ids=["all tokens", "ordered tokens"])
def test_drafts_are_those_of_transformers(name, ordered, tmp_path):
    module, theirs, target_folder, folder = folders(tmp_path, name, ordered)
    assert kind_of(folder) == "assistant"
    target = loaded(target_folder)
    model = CompiledAssistant(AssistantCheckpoint.load(folder), target, quantization="float32")
    last = max(target.offers.hidden)
    text = np.random.default_rng(0).integers(1, V, 40).tolist()
    for length in (2, 5, 8, 30):
        target.release([1])
        states = target.prefill([1], [text[: length - 1]], hidden=(last,)).hidden[last][0]
        tokens, logits = drafted(module, theirs, text[:length], 4)
        model.give(1, states[-1])
        nodes = [text[length - 1], *tokens[:-1]]
        chain = TokenTree.chain(np.array([nodes]))
        rows = [
            model.score([1], TokenTree(chain.tokens[:, : n + 1], chain.parents[:, : n + 1]), since=n).logits[
                0, 0
            ]
            for n in range(len(nodes))
        ]
        assert_close(np.stack(rows), logits)
        assert [int(row.argmax()) for row in rows] == tokens


def test_every_node_of_a_tree_has_the_logits_of_its_path(tmp_path):
    *_, target_folder, folder = folders(tmp_path, "shares keys and values")
    target = loaded(target_folder)
    model = CompiledAssistant(AssistantCheckpoint.load(folder), target, quantization="float32")
    last = max(target.offers.hidden)
    text = np.random.default_rng(1).integers(1, V, 20).tolist()
    states = target.prefill([0], [text[:-1]], hidden=(last,)).hidden[last][0]
    parents = [-1, 0, 0, 1, 2, 2, 4]
    tokens = [text[-1], 3, 9, 4, 7, 8, 5]
    model.give(0, states[-1])
    ends = (1, 3, 6, 7)
    rows = [
        model.score([0], pad([(tokens[:end], parents[:end])]), since=since).logits[0]
        for since, end in zip((0, *ends), ends, strict=False)
    ]
    logits = np.concatenate(rows)
    for node in range(7):
        path = [tokens[n] for n in (0, *branch(parents, node))]
        model.give(0, states[-1])
        chain = TokenTree.chain(np.array([path]))
        alone = [
            model.score([0], TokenTree(chain.tokens[:, : n + 1], chain.parents[:, : n + 1]), since=n).logits[
                0, 0
            ]
            for n in range(len(path))
        ]
        assert np.array_equal(alone[-1], logits[node])


@pytest.mark.parametrize("name", TARGETS)
def test_it_drafts_trees_by_default_where_it_lies_beside_the_model_and_the_text_is_the_targets(
    name, tmp_path
):
    *_, target_folder, folder = folders(tmp_path, name)
    prompts = [[5, 6, 7, 8, 9, 3, 2, 11, 12], [9, 10, 11]]
    plain = Engine.of(loaded(target_folder), drafter=None)
    expected = [r.token_ids for r in plain.generate(prompts, GREEDY)]
    target = loaded(target_folder)
    with pytest.warns(UserWarning, match="assistant"):
        found = head_for(target_folder, target)
    assert found is not None and found.path == folder
    for drafter in ("assistant", "assistant:top_k", "assistant:without_replacement"):
        engine = Engine.of(target, drafter=drafter, drafter_options={"weights": folder}, depth=3)
        assert isinstance(engine.drafter, AssistantDrafter)
        results = engine.generate(prompts, GREEDY)
        assert [r.token_ids for r in results] == expected
        assert all(r.stats.drafter_error is None and r.stats.drafted_tokens > 0 for r in results)


def test_an_assistant_of_another_model_is_refused_by_name(tmp_path):
    *_, target_folder, folder = folders(tmp_path, "has its own")
    target = loaded(target_folder)
    settings = json.loads((folder / "config.json").read_text())

    def refused(error, said, **changes):
        (folder / "config.json").write_text(json.dumps(settings | changes))
        with pytest.raises(error, match=said):
            AssistantCheckpoint.load(str(folder)).check(target)

    refused(ModelLoadError, "pre_projection.weight of shape", backbone_hidden_size=48)
    refused(ModelLoadError, "cannot be read as one", text_config=None)
    inner = settings["text_config"]
    refused(ModelLoadError, "self_attn.q_proj.weight of shape", text_config=inner | {"head_dim": 16})
    refused(IncompatibleError, "its heads are", text_config=inner | {"num_key_value_heads": 4})
