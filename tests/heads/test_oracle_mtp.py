"""Published modules for multi-token prediction draft what their authors' code drafts, round by round."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from polydraft import Engine, SamplingParams
from polydraft.core import Needs, Outcome, TokenTree
from polydraft.errors import IncompatibleError, ModelLoadError
from polydraft.heads.eagle.compiled import CompiledEagle
from polydraft.heads.finding import head_for
from polydraft.heads.folder import kind_of
from polydraft.heads.mtp import MtpDrafter
from polydraft.heads.mtp.checkpoint import MtpCheckpoint
from polydraft.heads.mtp.network import in_torch
from polydraft.models.load import load_model
from polydraft.models.loading.predictor import FOLDERS
from polydraft.sampling.softmax import log_softmax
from tests.heads import oracle
from tests.heads.oracle import SLOT
from tests.models.tree_rounds import small_model
from tests.support.closeness import assert_close

FILES = Path(__file__).parents[1] / "models" / "oracle_gguf"
IN_TARGETS = ["mtp-qwen3.5", "mtp-deepseek-v3"]


class Ends:
    """The embedding and the output rows of a model of which nothing more is kept."""

    max_model_len = 128
    max_num_seqs = 2
    device = torch.device("cpu")
    dtype = torch.float32
    name = "ends"

    def __init__(self, kind):
        tensors = load_file(oracle.folder(kind) / "model.safetensors")
        self.rows = tensors["model.embed_tokens.weight"].float().numpy()
        self.output = tensors["lm_head.weight"].float().numpy()
        self.vocab_size = len(self.rows)
        self.offers = Needs(hidden=(0, 1, 2), embeddings=True, head=True)

    def embed(self, tokens):
        return self.rows[tokens]

    def head(self, states):
        return states @ self.output.T


def own_predictor(target):
    """The compiled layer of a target's own files, in float32."""
    own = MtpCheckpoint.of_target(target)
    assert own is not None
    return CompiledEagle(own, target, quantization="float32")


def logits_along(model, tokens, slot=SLOT):
    """At the root and behind each token of a chain but the last."""
    chain = np.array([tokens])
    rows = [
        model.score([slot], TokenTree.chain(chain[:, : n + 1]), since=n).logits[0, 0]
        for n in range(len(tokens))
    ]
    return np.stack(rows)


@pytest.mark.parametrize("kind", ["speculators-mtp", *IN_TARGETS])
def test_drafts_are_the_references(kind):
    assert kind_of(oracle.folder(kind)) == "mtp"
    target = Ends(kind) if kind in IN_TARGETS else oracle.target(kind)
    model = in_torch(MtpCheckpoint.load(oracle.folder(kind)), target)
    states = None if kind in IN_TARGETS else oracle.states(kind, (6,))
    for r in oracle.rounds(kind):
        entries = r["tokens"]
        drafts = r["draft_tokens"][0].tolist()
        start = r["start"]
        given = r["target_hidden"][0].numpy() if states is None else states[r["first"] : start]
        model.give(SLOT, given)
        if len(entries) > 1:
            model.prefill([SLOT], [[int(e) for e in entries[:-1]]])
        logits = logits_along(model, [entries[-1], *drafts[:-1]])
        oracle.assert_close(logits, r["draft_logits"])
        assert logits.argmax(-1).tolist() == drafts
        model.commit([SLOT], Outcome.of(np.empty((1, 0), np.int64), np.array([0]), np.array([0])))
        assert model.lengths[SLOT] == start


@pytest.mark.parametrize("name", ["qwen35-mtp", "glm4moe"])
def test_layers_in_files_of_llama_cpp_predict_as_the_reference(name):
    target = load_model(
        str(FILES / f"{name}.gguf"),
        backend="compiled",
        max_num_seqs=1,
        max_model_len=96,
        cache_dtype="float32",
    )
    model = own_predictor(target)
    told = json.loads((FILES / f"{name}.json").read_text(encoding="utf-8"))
    last = max(target.offers.hidden)
    for case, expected in zip(told["cases"], told["mtp"], strict=True):
        text = case["prompt"] + case["ids"]
        states = target.prefill([0], [text], hidden=(last,)).hidden[last][0]
        for step in (0, 1, 23):
            read = text[1 : len(case["prompt"]) + step + 1]
            model.give(0, states[: len(read)])
            logits = model.prefill([0], [read]).logits[0, 0]
            ids, log_probs = zip(*expected[step], strict=True)
            row = log_softmax(logits)[list(ids)]
            assert np.abs(row - np.array(log_probs)).max() < 1e-3
            model.release([0])
        target.release([0])


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
LATENT = {name: size for name, size in SIZES.items() if name != "head_dim"} | {"num_key_value_heads": 4}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
OF_EXPERTS = {
    "qwen3_5_moe": lambda layers: hf.Qwen3_5MoeTextConfig(
        num_hidden_layers=layers, layer_types=["linear_attention", "full_attention"][-layers:], num_experts=6, mtp_num_hidden_layers=1,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        shared_expert_intermediate_size=16, max_position_embeddings=512, **SIZES, **EXPERTS,
    ),
    "glm4_moe": lambda layers: hf.Glm4MoeConfig(
        num_hidden_layers=layers, first_k_dense_replace=layers - 1, n_routed_experts=6, n_shared_experts=1, intermediate_size=48,
        num_nextn_predict_layers=1, max_position_embeddings=512, use_qk_norm=True, **SIZES, **EXPERTS,
    ),
    "deepseek_v3": lambda layers: hf.DeepseekV3Config(
        num_hidden_layers=layers, first_k_dense_replace=layers - 1, n_routed_experts=6, n_group=2, topk_group=1, intermediate_size=48,
        q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        num_nextn_predict_layers=1, max_position_embeddings=512, **LATENT, **EXPERTS,
    ),
}  # fmt: skip


def folder_with_a_layer(kind, folder):
    """A tiny model's, and in it a layer that predicts, as published folders have it."""
    small_model(OF_EXPERTS[kind](2)).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    prefix = "mtp." if kind == "qwen3_5_moe" else "model.layers.{num_layers}."
    names = FOLDERS[prefix]
    layer = small_model(OF_EXPERTS[kind](1), seed=1).state_dict()
    prefix = prefix.format(num_layers=2)
    for name, weight in layer.items():
        if name.startswith("model.layers.0."):
            tensors[prefix + names.layer + name.removeprefix("model.layers.0.")] = weight.clone()
    for name in names[1:4]:
        tensors[f"{prefix}{name}.weight"] = 0.1 * torch.randn(32, generator=torch.Generator().manual_seed(2))
    tensors[f"{prefix}{names.project}.weight"] = 0.2 * torch.randn(
        32, 64, generator=torch.Generator().manual_seed(3)
    )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("kind", OF_EXPERTS)
def test_a_layer_with_experts_in_a_folder_drafts_compiled_as_in_transformers(kind, tmp_path):
    folder_with_a_layer(kind, tmp_path)
    target = load_model(
        str(tmp_path), backend="compiled", max_num_seqs=1, max_model_len=96, cache_dtype="float32"
    )
    drafter = Engine.of(target).drafter
    assert (
        isinstance(drafter, MtpDrafter)
        and isinstance(drafter.model, CompiledEagle)
        and head_for(tmp_path, target) is None
    )
    forms = (
        own_predictor(target),
        in_torch(MtpCheckpoint.load(tmp_path), target),
    )
    text = [5, 9, 3, 7, 1, 8, 2, 6]
    last = max(target.offers.hidden)
    states = target.prefill([0], [text], hidden=(last,)).hidden[last][0]
    rows = []
    for model in forms:
        model.give(0, states[:-1])
        model.prefill([0], [text[1:-1]])
        rows.append(logits_along(model, text[-1:], 0)[0])
    assert_close(*rows)


@pytest.mark.parametrize("kind", OF_EXPERTS)
def test_text_is_the_targets_with_a_layer_of_its_own_files(kind, tmp_path):
    folder_with_a_layer(kind, tmp_path)
    target = load_model(str(tmp_path), backend="compiled", max_num_seqs=2, max_model_len=96)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    plain, drafted = (
        Engine.of(target, **options).generate(prompts, greedy)
        for options in ({"drafter": None}, {"depth": 3})
    )
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert all(r.stats.drafter_error is None and r.stats.drafted_tokens > 0 for r in drafted)


def test_a_line_says_why_a_layer_in_a_folder_does_not_draft(tmp_path):
    folder_with_a_layer("qwen3_5_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if k != "mtp.fc.weight"}, file, {"format": "pt"})
    with pytest.warns(
        UserWarning,
        match=r"that predicts a further token is not compiled: it has no tensor 'mtp\.fc\.weight'",
    ):
        target = load_model(str(tmp_path), backend="compiled", max_num_seqs=1, max_model_len=96)
    assert target.checkpoint.predictor is None
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert len(Engine.of(target).generate([[5, 9, 3]], greedy)[0].token_ids) == 8


def test_text_is_the_targets_with_the_module_of_speculators():
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    target = oracle.target("")
    plain = Engine.of(target, drafter=None).generate(prompts, greedy)
    for name in ("auto", "mtp:top_k", "mtp:without_replacement"):
        engine = Engine.of(
            target, drafter=name, drafter_options={"weights": oracle.folder("speculators-mtp")}, depth=3
        )
        drafted = engine.generate(prompts, greedy)
        assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
        assert all(r.stats.drafter_error is None and r.stats.drafted_tokens > 0 for r in drafted)


def test_a_line_says_that_a_module_drafts_through_torch_for_a_compiled_target():
    head = MtpCheckpoint.load(oracle.folder("speculators-mtp"))
    with pytest.warns(
        UserWarning, match="kind 'mtp' has layers that are not compiled: it drafts through torch"
    ):
        MtpDrafter.model_of(head, oracle.target("speculators-mtp", "compiled"))


def test_a_module_of_another_model_or_with_other_tensors_is_refused(tmp_path):
    kind = "speculators-mtp"
    tensors = load_file(oracle.folder(kind) / "model.safetensors")
    said = json.loads((oracle.folder(kind) / "config.json").read_text())

    def refused(said_of_layer=(), **changes):
        layer = said["transformer_layer_config"] | dict(said_of_layer)
        (tmp_path / "config.json").write_text(json.dumps(said | {"transformer_layer_config": layer}))
        kept = {name: x for name, x in (tensors | changes).items() if x is not None}
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises((IncompatibleError, ModelLoadError)) as error:
            in_torch(MtpCheckpoint.load(tmp_path), oracle.target(kind))
        return str(error.value)

    assert "num_target_layers=36, the model has 6" in refused({"num_hidden_layers": 36})
    assert "vocab_size=100 tokens, the model 320" in refused({"vocab_size": 100})
    assert "input_proj" in refused(**{"mtp_layers.0.input_proj.weight": None})
    assert "self_attn.k_norm.weight" in refused(**{"mtp_layers.0.self_attn.k_norm.weight": None})
    assert "self_attn.sinks" in refused(**{"mtp_layers.0.self_attn.sinks": torch.ones(4)})


def test_codes_with_scales_are_read_as_numbers_and_codes_without_are_refused(tmp_path):
    folder = oracle.folder("speculators-mtp")
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    name = "mtp_layers.0.mlp.up_proj.weight"
    scale = tensors[name].abs().amax(1, keepdim=True) / 448
    codes = (tensors[name] / scale).to(torch.float8_e4m3fn)
    save_file(tensors | {name: codes, f"{name}_scale": scale}, tmp_path / "model.safetensors")
    head = MtpCheckpoint.load(tmp_path)
    assert np.array_equal(head.published.layer["model.layers.0.mlp.up_proj.weight"], codes.float() * scale)
    drafted = in_torch(head, oracle.target("speculators-mtp"))
    drafted.give(SLOT, oracle.states("speculators-mtp", (6,))[:1])
    assert np.isfinite(drafted.prefill([SLOT], [[5]]).logits).all()
    save_file(tensors | {name: codes}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"nothing says which numbers the codes of {name} stand for"):
        MtpCheckpoint.load(tmp_path)
