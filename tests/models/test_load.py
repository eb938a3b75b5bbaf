import json
from copy import copy
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError, ModelLoadError
from polydraft.models import pair
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.load import (
    check_same_vocabulary,
    encode,
    load_model,
    load_tokenizer,
    num_token_ids,
)
from polydraft.models.loading.matching import check_same_context
from polydraft.models.torch import module as torch_module
from polydraft.models.torch.hf import HFTarget
from tests.models.tree_rounds import small_model
from tests.support.closeness import assert_close
from tests.support.tiny import llama_config

WORDS = ("<s>", "</s>", "<unk>", "a", "b", "c")


@pytest.fixture
def folder(tmp_path):
    config = llama_config(vocab_size=64)
    config.max_position_embeddings = 64
    small_model(config).save_pretrained(tmp_path)
    return tmp_path


def tokenizer(words=WORDS, *, template=None, **roles) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        inner.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | roles
    )


def test_a_folder_loads_compiled_or_through_transformers_with_the_same_logits(folder):
    compiled = load_model(str(folder), backend="compiled", device="cpu", cache_dtype="float32")
    through = load_model(str(folder), backend="transformers", device="cpu")
    assert isinstance(compiled, CompiledModel)
    assert isinstance(through, HFTarget)
    assert (through.max_model_len, through.name) == (64, str(folder))
    ours, theirs = (m.prefill([0], [[1, 2, 3]]).logits for m in (compiled, through))
    assert_close(ours, theirs)


def test_the_constructor_of_the_class_reads_the_same_folder(folder):
    target = load_model(
        str(folder), backend="transformers", dtype="bfloat16", device="cpu", max_model_len=32, max_num_seqs=2
    )
    assert (target.dtype, target.device.type, target.max_model_len, len(target.lengths)) == (
        torch.bfloat16,
        "cpu",
        32,
        2,
    )


def test_the_static_path_is_refused_with_what_to_use(folder):
    with pytest.raises(InvalidInputError, match="Use backend='transformers'"):
        load_model(str(folder), backend="static", device="cpu")


def test_options_of_the_compiled_path_are_refused_elsewhere(folder):
    with pytest.raises(IncompatibleError, match="only the compiled path"):
        load_model(str(folder), backend="transformers", device="cpu", quantization="int8")


def test_a_gpu_takes_models_through_transformers(folder, monkeypatch):
    module = torch_module.load_module(str(folder), device="cpu")
    monkeypatch.setattr(
        torch_module,
        "load_module",
        lambda *_, **__: SimpleNamespace(
            device=torch.device("cuda"), config=module.config, named_parameters=module.named_parameters
        ),
    )
    monkeypatch.setattr(CompiledModel, "why_unsupported", staticmethod(lambda *_: "it is on a GPU"))
    build = HFTarget.__init__
    monkeypatch.setattr(HFTarget, "__init__", lambda self, _, **options: build(self, module, **options))
    assert type(load_model(str(folder))) is HFTarget


@pytest.mark.parametrize(
    "options", [{"dtype": "int8"}, {"dtype": "float31"}, {"device": "nowhere"}, {"backend": "fast"}]
)
def test_an_option_that_does_not_exist_is_refused(folder, options):
    with pytest.raises(InvalidInputError, match=next(iter(options.values()))):
        load_model(str(folder), **options)


def test_a_context_beyond_the_model_is_refused(folder):
    with pytest.raises(CapacityError, match="65 was given; the model's context holds 64"):
        load_model(str(folder), max_model_len=65)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"nowhere.*does not exist"):
        load_model(str(tmp_path / "nowhere"))


def test_a_folder_without_configuration_is_refused(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_model(str(folder))


@pytest.mark.parametrize(
    "text",
    ["{broken", '{"model_type": "unheard_of"}', '{"model_type": "x", "auto_map": {"AutoConfig": "a.B"}}'],
)
def test_a_configuration_that_is_broken_unknown_or_remote_code_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match="configuration"):
        load_model(str(folder))


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no weights in safetensors format.*Copy model\.safetensors"):
        load_model(str(folder))


def test_pickled_weights_are_never_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin, which would be unpickled"):
        load_model(str(folder))


@pytest.mark.parametrize("keep", [0, 7, 5000])
def test_corrupt_weights_are_refused_by_file(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors.*corrupt or cut off"):
        load_model(str(folder))


def test_weights_that_cannot_be_opened_are_not_called_corrupt(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "nowhere")
    with pytest.raises(
        ModelLoadError, match=r"model\.safetensors' cannot be read: No such file or directory\. Check its"
    ):
        load_model(str(folder))


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight"]
)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(folder, name, number):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[3] = number
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=rf"hold NaN or infinity \(tensor '{name}'\)"):
        load_model(str(folder))


def test_incomplete_and_misshapen_weights_are_refused(folder):
    file = folder / "model.safetensors"
    weights = load_file(file)
    taken = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"incomplete.*layers\.1\.mlp\.up_proj"):
        load_model(str(folder))
    save_file(
        weights | {"model.layers.1.mlp.up_proj.weight": taken[:3].clone()}, file, metadata={"format": "pt"}
    )
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        load_model(str(folder))


def test_an_unsupported_kind_is_refused_before_its_weights_are_read(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(
        ModelLoadError, match=r"type 'vit' was given, for which transformers has no causal language model"
    ):
        load_model(str(folder))


def test_the_compiled_backend_says_why_it_does_not_cover_a_model(folder):
    with pytest.raises(IncompatibleError, match="backend='transformers'"):
        load_model(str(folder), backend="compiled", dtype="bfloat16", device="cpu")


@pytest.mark.parametrize("content", [None, "{broken"])
def test_a_tokenizer_that_is_missing_or_broken_is_refused(folder, content):
    if content:
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match="no tokenizer could be loaded"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("template", "text", "ids"),
    [
        (None, "a b", [3, 4]),
        ("<s> $A", "a b", [0, 3, 4]),
        ("<s> $A", "<s> a b", [0, 3, 4]),
        ("<s> $A </s>", "a b", [0, 3, 4]),
        ("<s> $A", "a </s>", [0, 3, 1]),
        ("<s> $A", "", [0]),
        (None, "", []),
    ],
)
def test_bos_comes_once_and_eos_only_where_the_text_has_it(template, text, ids):
    assert encode(tokenizer(template=template), text) == ids


def test_a_tokenizer_that_declares_bos_but_leaves_it_out_gets_it():
    declared = tokenizer()
    declared.add_bos_token = True
    assert encode(declared, "a") == [0, 3]


def test_the_embedded_pair_speaks_one_vocabulary():
    ours = load_tokenizer(str(pair.target_folder()))
    theirs = load_tokenizer(str(pair.draft_folder()))
    assert check_same_vocabulary(ours, theirs, 2048, 2048) == 2048


def test_padded_logits_are_tolerated_and_missing_ones_refused():
    assert check_same_vocabulary(tokenizer(), tokenizer(), 64, 128) == 6
    with pytest.raises(IncompatibleError, match="ids up to 5, but the draft has only 5"):
        check_same_vocabulary(tokenizer(), tokenizer(), 64, 5)


@pytest.mark.parametrize("other", [("<s>", "</s>", "<unk>", "a", "c", "b"), (*WORDS[:5], "d"), (*WORDS, "d")])
def test_different_vocabularies_are_refused_with_the_first_difference(other):
    first = {"b": "'b'|'c'", "d": "'c'|'d'"}[other[-1]]
    with pytest.raises(IncompatibleError, match=f"different vocabularies.*first is ({first})"):
        check_same_vocabulary(tokenizer(), tokenizer(other), 64, 64)


def test_different_special_roles_are_warned_about():
    with pytest.warns(UserWarning, match=r"eos_token is '</s>' in the target and 'c' in the draft"):
        check_same_vocabulary(tokenizer(), tokenizer(eos_token="c"), 64, 64)


def test_a_draft_with_a_shorter_context_is_refused():
    check_same_context(64, 64)
    with pytest.raises(IncompatibleError, match="max_model_len <= 32 for both"):
        check_same_context(64, 32)


@pytest.mark.parametrize(
    "ids", [(0, 1, 2, 3, 4, 5), (0, 1, 2, 9, 4, 12)], ids=["at the end", "between tokens"]
)
def test_ids_without_a_token_are_never_emitted_with_or_without_a_draft(tmp_path, ids):
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(dict(zip(WORDS, ids, strict=True)), "<unk>"))
    )
    for name, size in {"target": 64, "draft": 32}.items():
        config = llama_config(vocab_size=size, num_hidden_layers=1)
        small_model(config).save_pretrained(tmp_path / name)
        words.save_pretrained(tmp_path / name)
    params = SamplingParams(temperature=3.0, max_tokens=40, seed=1, ignore_eos=True, logprobs=3)
    target = str(tmp_path / "target")
    exact = {"max_model_len": 64, "verifier": "race", "cache_dtype": "float32"}
    plain = Engine.from_pretrained(target, drafter=None, **exact).generate([3], params)[0]
    assert {*plain.token_ids} <= {*ids}
    for options in ({}, {"backend": "transformers"}, {"drafter": "ngram"}):
        draft = {} if options.get("drafter") else {"draft_model": str(tmp_path / "draft")}
        through = options | {"cache_dtype": None} if "backend" in options else options
        engine = Engine.from_pretrained(target, **exact | draft | through)
        (result,) = engine.generate([3], params)
        assert result.token_ids == plain.token_ids
        assert result.stats.drafter_error is None
    logits = torch_module.load_module(target)(torch.tensor([[3]])).logits[0, -1, list(ids)].detach()
    log_probs = dict(zip(ids, logits.log_softmax(-1).tolist(), strict=True))
    assert plain.samples[0].logprobs[0].logprob == pytest.approx(log_probs[plain.token_ids[0]], rel=1e-3)


def test_a_pair_asks_its_vocabulary_for_its_tokens_once(monkeypatch):
    words = load_tokenizer(str(pair.target_folder()))
    asked = list[bool]()
    whole = type(words).get_vocab
    monkeypatch.setattr(type(words), "get_vocab", lambda self: asked.append(True) or whole(self))
    assert check_same_vocabulary(words, copy(words), 2048, 2048) == num_token_ids(copy(words), 4096) == 2048
    assert len(asked) == 1
    words.backend_tokenizer.add_tokens(["<new>"])
    assert num_token_ids(words, 4096) == 2049
