"""Published block heads draft what their authors' code drafts, round by round."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from polydraft import Engine, SamplingParams
from polydraft.core import Budget, Request, TokenTree
from polydraft.core import geometry as tree
from polydraft.errors import IncompatibleError, InvalidInputError, ModelLoadError
from polydraft.heads.block import BlockDrafter
from polydraft.heads.block.checkpoint import BlockCheckpoint
from polydraft.heads.block.compiled import CompiledBlock
from polydraft.heads.block.network import BlockModel
from polydraft.heads.eight_bits import write_in_eight_bits
from polydraft.heads.folder import kind_of
from polydraft.heads.markov import confidence_logits
from polydraft.heads.peagle.compiled import CompiledPeagle
from polydraft.heads.peagle.network import PeagleModel
from polydraft.methods import registry
from tests.drafters.sessions import proposed
from tests.heads import oracle
from tests.heads.oracle import SLOT

KINDS = ["dspark-qwen3-vanilla", "dspark-qwen3-gated", "dspark-gemma4", "dflash-jetspec-bidirectional", "dflash-jetspec-causal",
         "speculators-dflash-sliding", "speculators-dspark-inplace", "speculators-peagle"]  # fmt: skip


def chain(anchor, tokens):
    return TokenTree.chain(np.array([[anchor, *tokens]]))


def assert_drafts(model, anchor, tokens, logits, confidence):
    """What a chain of drafts is drawn from, and how sure the head is of each."""
    rows = model.score([SLOT], chain(anchor, tokens[:-1])).logits[0]
    oracle.assert_close(rows[:, model.draft_ids], logits)
    if confidence is not None:
        sure = confidence_logits(model.arrays.markov, [SLOT], *chain(anchor, tokens).host)
        np.testing.assert_allclose(sure[0, 1:], confidence[0].numpy(), rtol=1e-4, atol=1e-4)
    return rows


def model_of(kind, form="torch", quantization="float32", folder=None):
    folder = folder or oracle.folder(kind)
    named = kind_of(folder)
    assert named == ("peagle" if "peagle" in kind else "block")
    drafter = registry.drafter(named)
    checkpoint = drafter.checkpoint.load(folder)
    if form == "torch":
        return checkpoint, {"peagle": PeagleModel, "block": BlockModel}[named](
            checkpoint, oracle.target(kind)
        )
    compiled = drafter.model_of(checkpoint, oracle.target(kind, "compiled"), quantization)
    assert isinstance(compiled, (CompiledBlock, CompiledPeagle))
    return checkpoint, compiled


FORMS = [
    (kind, form)
    for kind in KINDS
    for form in ("torch", "compiled")
    if form == "torch" or "gemma4" not in kind
]


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_drafts_are_the_references(kind, form):
    checkpoint, model = model_of(kind, form)
    states = oracle.states(kind, checkpoint.layers)
    for r in oracle.rounds(kind):
        anchor = int(r["anchor"])
        drafts = r["draft_tokens"][0].tolist()
        model.inject(SLOT, r["first"], states[r["first"] : r["start"]], r["tokens"])
        model.roots[SLOT] = anchor
        model.know([SLOT], states[r["start"] - 1 : r["start"]])
        assert model.depths == len(drafts)
        rows = assert_drafts(model, anchor, drafts, r["draft_logits"], r.get("confidence_logits"))
        assert rows.argmax(-1).tolist() == drafts
        if "forced_tokens" in r:
            forced = r["forced_tokens"][0].tolist()
            assert_drafts(model, anchor, forced, r["forced_logits"], r.get("forced_confidence_logits"))


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("dspark-qwen3-gated", "transformers"), ("speculators-peagle", "transformers"),
     *((kind, "compiled") for kind in KINDS if kind not in oracle.TARGETS)],
)  # fmt: skip
def test_text_is_the_targets_with_a_head_that_its_folder_names(kind, backend):
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    target = oracle.target(kind, backend)
    plain = Engine.of(target, drafter=None).generate(prompts, greedy)
    for name in ("auto", f"{kind_of(oracle.folder(kind))}:top_k"):
        engine = Engine.of(target, drafter=name, drafter_options={"weights": oracle.folder(kind)}, depth=3)
        drafted = engine.generate(prompts, greedy)
        assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
        assert all(r.stats.drafter_error is None and r.stats.drafted_tokens > 0 for r in drafted)


def known(kind, form, texts, **options):
    """Logits by depth behind some texts of a case, in slots of their own, at once."""
    checkpoint, model = model_of(kind, form, **options)
    states = oracle.states(kind, checkpoint.layers)
    committed = oracle.arrays(kind)["committed"][0].tolist()
    for slot, length in enumerate(texts):
        model.inject(slot, 0, states[:length], committed[1 : length + 1])
        model.roots[slot] = committed[length]
    model.know(range(len(texts)), np.empty((len(texts), 0), np.float32))
    return model.arrays.logits[: len(texts), :, : len(model.draft_ids)]


@pytest.mark.parametrize("kind", ["dspark-qwen3-gated", "speculators-dflash-sliding", "speculators-peagle"])
def test_texts_of_several_lengths_are_drafted_for_at_once(kind):
    expected = known(kind, "torch", (3, 17, 9))
    oracle.assert_close(known(kind, "compiled", (3, 17, 9)), expected[..., :: oracle.COLUMN])
    oracle.assert_close(known(kind, "compiled", (17,)), expected[1:2, :, :: oracle.COLUMN])


def test_weights_of_eight_and_of_four_bits_draft_nearly_the_same():
    expected = known("dspark-qwen3-gated", "torch", (17,))
    errors = [
        float(
            np.linalg.norm(known("dspark-qwen3-gated", "compiled", (17,), quantization=bits) - expected)
            / np.linalg.norm(expected)
        )
        for bits in ("int8", "int4")
    ]
    assert 1e-4 < errors[0] < 0.05 < errors[1] < 0.3
    with pytest.raises(
        InvalidInputError,
        match=r"quantization='int3' was given for a draft head; expected one of .*int8, int4",
    ):
        options = {"weights": oracle.folder("dspark-qwen3-gated"), "quantization": "int3"}
        Engine.of(oracle.target("dspark-qwen3-gated", "compiled"), drafter="block", drafter_options=options)


def test_a_file_in_eight_bits_is_half_as_large_and_drafts_the_same_where_heads_are_compiled(tmp_path):
    kind = "dflash-jetspec-causal"
    whole = oracle.folder(kind)
    small = write_in_eight_bits(oracle.folder(kind), tmp_path / "small")
    before = load_file(whole / "model.safetensors")
    blocks = load_file(small / "model.safetensors")
    sizes = [sum(x.nbytes for x in tensors.values()) for tensors in (before, blocks)]
    assert sizes[1] / sizes[0] < 0.4  # of a file of 32 bits, and of few that have no whole number of blocks
    head = BlockCheckpoint.load(small)
    read = dequantize(blocks["fc.weight.q8_0"].numpy(), GGMLQuantizationType.Q8_0)
    assert np.array_equal(head.tensors["fc.weight"], read)
    drafted = [known(kind, "compiled", (17,), quantization="int8", folder=where) for where in (whole, small)]
    assert np.array_equal(*drafted)
    save_file(
        blocks | {"fc.weight.q8_0": blocks["fc.weight.q8_0"][:, 1:].clone()}, small / "model.safetensors"
    )
    with pytest.raises(
        ModelLoadError, match=r"fc\.weight\.q8_0 has the shape .* expected blocks of 34 bytes"
    ):
        BlockCheckpoint.load(small)


@pytest.mark.parametrize(
    ("kind", "settings", "tensors", "said"),
    [
        ("dspark-qwen3-gated", {"markov_rank": 0}, {}, "markov_rank=0 with markov_head_type='gated'"),
        ("dspark-qwen3-gated", {"markov_head_type": "lstm"}, {}, "markov_head_type='lstm'"),
        (
            "dspark-qwen3-gated",
            {"mask_token_id": 5000},
            {},
            "mask_token_id=5000: expected a token below vocab_size=320",
        ),
        ("dspark-qwen3-gated", {"block_size": 0}, {}, "block_size is 0; expected"),
        ("dspark-qwen3-gated", {"layer_types": ["chunked_attention"]}, {}, "layer_types="),
        ("dspark-qwen3-gated", {"attention_bias": True}, {}, "attention_bias=True is not understood"),
        ("dspark-qwen3-gated", {}, {"layers.0.scale": torch.ones(1)}, r"has layers\.0\.scale, which no part"),
        (
            "dspark-qwen3-gated",
            {"num_hidden_layers": 2, "layer_types": None},
            {},
            r"has no tensor layers\.1\.",
        ),
        (
            "dflash-jetspec-causal",
            {"dflash_config": {"mask_token_id": 1, "shift": 1}},
            {},
            r"dflash_config\.shift=1 is not understood",
        ),
        ("speculators-dspark-inplace", {}, {"d2t": torch.full((200,), 300)}, "leads out of the 320 tokens"),
    ],
)
def test_a_folder_that_no_block_head_computes_is_refused_by_name(tmp_path, kind, settings, tensors, said):
    with pytest.raises(ModelLoadError, match=said):
        BlockCheckpoint.load(oracle.changed(tmp_path, kind, tensors, **settings))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target_layer_ids": [0, 9]}, r"reads the states of layers \[1, 10\], of 6 layers 10 is none"),
        ({"num_target_layers": 36}, "it is for num_target_layers=36, the model has 6"),
    ],
)
def test_a_head_of_a_deeper_target_is_refused(tmp_path, settings, said):
    kind = "dspark-qwen3-gated"
    width = {"fc.weight": torch.zeros(64, 64 * len(settings.get("target_layer_ids", "123")))}
    with pytest.raises(IncompatibleError, match=said):
        BlockModel(
            BlockCheckpoint.load(oracle.changed(tmp_path, kind, width, **settings)), oracle.target(kind)
        )


def test_a_file_of_torch_with_code_in_it_is_refused_and_runs_nothing(tmp_path):
    class Code:
        def __reduce__(self):
            return (tmp_path / "ran").touch, ()

    where = oracle.changed(tmp_path, "dspark-qwen3-gated")
    (where / "model.safetensors").unlink()
    torch.save({"norm.weight": Code()}, where / "pytorch_model.bin")
    with pytest.raises(
        ModelLoadError, match=r"pytorch_model\.bin holds something beside tensors, of which nothing is run"
    ):
        BlockCheckpoint.load(where)
    assert not (tmp_path / "ran").exists()


def test_a_deeper_budget_than_the_block_is_cut_to_it():
    checkpoint, model = model_of("dspark-qwen3-gated")
    drafter = BlockDrafter(model, checkpoint.layers)
    states = oracle.states("dspark-qwen3-gated", checkpoint.layers)
    (state,) = drafter.start([Request("r", tuple(range(5, 12)), SamplingParams(), 0)])
    state.cursor.inject(state.context, 0, states[:6])
    state.cursor.states = states[5:6]
    draft = proposed(drafter, [state], [Budget.fixed(tree.chain(12))])
    assert draft.tree.num_nodes == 1 + model.depths == 6
