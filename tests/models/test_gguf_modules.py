"""GGUF files of architectures that only transformers runs: texts with drafts, faults by name, memory before weights."""

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from polydraft import Engine, SamplingParams
from polydraft.errors import CapacityError, ModelLoadError
from polydraft.models import memory
from polydraft.models.load import load_model
from polydraft.models.loading.gguf import GgufWeights
from polydraft.models.networks import NETWORKS
from polydraft.models.store.gguf import GgufStore
from polydraft.models.torch import module as torch_module
from polydraft.models.torch.module import module_of_file

FOLDER = Path(__file__).parent / "oracle_gguf"
FILES = {path.stem: path for path in FOLDER.glob("*.gguf")}
OF_EACH_KIND = ("deepseek2", "gemma4", "mixtral", "nemotron_h", "qwen35")


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_texts_with_drafts_are_those_without(name):
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompt = [7, 8, 9, 7, 8, 9, 7, 8]
    options = {"device": "cpu", "backend": "transformers", "max_num_seqs": 1, "max_model_len": 64}
    plain, drafted = (
        Engine.from_pretrained(str(FILES[name]), drafter=drafter, depth=3, **options)
        for drafter in (None, "ngram")
    )
    (ours,), (theirs,) = (engine.generate(prompt, greedy) for engine in (drafted, plain))
    assert ours.token_ids == theirs.token_ids and ours.stats.drafted_tokens > 0


def changed(tmp_path, name, *edits):
    """A file with bytes replaced: each edit finds a text, and writes behind it, or over it."""
    data = bytearray(FILES[name].read_bytes())
    for text, skip, new in edits:
        at = data.index(text) + skip
        data[at : at + len(new)] = new
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(data)
    return path


def of_number(key, number):
    return key.encode(), len(key) + 4, struct.pack("<I", number)


def of_tensor(name, *, shape=(), kind=None):
    """Sizes, in the file's order, or the format of a tensor, whose entry begins with its name."""
    if kind is None:
        return name.encode(), len(name) + 4, struct.pack(f"<{len(shape)}Q", *shape)
    return name.encode(), len(name) + 4 + 8 * len(shape), struct.pack("<I", kind)


FAULTS: dict[str, tuple[tuple[Any, ...], list[str]]] = {
    "missing tensor": (
        ("blk.1.attn_q_a.weight", "blk.1.attn_x_a.weight"),
        ["'blk.1.attn_q_a.weight'", "q_a_proj"],
    ),
    "another shape": (
        of_tensor("blk.1.ffn_up_exps.weight", shape=(32, 64, 8)),
        ["'blk.1.ffn_up_exps.weight' has the shape (64, 32)", "expected (32, 64)"],
    ),
    "unread format": (of_tensor("blk.1.ffn_up_exps.weight", shape=(0, 0, 0), kind=41), ["Q1_0", "Q4_K"]),
    "experts that do not fit": (
        of_number("deepseek2.expert_count", 16),
        ["it has 16 experts by its settings, and 8 in its tensor 'blk.1.ffn_gate_exps.weight'"],
    ),
    "more experts chosen": (of_number("deepseek2.expert_used_count", 9), ["it chooses 9 of 8 experts"]),
    "more layers": (of_number("deepseek2.block_count", 5), ["no tensor 'blk.4."]),
    "fewer layers": (of_number("deepseek2.block_count", 3), ["'blk.3.attn_k_b.weight'"]),
    "a gate that is not read": (
        of_number("deepseek2.expert_gating_func", 3),
        ["expert_gating_func is 3; expected 1 (softmax) or 2 (sigmoid)"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_before_a_weight_is_read(tmp_path, fault, monkeypatch):
    edit, words = FAULTS[fault]
    edit = (edit[0].encode(), 0, edit[1].encode()) if len(edit) == 2 else edit
    monkeypatch.setattr(torch_module, "_tensors", None)
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(changed(tmp_path, "deepseek2", edit)), device="cpu", max_num_seqs=1)
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_architecture_that_nothing_reads_is_told_with_those_that_are_read(tmp_path):
    path = changed(tmp_path, "olmo2", (b"general.architecture", 20 + 4 + 8, b"olmo9"))
    with pytest.raises(
        ModelLoadError, match=r"its architecture is 'olmo9'; expected one of .*llama, .*olmo2.*starcoder2"
    ):
        load_model(str(path), device="cpu", max_num_seqs=1)


def test_weights_that_do_not_fit_are_refused_with_both_numbers_or_kept_in_half_the_bytes(monkeypatch):
    file = GgufWeights.of(FILES["olmo2"])
    sizes = [weight.numel() for weight in module_of_file(file).parameters()]
    monkeypatch.setattr(torch_module, "usable_cores", lambda: 1)
    num_weights = sum(sizes)
    largest = 8 * max(sizes)
    monkeypatch.setattr(torch_module, "_tensors", None)
    monkeypatch.setattr(memory, "available_bytes", lambda device: num_weights)
    with pytest.raises(
        CapacityError,
        match=r"take 0\.00 GiB in float32 or 0\.00 GiB in bfloat16, and 0\.00 GiB of memory are free",
    ):
        module_of_file(file)
    monkeypatch.undo()
    monkeypatch.setattr(torch_module, "usable_cores", lambda: 1)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2 * num_weights + largest)
    with pytest.warns(UserWarning, match="runs in bfloat16: its weights take"):
        assert module_of_file(file).dtype == torch.bfloat16
    with pytest.raises(CapacityError):
        module_of_file(file, torch.float32)


def test_every_architecture_has_a_file_that_somebody_else_wrote():
    through_transformers = {
        name for network in NETWORKS.values() if network.lacks for name in network.gguf_names
    }
    assert {GgufStore(path).architecture for path in FILES.values()} >= through_transformers
