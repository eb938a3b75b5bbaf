"""Training an EAGLE-3 head: it learns, it is taken up again, and what cannot be trained is refused."""

import json

import numpy as np
import pytest
import torch

from polydraft import Engine, SamplingParams
from polydraft.errors import IncompatibleError, InvalidInputError, ModelLoadError
from polydraft.train import conversations
from polydraft.train.conversations import Text
from polydraft.train.eagle import EagleHead, EagleRecipe, HeadShape
from polydraft.train.recipe import Batch
from polydraft.train.run import Options, draft_vocabulary, train_drafter


@pytest.fixture(scope="module")
def engine():
    return Engine.embedded(draft=None, drafter=None, max_num_seqs=8, max_model_len=512)


@pytest.fixture(scope="module")
def written(engine, tmp_path_factory):
    """Texts of the target, as a shard."""
    path = tmp_path_factory.mktemp("texts") / "00000.npz"
    prompts = [[engine.target.bos_token_id or 0]] * 16
    results = engine.generate(prompts, SamplingParams(max_tokens=96, seed=5, temperature=0.7, ignore_eos=True))
    conversations.save_shard(path, [Text(np.array([0, *r.token_ids]), 1) for r in results])
    return path


def test_a_trained_head_foretells_more_than_a_fresh_one(engine, written, tmp_path):
    options = Options(minutes=5, unroll=2, draft_vocab=512, batch=8, window=64, lr=0.02)
    short, said = {}, []
    for name, steps in (("fresh", 1), ("trained", 40)):
        chosen = Options(**{**options.__dict__, "max_steps": steps})
        short[name] = train_drafter(engine, "eagle", tmp_path / name, chosen, data=[written], report=said.append)
    fresh, trained = (short[name]["acceptance"] for name in ("fresh", "trained"))
    assert trained[0] > fresh[0] + 0.05, (fresh, trained)
    card = json.loads((tmp_path / "trained" / "card.json").read_text())
    assert card["tokens"] == 16 * 97
    assert len(card["acceptance"]) == 3
    assert any("MB" in line for line in said)
    again = train_drafter(engine, "eagle", tmp_path / "trained", Options(**{**options.__dict__, "max_steps": 41}), data=[written])
    assert abs(again["acceptance"][0] - trained[0]) < 0.1, "it goes on from its checkpoint"
    drafted = Engine.of(
        engine.target, tokenizer=engine.tokenizer, drafter="eagle", drafter_options={"weights": tmp_path / "trained"}, depth=2
    )
    greedy = SamplingParams(temperature=0, max_tokens=48)
    prompt = "def add(a, b):\n"
    result = drafted.generate(prompt, greedy)[0]
    assert result.token_ids == engine.generate(prompt, greedy)[0].token_ids
    assert result.stats.accepted > 0
    assert result.stats.drafter_error is None


def test_texts_of_a_shard_are_a_function_of_the_seed(engine, tmp_path):
    one, two, other = (conversations.write_shard(engine, 3, seed=seed, count=2, known=set()) for seed in (1, 1, 2))
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(one, two, strict=True))
    assert not all(np.array_equal(a.tokens, b.tokens) for a, b in zip(one, other, strict=True))
    conversations.save_shard(tmp_path / "a.npz", one)
    assert [t.tokens.tolist() for t in conversations.read_shard(tmp_path / "a.npz")] == [t.tokens.tolist() for t in one]


def test_the_second_step_reads_the_first_ones_output_and_sees_no_future():
    torch.manual_seed(0)
    head = EagleHead(HeadShape(16, 32, 2, 1, 8, (0, 1), 1e-5, 1e4), torch.randn(24, 16), torch.randn(24, 16))
    for matrix in head.parameters():
        torch.nn.init.normal_(matrix)
    tokens, features = torch.randint(0, 24, (1, 9)), torch.randn(1, 9, 32)
    length = 6

    def second(tokens, features):
        lines = []
        states = head.step(tokens[:, 1 : 1 + length], head.fc(features[:, :length]), lines)
        return head.step(tokens[:, 2 : 2 + length], states, lines)

    with torch.no_grad():
        whole = second(tokens, features)
        for t in range(length):
            later, changed = tokens.clone(), features.clone()
            later[:, t + 3 :] = 0
            changed[:, t + 1 :] = 0
            torch.testing.assert_close(second(later, changed)[:, t], whole[:, t])
            own, past = tokens.clone(), features.clone()
            own[:, t + 1] = (own[:, t + 1] + 1) % 24
            past[:, t] += 1
            assert (second(own, features)[:, t] - whole[:, t]).abs().max() > 1e-3
            assert (second(tokens, past)[:, t] - whole[:, t]).abs().max() > 1e-3


def test_the_loss_is_least_where_the_head_has_the_targets_law():
    torch.manual_seed(0)
    head = EagleHead(HeadShape(16, 32, 2, 1, 8, (0, 1), 1e-5, 1e4), torch.randn(24, 16), torch.randn(24, 16))
    tokens, features = torch.randint(0, 24, (1, 9)), torch.randn(1, 9, 32)
    counted = torch.ones(1, 9, dtype=torch.bool)
    with torch.no_grad():
        states = head.step(tokens[:, 1:8], head.fc(features[:, :7]), [])
        laws = torch.zeros(1, 9, 24)
        laws[:, 1:8] = head.logits(states).softmax(-1)
        loss, kept, agreed = EagleRecipe().loss(head, Batch(tokens, features, laws, counted), steps=1, tv_weight=0)
        entropy = -(laws[:, 1:8] * laws[:, 1:8].log()).sum(-1).mean()
        assert kept[0] == pytest.approx(1)
        assert agreed[0] == 1
        assert float(loss) == pytest.approx(float(entropy), rel=1e-4)
        other = Batch(tokens, features, torch.full_like(laws, 1 / 24), counted)
        flat, worse, _ = EagleRecipe().loss(head, other, steps=1, tv_weight=0)
        assert worse[0] < 0.9
        assert float(flat) > float(torch.tensor(24.0).log())


def test_the_draft_vocabulary_is_the_most_frequent_tokens():
    ids, share = draft_vocabulary([Text(np.array([7, *[3] * 5, *[9] * 4, 1, 1, 2]), 1)], 64, 8)
    assert len(ids) == 8
    assert {1, 2, 3, 9} <= set(ids.tolist())
    assert (np.diff(ids) > 0).all()
    assert share == 1


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (Options(minutes=0.1), InvalidInputError, "at least 1"),
        (Options(layers=(1, 2, 77)), InvalidInputError, "77"),
    ],
)
def test_what_cannot_be_trained_is_refused(engine, written, tmp_path, options, error, said):
    with pytest.raises(error, match=said):
        train_drafter(engine, "eagle", tmp_path, options, data=[written])


def test_files_without_a_usable_line_are_refused(engine, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"nothing": 1}\nno json\n')
    with pytest.raises(InvalidInputError, match="usable line"):
        conversations.from_file(tmp_path / "a.jsonl", engine)
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04 and nothing else")
    with pytest.raises(ModelLoadError, match="no shard"):
        conversations.from_file(tmp_path / "b.npz", engine)
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "import os\n" * 40}) + "\n")
    assert conversations.from_file(tmp_path / "c.jsonl", engine)


def test_a_target_without_hidden_states_is_refused(engine, tmp_path):
    from types import SimpleNamespace

    from polydraft.core import Needs

    blind = SimpleNamespace(target=SimpleNamespace(offers=Needs()), summary=lambda: {"target": "blind"})
    with pytest.raises(IncompatibleError, match="blind"):
        train_drafter(blind, "eagle", tmp_path, Options())
