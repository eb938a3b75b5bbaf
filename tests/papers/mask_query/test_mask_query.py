"""The Spec-Drafter: what glancing shows, what makes its queries queries, and its drafts in the engine."""

import numpy as np
import pytest
import torch

from polydraft import Engine, SamplingParams
from polydraft.core import Budget, Request
from polydraft.core.geometry import chain
from polydraft.errors import DrafterWarning, IncompatibleError, InvalidInputError, ModelLoadError
from polydraft.methods import registry
from polydraft.models.torch.seq2seq import Seq2SeqTarget
from polydraft.papers.mask_query import MaskQueryDrafter
from polydraft.papers.mask_query.network import MaskQueries, QuerySizes
from polydraft.papers.relaxed.top_beta import TopBeta
from studies.seq2seq.glancing import glancing_loss, reveal, start_of
from tests.models.encoder_decoders import EOS, START, generated, small

GREEDY = SamplingParams(temperature=0, max_tokens=12)
QUERIES = 4
V = 12


def request(source, tokens=(0,)):
    return Request("r", tuple(tokens), GREEDY, 0, source_token_ids=tuple(source))


def drafts(drafter, source, tokens=(0,), depth=QUERIES):
    draft = drafter.propose(drafter.start([request(source, tokens)]), [Budget.fixed(chain(depth))])
    return draft.tree.tokens[0, 1:].tolist()


def pairs(count, seed):
    """Sources of 3 .. 6 tokens, which outputs say backwards, each token followed by one of two that only the next source token tells."""
    draw = torch.Generator().manual_seed(seed)
    sources = [
        torch.randint(2, 7, (int(torch.randint(3, 7, (1,), generator=draw)),), generator=draw).tolist()
        for _ in range(count)
    ]
    return [([*s, 1], [x for a in s[::-1] for x in (a, 7 + a % 5)] + [1]) for s in sources]


@pytest.fixture(scope="module")
def trained():
    """A few seconds of a core: a drafter of random start that learns to write sources backwards."""
    torch.manual_seed(0)
    network = MaskQueries.like(QuerySizes(vocab_size=V, width=32, heads=2, queries=QUERIES), dropout=0.0)
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    data = pairs(400, 0)
    draw = torch.Generator().manual_seed(0)
    pad = torch.nn.utils.rnn.pad_sequence
    for step in range(150):
        some = [data[i] for i in torch.randint(len(data), (32,), generator=draw)]
        source, output = (
            pad([torch.tensor(pair[side]) for pair in some], batch_first=True) for side in (0, 1)
        )
        loss = glancing_loss(network, source, output, step / 150, start=0, pad=0, generator=draw)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval()


@torch.inference_mode()
def tokens_kept(network, mask=None, order=None):
    """Mean drafted tokens that agree with the reference, from the first on, over held-out pairs."""
    kept = []
    held = pairs(60, 1)
    if order is not None:
        network.queries.data = network.queries.data[order]
    for source, output in held:
        memory, hidden = network.read(torch.tensor([source]), torch.ones(1, len(source), dtype=torch.bool))
        blocked = None
        if mask:
            blocked = torch.zeros(1 + QUERIES, 1 + QUERIES, dtype=torch.bool)
            blocked[1:, 1:] = ~torch.eye(QUERIES, dtype=torch.bool)
        guess = (
            network(memory, hidden, torch.tensor([[0]]), torch.tensor([1]), mask=blocked)
            .argmax(-1)[0]
            .tolist()
        )
        kept.append(next((i for i, (a, b) in enumerate(zip(guess, output, strict=False)) if a != b), QUERIES))
    if order is not None:
        network.queries.data = network.queries.data[torch.tensor(order).argsort()]
    return sum(kept) / len(kept)


def test_training_pays_and_queries_need_their_places_and_each_other(trained):
    torch.manual_seed(0)
    fresh = MaskQueries.like(trained.sizes).eval()
    learnt = tokens_kept(trained)
    assert learnt > tokens_kept(fresh) + 1.0
    assert tokens_kept(trained, mask=True) < learnt - 0.2
    assert tokens_kept(trained, order=[1, 0, 3, 2]) < learnt - 0.5


def test_permuted_queries_draft_other_tokens(trained):
    drafter = MaskQueryDrafter(trained)
    source = [3, 4, 5, 6, 1]
    first = drafts(drafter, source)
    trained.queries.data = trained.queries.data[[2, 3, 0, 1]]
    permuted = drafts(drafter, source)
    trained.queries.data = trained.queries.data[[2, 3, 0, 1]]
    assert permuted != first and drafts(drafter, source) == first
    assert len({tuple(q.tolist()) for q in trained.queries}) == QUERIES


def test_glancing_reveals_a_share_of_the_wrong_ones_and_the_loss_is_of_the_others():
    wanted = torch.arange(1, 9)[None]
    guessed = torch.tensor([[1, 2, 0, 0, 0, 0, 0, 8]])
    shown = reveal(wanted, guessed, 0.5, torch.rand(1, 8), ignored=99)
    seen = [i for i, token in enumerate(shown[0].tolist()) if token >= 0]
    assert len(seen) == 2 and set(seen) <= {2, 3, 4, 5, 6}
    assert (reveal(wanted, guessed, 1.0, torch.rand(1, 8), ignored=99) >= 0).sum() == 5
    assert (reveal(wanted, wanted, 1.0, torch.rand(1, 8), ignored=99) >= 0).sum() == 0


def test_a_query_that_is_shown_changes_what_the_others_say(trained):
    source = torch.tensor([[3, 4, 5, 1]])
    memory, hidden = trained.read(source, source > 0)
    given = memory, hidden, torch.tensor([[0]]), torch.tensor([1])
    shown = torch.tensor([[9, -1, -1, -1]])
    assert (trained(*given)[0, 1:] - trained(*given, revealed=shown)[0, 1:]).abs().max() > 1e-3


def test_padding_and_neighbours_do_not_change_a_draft(trained):
    drafter = MaskQueryDrafter(trained)
    rows = [([3, 4, 5, 6, 1], (0,)), ([2, 1], (0, 2)), ([6, 6, 3, 1], (0, 3, 8, 6))]
    together = drafter.propose(
        drafter.start([request(*row) for row in rows]), [Budget.fixed(chain(QUERIES))] * 3
    )
    assert [together.tree.tokens[b, 1:].tolist() for b in range(3)] == [drafts(drafter, *row) for row in rows]


def test_budgets_ends_and_the_window_cut_drafts(trained):
    drafter = MaskQueryDrafter(trained, queries=3)
    assert len(drafts(drafter, [3, 4, 1], depth=2)) == 2 and len(drafts(drafter, [3, 4, 1], depth=9)) == 3
    first = drafts(drafter, [3, 4, 5, 1])[0]
    assert drafts(MaskQueryDrafter(trained, stop_ids=[first]), [3, 4, 5, 1]) == [first]
    assert drafter.propose(drafter.start([request([3])]), [Budget.fixed(chain(0))]).tree.num_nodes == 1
    assert len(drafts(drafter, [3, 4, 1], [0] * 200)) == 3


def build(name="t5", **options):
    target = Seq2SeqTarget(small(name), max_num_seqs=2)
    torch.manual_seed(0)
    network = start_of(target.model, queries=QUERIES)
    return target, MaskQueryDrafter(network, stop_ids=[EOS], **options)


@pytest.mark.parametrize("name", ["t5", "marian"])
def test_greedy_and_relaxed_by_nothing_are_transformers_texts_and_relaxed_is_marked(name):
    target, drafter = build(name)
    sources = [[5, 9, 1], [7, 3, 3, 8, 1], [4, 1]]
    wanted = [generated(target.model, source, 12) for source in sources]
    wanted = [ids[: ids.index(EOS)] if EOS in ids else ids for ids in wanted]
    for rule, params in (
        ("match", GREEDY),
        (TopBeta(registry.verifier("top_beta").info, beta=1), GREEDY.with_(temperature=1.0, seed=0)),
    ):
        results = Engine.of(target, drafter=drafter, verifier=rule, depth=3, eos_token_ids=[EOS]).generate(
            sources, params
        )
        assert [[t for t in r.token_ids if t != EOS] for r in results] == wanted
        assert all(r.stats.drafted_tokens > 0 and r.stats.drafter_error is None for r in results)
    loose = Engine.of(
        target,
        drafter=drafter,
        verifier=TopBeta(registry.verifier("top_beta").info, 60, 50.0),
        depth=3,
        eos_token_ids=[EOS],
    )
    relaxed = loose.generate(sources, GREEDY.with_(temperature=1.0, seed=0))
    assert not any(r.lossless for r in relaxed) and [r.token_ids for r in relaxed] != [
        r.token_ids for r in results
    ]


def test_a_saved_drafter_drafts_as_before_and_starts_from_the_models_encoder(tmp_path):
    target, drafter = build()
    drafter.network.save(tmp_path / "drafter")
    again = registry.drafter("mask-query")(MaskQueries.load(tmp_path / "drafter"))
    assert drafts(again, [3, 4, 1], [START]) == drafts(drafter, [3, 4, 1], [START])
    ours = drafter.network.encoder.state_dict()
    theirs = target.model.get_encoder().state_dict()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    deeper = start_of(target.model, encoder_layers=3)
    assert len(deeper.encoder.block) == 3


def test_what_does_not_fit_is_refused(tmp_path):
    target, drafter = build()
    with pytest.raises(
        InvalidInputError, match=r"queries=9 was given; the network was trained with 4\. Give at most that"
    ):
        MaskQueryDrafter(drafter.network, queries=9)
    with pytest.raises(InvalidInputError, match="without weights"):
        Engine.of(target, drafter="mask-query")
    MaskQueries.like(QuerySizes(vocab_size=9, width=8, heads=2)).save(tmp_path / "small")
    with pytest.raises(IncompatibleError, match="knows 9 tokens and the target 61"):
        Engine.of(target, drafter="mask-query", drafter_options={"weights": tmp_path / "small"})
    (tmp_path / "small" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelLoadError, match="cannot be read as one"):
        MaskQueries.load(tmp_path / "small")
    with pytest.raises(InvalidInputError, match="encoder_layers=1"):
        start_of(target.model, encoder_layers=1)


def test_weights_that_are_no_numbers_switch_the_drafter_off_and_leave_the_text():
    target, drafter = build()
    drafter.network.queries.data[:] = float("nan")
    plain = Engine.of(target, drafter=None, eos_token_ids=[EOS]).generate([[5, 9, 1]], GREEDY)[0]
    with pytest.warns(DrafterWarning, match="'mask-query' has logits that are not finite"):
        result = Engine.of(target, drafter=drafter, depth=3, eos_token_ids=[EOS]).generate(
            [[5, 9, 1]], GREEDY
        )[0]
    assert result.token_ids == plain.token_ids
