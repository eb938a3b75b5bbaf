"""Keys and values in bfloat16: another distribution, the same one for plain and for speculative decoding, in half the memory."""

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from polydraft import Engine, SamplingParams
from polydraft.core import Outcome, TokenTree
from polydraft.core import geometry as tree
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models import load, pair
from polydraft.models.compiled.llama import CompiledLlama
from tests.models.test_llama import _step, model

TEXT = np.random.default_rng(2).integers(0, 61, 90).tolist()


def halved(reference, **options):
    return CompiledLlama(reference, cache_dtype="bfloat16", **options)


def _rounded(module, query, key, value, *arguments, **options):
    return eager_attention_forward(module, query, *(x.bfloat16().float() for x in (key, value)), *arguments, **options)


@torch.inference_mode()
def test_the_distribution_is_that_of_rounded_keys_and_values():
    reference = model("llama")
    AttentionInterface.register("rounded", _rounded)
    AttentionMaskInterface.register("rounded", eager_mask)
    fast = halved(reference, max_num_seqs=1)
    exact = reference(torch.tensor([TEXT])).logits[0, -30:]
    reference.set_attn_implementation("rounded")
    fast.prefill([0], [TEXT[:-30]])
    found = fast.score([0], TokenTree.chain(torch.tensor([TEXT[-30:]]))).logits[0]
    rounded = reference(torch.tensor([TEXT])).logits[0, -30:]
    assert (found - rounded).abs().max() < 0.1 * (found - exact).abs().max()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@torch.inference_mode()
def test_a_rows_bits_depend_on_its_own_path_alone(name):
    fast = halved(model(name), max_num_seqs=2, threads=2)
    fast.prefill([0, 1], [TEXT[:-30]] * 2)
    plain = torch.stack([_step(fast, 1, token) for token in TEXT[-30:]])
    assert torch.equal(fast.score([0], TokenTree.chain(torch.tensor([TEXT[-30:]]))).logits[0], plain)
    assert torch.equal(fast.prefill([0], [TEXT[-30:]]).logits[0, 0], plain[-1])


@torch.inference_mode()
def test_columns_that_move_by_an_odd_number_keep_their_bits():
    """A column of a value shares its words with its neighbour: siblings that are dropped shift by one, and by two."""
    fast = halved(model("llama"), max_num_seqs=3)
    for slot, length in ((0, 50), (1, 51)):
        fast.prefill([slot], [TEXT[:length]])
        follows = TEXT[length : length + 3]
        drafted = [follows[0], 7, 9, follows[1], 8, follows[2], 5]
        fast.score([slot], tree.pad([(drafted, [-1, 0, 0, 0, 1, 3, 5])]))
        fast.commit([slot], Outcome(torch.tensor([[3, 5]]), torch.tensor([2]), torch.tensor([0])))
        fast.prefill([2], [TEXT[: length + 3]])
        assert torch.equal(_step(fast, slot, 3), _step(fast, 2, 3))
        fast.release([2])
        fast.copy(slot, 2, length + 3)
        assert torch.equal(fast.score([2], TokenTree.roots(torch.tensor([3]))).logits[0, 0], _again(fast, slot, length + 3))
        fast.release([2])


def _again(fast, slot, length):
    fast.cut(slot, length)
    return fast.score([slot], TokenTree.roots(torch.tensor([3]))).logits[0, 0]


def test_it_takes_half_the_memory_and_drafts_change_no_token():
    options = {"max_num_seqs": 2, "max_model_len": 256}
    plain, drafted = (Engine.embedded(drafter=d, cache_dtype="bfloat16", **options) for d in (None, "ngram"))
    whole = Engine.embedded(drafter=None, **options)
    assert 2 * plain.summary()["cache_bytes"] == whole.summary()["cache_bytes"]
    params = SamplingParams(temperature=0, max_tokens=48)
    prompt = "import os\nimport sys\nimport os\nimport"
    assert plain.generate(prompt, params)[0].token_ids == drafted.generate(prompt, params)[0].token_ids


def test_what_cannot_be_is_refused():
    folder = str(pair.draft_folder())
    with pytest.raises(InvalidInputError, match="cache_dtype='int8' was given; expected one of 'float32', 'bfloat16'"):
        load.load_model(folder, cache_dtype="int8")
    with pytest.raises(IncompatibleError, match=r"cache_dtype='bfloat16' was asked for .* only the compiled path has it"):
        load.load_model(folder, cache_dtype="bfloat16", backend="transformers")
