"""The arithmetic of the study of several drafts, on the embedded pair."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polydraft.core import TreeShape
from polydraft.methods import registry
from polydraft.models import load, pair
from polydraft.models.compiled.llama import CompiledLlama
from studies.several_drafts import verified
from studies.several_drafts.__main__ import main, size_name
from studies.several_drafts.costs import NUM_ROWS, TARGET, StepCosts
from studies.several_drafts.draws import MAX_DEPTH, DraftTree, draw_trees, side_by_side, with_spares
from studies.several_drafts.measure import Group, checkpoint_of, measure, stored_context, without_layers
from studies.several_drafts.rows import RowStore, joined
from studies.several_drafts.texts import Context
from studies.several_drafts.two_bits import in_two_bits, two_bit_blocks, zero_padded
from studies.theory import efficiency

OPTIONS: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 2, "threads": 1, "cache_dtype": "float32"}


@pytest.fixture(scope="module")
def stores():
    """The embedded pair's rows behind one context."""
    context = tuple(load.encode(load.load_tokenizer(str(pair.target_folder())), pair.prompts()[0].text))[:64]
    both = [RowStore(load.load_model(str(f), **OPTIONS), 2048) for f in (pair.target_folder(), pair.draft_folder())]
    for rows in both:
        rows.open(context)
    return context, *both


@pytest.fixture(scope="module")
def trees(stores):
    return draw_trees(stores[2], "draft", (1.0,), seed=3, depth=4)


def test_rows_that_grow_in_one_tree_are_those_of_the_text_read_anew(stores, trees):
    context, target, _ = stores
    prefixes = sorted({prefix for tree in trees.values() for prefix in tree.prefixes}, key=len)
    target.fill(prefixes[:5])
    target.fill(prefixes)
    again = load.load_model(str(pair.target_folder()), **OPTIONS)
    for prefix in (prefixes[0], prefixes[7], prefixes[-1]):
        again.release([0])
        expected = again.prefill([0], [[*context, *prefix]]).logits[0, -1, :2048].softmax(-1).numpy()
        np.testing.assert_allclose(target.probs(prefix, 1.0), expected, atol=1e-6)


def test_trees_are_drawn_as_their_kind_says(stores, trees):
    q = stores[2].probs((), 1.0)
    roots = {key[1:]: [t for t, d in zip(tree.tokens, tree.depths, strict=True) if d == 1] for key, tree in trees.items()}
    assert len(set(roots["without_replacement", 4])) == 4
    assert roots["greedy_plus_one", 3][:2] == np.argsort(-q, kind="stable")[:2].tolist()
    assert roots["greedy_plus_one", 3][2] not in roots["greedy_plus_one", 3][:2]
    counts = np.bincount(roots["systematic", 4], minlength=len(q))
    assert ((counts == np.floor(4 * q)) | (counts == np.ceil(4 * q))).all()
    assert all(len(tree.tokens) == 1 + key[2] * 4 for key, tree in trees.items())


def test_joined_columns_change_no_verifier_by_more_than_they_say(stores, trees):
    _, target, draft = stores
    tree = trees[1.0, "iid", 4]
    target.fill(tree.prefixes)
    draft.fill(tree.prefixes)
    whole, few, lost = [], [], []
    for kept, part in ((2048, whole), (400, few)):
        rows, columns = {}, {}
        for n in tree.inner():
            children = [tree.tokens[m] for m, u in enumerate(tree.parents) if u >= 0 and tree.prefixes[u] == tree.prefixes[n]]
            rows[n], columns[n], moved = joined(
                [target.probs(tree.prefixes[n], 1.0), draft.probs(tree.prefixes[n], 1.0)], children, kept
            )
            lost.append(moved)
        width = max(row.shape[1] for row in rows.values())
        place = {n: i for i, n in enumerate(rows)}
        wide = np.stack([np.pad(row, ((0, 0), (0, width - row.shape[1]))) for row in rows.values()])
        tokens = [0, *(columns[u][t] for t, u in zip(tree.tokens[1:], tree.parents[1:], strict=True))]
        at = [place.get(n, -1) for n in range(len(tree.tokens))]
        stored = np.array([tokens, tree.parents, tree.paths, tree.depths, at, tree.sources])
        draft_tree, p = verified.drafted([stored], [wide], verified.RULES["iid"][0], TreeShape.PATHS)
        names = set(verified.RULES["iid"][1]) - {
            "importance"
        }  # of equally good selections it may take another one: the same on the mean
        part += [efficiency.expected_tokens(draft_tree, registry.verifier(name)(draft_tree, p))[0] for name in sorted(names)]
    assert few == pytest.approx(whole, abs=4 * 2 * max(lost))
    assert max(lost) < 0.02


def test_a_chain_is_accepted_token_by_token_with_min_p_over_q(stores):
    _, target, draft = stores
    group = Group(target, [draft], 1.0)
    group.trees = {("iid", 4): draw_trees(draft, "draft", (1.0,), seed=5)[1.0, "iid", 4]}
    for rows in (target, draft):
        rows.fill(group.trees["iid", 4].prefixes)
    arrays = group.arrays()
    stored = arrays["iid/4"]
    chain = stored[:, (stored[verified.PATH] == 2) | (stored[verified.DEPTH] == 0)]
    p, q = arrays["rows"][chain[verified.AT, :-1], :, chain[0, 1:]].astype(float).T
    chain[verified.PARENT] = np.arange(-1, MAX_DEPTH)
    draft_tree, target_probs = verified.drafted([chain], [arrays["rows"]], *(verified.RULES["chain"][0], TreeShape.CHAIN))
    verdict = registry.verifier("speculative")(draft_tree, target_probs)
    by_hand = 1 + np.minimum(1.0, p / q).cumprod().sum()
    assert efficiency.expected_tokens(draft_tree, verdict)[0] == pytest.approx(by_hand)


def test_the_bound_of_one_path_is_what_block_verification_accepts_on_the_mean():
    """Two tokens: all chains are enumerated."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    rows, bounds, accepted = np.stack([[p, q]] * 3), 0.0, 0.0
    for x in (0, 1):
        for y in (0, 1):
            tree = np.array([[0, x, y], [-1, 0, 1], [0, 0, 0], [0, 1, 2], [0, 1, 2], [0, 0, 0]])
            draft_tree, target_probs = verified.drafted([tree], [rows], *(verified.RULES["chain"][0], TreeShape.CHAIN))
            tokens = efficiency.expected_tokens(draft_tree, registry.verifier("block")(draft_tree, target_probs))[0]
            bounds += q[x] * q[y] * verified.bound(tree, rows, 1)[1]
            accepted += q[x] * q[y] * tokens
    assert bounds == pytest.approx(accepted) == pytest.approx(1 + 11 / 9)


def test_two_drafts_side_by_side_may_differ_in_length(stores):
    tree = side_by_side([5, 6, 7], [5, 9])
    assert tree.prefixes[1:] == [(5,), (5,), (5, 6), (5, 9), (5, 6, 7)]
    assert tree.sources == [0, 0, 1, 0, 1, 0] == tree.paths


def test_spares_hang_beside_the_chain_and_distinct_ones_differ_from_it(stores):
    draft = stores[2]
    chain = draw_trees(draft, "draft", (1.0,), seed=1, depth=3)[1.0, "iid", 4].prefixes
    path = next(prefix for prefix in chain if len(prefix) == 3)
    draft.fill([path[:n] for n in range(3)])
    tree = with_spares(draft, "draft", 1.0, 1, path, distinct=True)
    assert len(tree.tokens) == 1 + 3 * 4
    assert all(len(set(nodes)) == len(nodes) for nodes in _siblings(tree))


def _siblings(tree: DraftTree):
    return [[tree.tokens[n] for n, parent in enumerate(tree.parents) if parent == u] for u in tree.inner()]


def test_a_model_without_its_last_layers_is_the_model_that_ends_there():
    few = CompiledLlama(without_layers(checkpoint_of(str(pair.target_folder())), [3, 4, 5, 6, 7]), **OPTIONS)
    whole: Any = load.load_model(str(pair.target_folder()), **OPTIONS)
    layers = len(whole.weights.attention_norm)
    assert len(few.weights.attention_norm) == layers - len(set(range(3, 8)) & set(range(layers)))
    states = [m.prefill([0], [[5, 6, 7]], hidden=[2]).hidden[2] for m in (few, whole)]
    assert torch.equal(*states)


def test_blocks_of_two_bits_are_read_as_the_gguf_package_reads_them_and_lose_little():
    from gguf import GGMLQuantizationType, quants

    weights = torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    raw = two_bit_blocks(weights)
    assert raw.shape == (5, 2) and 8 * raw.itemsize / 256 == 2.625
    read = torch.from_numpy(quants.dequantize(raw.view(np.uint8).reshape(5, -1), GGMLQuantizationType.Q2_K))
    assert float((read - weights).norm() / weights.norm()) < 0.29  # the best four values of a normal distribution: 0.34
    exact = 0.25 * torch.randint(0, 4, (3, 256), generator=torch.Generator().manual_seed(1)) - 0.25
    raw = two_bit_blocks(exact)
    read = torch.from_numpy(quants.dequantize(raw.view(np.uint8).reshape(3, -1), GGMLQuantizationType.Q2_K))
    torch.testing.assert_close(read, exact, atol=1e-3, rtol=0)


def test_dimensions_of_zeros_change_no_logit():
    files = checkpoint_of(str(pair.draft_folder()))
    padded = zero_padded(files, 384)
    assert {padded.config.hidden_size % 384, padded.config.intermediate_size % 384} == {0}
    assert padded.outlines["model.layers.0.self_attn.o_proj.weight"].shape[1] % 384 == 0
    logits = [CompiledLlama(model, **OPTIONS).prefill([0], [[5, 6, 7, 8]]).logits for model in (files, padded)]
    torch.testing.assert_close(*logits, atol=2e-4, rtol=1e-4)


def test_a_model_of_two_bits_has_them_in_every_matrix_and_stays_near():
    files = checkpoint_of(str(pair.target_folder()))
    coarse, whole = (CompiledLlama(model, **OPTIONS) for model in (in_two_bits(files), files))
    assert coarse.weights.down.formats == coarse.weights.qkv.formats == coarse.weights.head.formats == {"Q2_K"}
    p, q = (model.prefill([0], [list(range(40, 72))]).logits[0, -1].softmax(-1) for model in (whole, coarse))
    assert 0.5 < float(torch.minimum(p, q).sum()) < 0.999


def test_seconds_of_a_step_are_draft_passes_and_one_pass_of_all_rows():
    passes = {TARGET: [float(n) for n in NUM_ROWS], "small": [0.1 * n for n in NUM_ROWS]}
    costs = StepCosts(passes)
    assert costs.seconds("small", "iid", [1, 2, 3], 2) == pytest.approx(0.1 + 0.2 + 6.0)
    assert costs.seconds("small", "iid spares", [1, 2, 3], 2) == pytest.approx(0.1 + 0.1 + 6.0)
    assert costs.seconds("small + n-gram", "independent", [1, 2, 1], 2) == pytest.approx(0.2 + 4.0)
    assert StepCosts(passes, free_rows=True).seconds("small", "iid", [1, 2, 3], 2) == pytest.approx(0.2 + 1.0)


def test_names_of_draft_models():
    assert size_name("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf") == "0.5B"
    assert size_name("/models/bert") == "draft model"


def test_a_quick_run_writes_page_and_plot_and_keeps_what_is_there(tmp_path: Path):
    main(out=tmp_path, quick=True)
    rows = sorted((tmp_path / "rows").glob("*.npz"))
    times = [file.stat().st_mtime_ns for file in rows]
    assert len(rows) == 8
    main(out=tmp_path, quick=True)
    (tmp_path / "several-drafts.md").unlink()
    main(out=tmp_path, quick=True, only_report=True)
    assert times == [file.stat().st_mtime_ns for file in rows]
    page = (tmp_path / "several-drafts.md").read_text()
    assert "| two bits |" in page and "Where does the second path pay?" in page
    tokens = list(csv.DictReader((tmp_path / "several-drafts-tokens.csv").open()))
    assert {"flow", "block", "traversal"} <= {row["verifier"] for row in tokens} and all(
        float(row["tokens"]) >= 1 for row in tokens
    )
    speeds = list(csv.DictReader((tmp_path / "several-drafts-speed.csv").open()))
    assert {row["rows"] for row in speeds} == {"measured", "free"} and all(float(row["speed"]) > 0 for row in speeds)
    assert (tmp_path / "several-drafts.png").stat().st_size > 10_000


def test_draft_models_that_a_file_lacks_are_added_to_its_context(stores, tmp_path: Path):
    context, target, draft = stores
    file = tmp_path / "000-0.npz"
    measure(Context("code", 0, context), target, {"draft": draft}, (1.0,), 0, file)
    before = dict(np.load(file))
    assert stored_context(file) == Context("code", 0, context)
    measure(stored_context(file), target, {"draft": draft, "other": draft}, (1.0,), 0, file)
    after = dict(np.load(file))
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert {name for name in after if name not in before} == {
        n.replace("draft|", "other|") for n in before if n.startswith("draft|")
    }


def test_a_context_is_written_whole_or_not_at_all(stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    context, target, draft = stores

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space"):
        measure(Context("code", 0, context), target, {"draft": draft}, (1.0,), 0, tmp_path / "000-0.npz")
    assert not list(tmp_path.glob("*.npz"))
