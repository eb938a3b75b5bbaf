"""Every registered lossless verifier keeps the target's law exactly, for every sibling law and shape that it declares."""

import pytest
import torch
from harness import SHAPES, Tables, as_batch, enumerate_drafts, measure

from polydraft import registry, verify
from polydraft.core import SiblingLaw, TreeShape
from polydraft.errors import IncompatibleError

RULES = {name: registry.verifier(name) for name in registry.names("verifier")}
EXACT = {name: rule for name, rule in RULES.items() if rule.info.lossless and not rule.info.shared_noise}
PAIRS = [
    (n, law, shape)
    for n, r in EXACT.items()
    for law in SiblingLaw
    for shape in TreeShape
    if law in r.info.laws and shape in r.info.shapes
]


@pytest.mark.parametrize("V", [3, 4, 5])
@pytest.mark.parametrize(("name", "law", "shape"), PAIRS, ids=lambda x: x if isinstance(x, str) else x.name)
def test_verifier_keeps_the_target_law_exactly(name, law, shape, V):
    for label, counts, depth in SHAPES[shape]:
        for seed in range(12):
            found = measure(RULES[name], Tables(V, seed), law, shape, counts, depth)
            assert found.error < 1e-12, f"{label}, seed {seed}: {found}"


@pytest.mark.parametrize(("name", "law", "shape"), PAIRS, ids=lambda x: x if isinstance(x, str) else x.name)
def test_verdict_is_a_law_over_nodes_without_mass_on_padding_or_copies(name, law, shape):
    from polydraft import tree

    tables = Tables(3, 1)
    _, counts, depth = SHAPES[shape][0]
    draft, p = as_batch(tables, law, shape, enumerate_drafts(tables, law, counts, depth))
    stop = RULES[name](draft, p).stop
    first = tree.first_copies(draft.tree)
    assert torch.allclose(stop.sum(1), torch.ones(len(stop), dtype=torch.float64), atol=1e-14)
    assert (stop[~draft.tree.is_node] == 0).all()
    assert (stop[first != torch.arange(draft.tree.num_nodes)] == 0).all()


@pytest.mark.parametrize("name", sorted(RULES))
def test_undeclared_drafts_are_refused(name):
    tables, info = Tables(3, 0), RULES[name].info
    for law in SiblingLaw:
        for shape in TreeShape:
            if law in info.laws and shape in info.shapes:
                continue
            _, counts, depth = SHAPES[shape][0]
            draft, p = as_batch(tables, law, shape, enumerate_drafts(tables, law, counts, depth)[:1])
            with pytest.raises(IncompatibleError, match=name):
                verify(name, draft, p)


@pytest.mark.parametrize("name", sorted(EXACT))
def test_empty_draft_emits_the_target_law(name):
    from polydraft.core import Draft

    p = torch.tensor([[[0.2, 0.3, 0.5]]])
    verdict = RULES[name](Draft.empty(torch.tensor([0])), p)
    assert verdict.stop.tolist() == [[1.0]]
    assert torch.allclose(verdict.after(torch.tensor([0])), p[:, 0].double())
