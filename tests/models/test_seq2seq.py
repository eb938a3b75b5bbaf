"""Encoder-decoders as targets: the logits of transformers at every node, whatever the sources, the trees and what was accepted."""

import random

import numpy as np
import pytest
import torch
import transformers as hf

from polydraft.core import EncoderDecoder, TokenTree
from polydraft.core.geometry import pad
from polydraft.errors import CapacityError, InvalidInputError, ModelLoadError
from polydraft.models.torch.hf import HFTarget
from polydraft.models.torch.seq2seq import Seq2SeqTarget
from tests.models.encoder_decoders import FAMILIES, START, V, fresh, small
from tests.models.tree_rounds import branch, outcome

EVERY = pytest.mark.parametrize("name", FAMILIES)


def largest(errors):
    return float(np.abs(errors).max())


class Play:
    """Sequences with sources of different lengths that join, grow by random trees with random acceptance, and leave."""

    def __init__(self, model, target):
        self.model = model
        self.target = target
        self.random = random.Random(0)
        self.sources = {}
        self.texts = {}

    def tokens(self, count):
        return [self.random.randrange(V) for _ in range(count)]

    def join(self, *slots):
        self.sources |= {s: self.tokens(self.random.randint(1, 14)) for s in slots}
        self.texts |= {s: [START, *self.tokens(self.random.randint(1, 4))] for s in slots}
        self.target.encode(slots, [self.sources[s] for s in slots])
        self.target.prefill(slots, [self.texts[s][:-1] for s in slots])

    def leave(self, slot):
        self.target.release([slot])
        del self.sources[slot], self.texts[slot]

    def fresh(self, slot, more=()):
        return fresh(self.model, self.sources[slot], [*self.texts[slot], *more])

    def round(self, accept):
        slots = self.random.sample(sorted(self.texts), len(self.texts))
        sizes = [self.random.randint(1, 8) for _ in slots]
        parents = [[-1, *(self.random.randrange(max(0, n - 4), n) for n in range(1, size))] for size in sizes]
        tokens = [[self.texts[s][-1], *self.tokens(size - 1)] for s, size in zip(slots, sizes, strict=True)]
        tree = pad(list(zip(tokens, parents, strict=True)))
        logits = self.target.score(slots, tree).logits
        paths = [
            branch(p, {"all": n - 1, "none": 0, "some": self.random.randrange(n)}[accept])
            for p, n in zip(parents, sizes, strict=True)
        ]
        errors = [
            largest(logits[b, [0, *path]] - self.fresh(s, [tokens[b][n] for n in path])[-len(path) - 1 :])
            for b, (s, path) in enumerate(zip(slots, paths, strict=True))
        ]
        kept = outcome(paths, self.tokens(len(slots)))
        self.target.commit(slots, kept)
        for slot, emitted in zip(slots, kept.emitted(tree), strict=True):
            self.texts[slot] += emitted
        return max(errors)

    def next_error(self):
        slots = sorted(self.texts)
        logits = self.target.score(
            slots, TokenTree.roots(np.array([self.texts[s][-1] for s in slots]))
        ).logits[:, 0]
        return max(largest(logits[b] - self.fresh(s)[-1]) for b, s in enumerate(slots))


def play(name, dtype=torch.float64, **options):
    model = small(name, dtype)
    return Play(model, Seq2SeqTarget(model, max_num_seqs=4, **options))


@EVERY
def test_logits_after_many_rounds_equal_a_fresh_pass_while_sources_join_and_leave(name):
    game = play(name)
    game.join(0, 1, 2, 3)
    errors = []
    for step in range(20):
        errors.append(game.round(("some", "some", "all", "none")[step % 4]))
        if step % 3 == 2:
            game.leave(step % 4)
        if step % 3 == 0 and step:
            game.join(*(s for s in range(4) if s not in game.texts))
        for s in [s for s, text in game.texts.items() if len(text) > 70]:
            game.leave(s)
            game.join(s)
    assert max(errors) < 1e-10
    assert game.next_error() < 1e-10


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_float32_is_as_close_as_its_rounding(name):
    game = play(name, torch.float32)
    game.join(2, 0)
    assert max(game.round(accept) for accept in ("some", "all", "none", "some")) < 1e-4


def test_eager_attention_gives_the_same():
    model = small("t5", torch.float64)
    model.set_attn_implementation("eager")
    game = Play(model, Seq2SeqTarget(model, max_num_seqs=2))
    game.join(0, 1)
    assert game.round("some") < 1e-10


@EVERY
def test_a_tree_whose_nodes_were_placed_by_index_would_be_wrong(name):
    game = play(name)
    game.join(0)
    tokens = [5, 9, 7]
    root = game.texts[0][-1]
    right = game.target.score([0], pad([([root, *tokens], [-1, 0, 0, 2])])).logits[0, 3]
    assert largest(right - game.fresh(0, [9, 7])[-1]) < 1e-10
    assert largest(right - game.fresh(0, tokens)[-1]) > 1e-3


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_source_that_is_read_again_replaces_the_first_and_a_neighbours_stays(name):
    game = play(name)
    game.join(0, 1)
    before = game.target.score([0, 1], TokenTree.roots(np.array([3, 4]))).logits
    game.target.encode([0], [[9, 9, 9]])
    after = game.target.score([0, 1], TokenTree.roots(np.array([3, 4]))).logits
    assert largest(after[0] - before[0]) > 1e-3
    assert largest(after[1] - before[1]) < 1e-12


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_equal_sources_are_read_once_and_every_source_once_a_request(name):
    game = play(name)
    passes = game.target.passes
    game.target.encode([0, 1, 2], [[5, 6], [5, 6], [7]])
    read = game.target._sources
    assert game.target.passes == passes + 1
    assert read[0].keys[0] is read[1].keys[0]
    game.target.prefill([0], [[START, 5]])
    game.target.copy(0, 3, 2)
    assert read[3].keys[0] is read[0].keys[0]


@pytest.mark.parametrize("name", ["t5", "marian"])
def test_a_tree_grown_in_passes_equals_one_pass(name):
    game = play(name)
    game.join(0, 1)
    tokens = [[game.texts[s][-1], 5, 9, 11, 3] for s in (0, 1)]
    tree = pad([(row, [-1, 0, 0, 1, 2]) for row in tokens])
    whole = game.target.score([0, 1], tree).logits
    for since, end in ((0, 1), (1, 3), (3, 5)):
        part = TokenTree(tree.tokens[:, :end], tree.parents[:, :end])
        assert np.allclose(
            game.target.score([0, 1], part, since=since).logits, whole[:, since:end], atol=1e-10
        )
    assert np.allclose(whole[1, 2], game.fresh(1, [9])[-1], atol=1e-10)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_hidden_states_are_the_decoders(name):
    game = play(name)
    game.join(0)
    hidden = game.target.score([0], TokenTree.chain(np.array([[game.texts[0][-1], 5]])), hidden=(0, 2)).hidden
    with torch.no_grad():
        ids = torch.tensor([[*game.texts[0], 5]])
        wanted = game.model(
            input_ids=torch.tensor([game.sources[0]]), decoder_input_ids=ids, output_hidden_states=True
        ).decoder_hidden_states
    assert all(np.allclose(hidden[layer][0], wanted[layer][0, -2:], atol=1e-10) for layer in (0, 2))


def test_the_module_is_left_as_it_was():
    for name in ("t5", "bart"):
        model = small(name)
        before = fresh(model, [3, 4], [START, 5])
        Seq2SeqTarget(model)
        assert np.array_equal(fresh(model, [3, 4], [START, 5]), before)
        assert isinstance(Seq2SeqTarget(model), EncoderDecoder)


def test_banned_ids_have_no_probability_and_a_forced_first_token_begins_the_output():
    model = small("marian")
    model.generation_config.bad_words_ids = [[7], [8, 9]]
    model.generation_config.forced_bos_token_id = 4
    target = Seq2SeqTarget(model)
    assert target.decoder_prompt == (START, 4)
    target.encode([0], [[3]])
    row = target.score([0], TokenTree.roots(np.array([START]))).logits[0, 0]
    assert np.flatnonzero(np.isneginf(row)).tolist() == [7]


def test_what_cannot_be_is_refused():
    target = Seq2SeqTarget(small("bart"), max_source_len=5)
    with pytest.raises(CapacityError, match=r"a source of 6 tokens .* at most 5\. Shorten it"):
        target.encode([0], [[1] * 6])
    with pytest.raises(InvalidInputError, match="an empty source"):
        target.encode([0], [[]])
    with pytest.raises(InvalidInputError, match=r"slot 1 .* has no source"):
        target.score([1], TokenTree.roots(np.array([START])))
    with pytest.raises(ModelLoadError, match="Seq2SeqTarget"):
        HFTarget(small("bart"))
    headless = small("t5")
    headless.config.decoder_start_token_id = headless.generation_config.decoder_start_token_id = None
    with pytest.raises(ModelLoadError, match=r'no decoder start token; .*Write "decoder_start_token_id"'):
        Seq2SeqTarget(headless)
    with pytest.raises(ModelLoadError, match="no encoder"):
        Seq2SeqTarget(hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)))
