"""The numbers of the oracle file, reproduced by closed forms and by the rules themselves."""

import numpy as np
import pytest

from polydraft.core import DraftSampling, TreeShape
from polydraft.core import geometry as tree
from polydraft.core.arrays import scatter
from polydraft.methods import registry
from polydraft.testing import Grown, as_batch, enumerate_drafts, measure, sibling_draws
from polydraft.theory import acceptance, optimum
from polydraft.verifiers import greedy_plus_one, kseq, match, recursive, single_with_spares, speculative
from tests.exactness.harness import by_depth
from tests.exactness.oracle import ORACLE, markov

CLOSED = ORACLE["tolerance"]["closed_form"]
QUADRATURE = ORACLE["tolerance"]["quadrature"]
MOST_DRAFTS = 20_000

IID = DraftSampling.IID
WOR = DraftSampling.WITHOUT_REPLACEMENT
PM = DraftSampling.POINT_MASS
G1 = DraftSampling.GREEDY_PLUS_ONE
BUILT = {
    "target_sample": "match",
    "token": "speculative",
    "block": "block",
    "rrs_iid": "recursive",
    "rrs_wor": "recursive_wor",
    "rrs_point_mass": "match",
    "gtv": "greedy_traversal",
    "kseq": "kseq",
    "traversal_iid_pooled": "traversal",
    "traversal_wor": "traversal",
    "traversal_point_mass": "traversal",
    "traversal_sampled_first": "traversal",
    "greedy_walk": "greedy_plus_one",
    "gbv": "multipath",
    "rrs_merged_wor": "recursive_merged",
    "traversal_merged_wor": "traversal_merged",
    "single_with_spares": "single_with_spares",
}
FIRST_PATH = {"token", "block"}
KINDS = {
    "iid_paths": IID,
    "iid_tree": IID,
    "wor_tree": WOR,
    "point_mass_tree": PM,
    "greedy_plus_one_tree": G1,
}


def rule(method):
    return registry.verifier(BUILT[method])


def acceptance_of(emitted, distribution, p, q, n):
    """Sum over all draws of the mass that the emitted token's distribution has on drawn tokens."""
    draws = list(sibling_draws(distribution, [q], n))
    tokens = np.array([d for _, d in draws])
    rows = np.tile(p, (len(draws), 1)), np.tile(q, (len(draws), 1))
    e = emitted(*rows, tokens)
    member = scatter(np.zeros_like(e), tokens, 1.0)
    return float(np.array([w for w, _ in draws], dtype=np.float64) @ (e * member).sum(1))


CLOSED_FORMS = {
    "alpha_single": lambda p, q, c: acceptance.single(p, q),
    "alpha_target_sample_iid": lambda p, q, c: acceptance.target_sample(p, q, c["n"]),
    "alpha_single_with_spares_iid": lambda p, q, c: acceptance.single_with_spares(p, q, c["n"]),
    "alpha_rrs_iid": lambda p, q, c: acceptance.recursive(p, q, c["n"]),
    "alpha_rrs_wor": lambda p, q, c: acceptance.recursive_wor(p, q, c["n_wor"]),
    "kseq_rho": lambda p, q, c: acceptance.kseq(p, q, c["n"])[0],
    "alpha_kseq_iid": lambda p, q, c: acceptance.kseq(p, q, c["n"])[1],
    "alpha_greedy_plus_one": lambda p, q, c: optimum.greedy_plus_one(p, q, c["n"]).alpha,
    "alpha_point_mass_top_n": lambda p, q, c: optimum.point_mass(p, optimum.top(q, c["n"])).alpha,
    "alpha_opt_iid": lambda p, q, c: optimum.with_replacement(p, q, c["n"]).alpha,
    "alpha_opt_wor": lambda p, q, c: optimum.without_replacement(p, q, c["n_wor"]).alpha,
    "alpha_opt_khisti_2": lambda p, q, c: optimum.with_replacement(p, q, 2).alpha,
    "gls_lower_bound": lambda p, q, c: acceptance.list_matching(p, q, c["n"]),
    "alpha_ersd_1": lambda p, q, c: acceptance.race_of_one(p, q),
    "alpha_ersd_n": lambda p, q, c: acceptance.race(p, q, c["n"]),
}
BY_QUADRATURE = {"alpha_ersd_n", "alpha_opt_wor"}


@pytest.mark.parametrize("key", sorted({k for c in ORACLE["token_level"] for k in c["expected"]}))
@pytest.mark.parametrize("case", ORACLE["token_level"], ids=lambda c: c["name"])
def test_closed_form_at_one_node(case, key):
    p = np.array(case["p"])
    q = np.array(case["q"])
    expected = case["expected"][key]
    assert CLOSED_FORMS[key](p, q, case) == pytest.approx(
        expected, abs=QUADRATURE if key in BY_QUADRATURE else CLOSED
    )


TOKEN = {
    "alpha_single": (speculative.emitted_probs, IID, "n1"),
    "alpha_target_sample_iid": (match.emitted_probs, IID, "n"),
    "alpha_single_with_spares_iid": (single_with_spares.single_with_spares.emitted_probs, IID, "n"),
    "alpha_rrs_iid": (recursive.recursive.emitted_probs, IID, "n"),
    "alpha_rrs_wor": (recursive.recursive_wor.emitted_probs, WOR, "n_wor"),
    "alpha_kseq_iid": (kseq.emitted_probs, IID, "n"),
    "alpha_greedy_plus_one": (greedy_plus_one.emitted_probs, G1, "n"),
    "alpha_point_mass_top_n": (match.emitted_probs, PM, "n"),
}
ENUMERABLE = [
    (case, key)
    for case in ORACLE["token_level"]
    for key, (_, distribution, n) in TOKEN.items()
    if distribution in (PM, G1) or case["V"] ** {"n1": 1, **case}[n] <= MOST_DRAFTS
]


@pytest.mark.parametrize(("case", "key"), ENUMERABLE, ids=lambda x: x if isinstance(x, str) else x["name"])
def test_rule_has_its_acceptance_at_one_node(case, key):
    emitted, distribution, n = TOKEN[key]
    found = acceptance_of(
        emitted, distribution, np.array(case["p"]), np.array(case["q"]), {"n1": 1, **case}[n]
    )
    assert found == pytest.approx(case["expected"][key], abs=CLOSED)


FIXED = {
    "single": (speculative.emitted_probs, 1),
    "rrs_iid": (recursive.recursive.emitted_probs, None),
    "rrs_wor": (recursive.recursive_wor.emitted_probs, None),
    "point_mass": (match.emitted_probs, None),
    "kseq_iid": (kseq.emitted_probs, None),
    "greedy_plus_one": (greedy_plus_one.emitted_probs, None),
}


@pytest.mark.parametrize(
    "case", [c for c in ORACLE["token_level"] if c.get("fixed_draft_laws")], ids=lambda c: c["name"]
)
def test_distribution_of_the_emitted_token_for_fixed_draws(case):
    p, q = (np.array([case[k]], dtype=np.float64) for k in "pq")
    for name, given in case["fixed_draft_laws"].items():
        distribution = FIXED[name][0](p, q, np.array([given["drafts"]]))
        assert distribution[0].tolist() == pytest.approx(given["law"], abs=CLOSED), name


def topology(case, method):
    L = case["depth"]
    if method in FIRST_PATH:
        return TreeShape.CHAIN, by_depth(*[1] * L)
    if case["draft"] == "iid_paths":
        return TreeShape.PATHS, by_depth(case["paths"], *[1] * (L - 1))
    return TreeShape.PRODUCT, by_depth(*case["branching"])


BLOCKS = [(c, m) for c in ORACLE["block_level"] for m in c["expected_block_efficiency"]]


@pytest.mark.parametrize(("case", "method"), BLOCKS, ids=lambda x: x if isinstance(x, str) else x["name"])
def test_block_efficiency(case, method):
    verifier = rule(method)
    shape, counts = topology(case, method)
    distribution = KINDS[case["draft"]]
    found = measure(verifier, markov(case), distribution, shape, counts, case["depth"])
    assert found.error < 1e-12
    assert found.block_efficiency == pytest.approx(case["expected_block_efficiency"][method], abs=CLOSED)


def grown(nested):
    """A nested list [[token, children], ...] in draw order, depth by depth."""
    d = Grown(1.0, [0], [-1], [()], [])
    layer = [(0, child) for child in nested]
    while layer:
        following = []
        for parent, (token, below) in layer:
            d.tokens.append(token)
            d.parents.append(parent)
            d.paths.append((*d.paths[parent], token))
            following += [(len(d.tokens) - 1, child) for child in below]
        layer = following
    return d


def first_path(d):
    keep = [0]
    while (child := next((n for n, parent in enumerate(d.parents) if parent == keep[-1]), None)) is not None:
        keep.append(child)
    return Grown(
        1.0, [d.tokens[n] for n in keep], list(range(-1, len(keep) - 1)), [d.paths[n] for n in keep], []
    )


FIXED_BLOCKS = [
    (c, m) for c in ORACLE["block_level"] for m in c["expected_block_efficiency"] if c.get("fixed_draft_laws")
]


@pytest.mark.parametrize(
    ("case", "method"), FIXED_BLOCKS, ids=lambda x: x if isinstance(x, str) else x["name"]
)
def test_distribution_of_the_block_for_fixed_drafts(case, method):
    verifier = rule(method)
    tables = markov(case)
    shape, _ = topology(case, method)
    for given in case["fixed_draft_laws"]:
        if method not in given["laws"]:
            continue
        d = first_path(grown(given["tree"])) if method in FIRST_PATH else grown(given["tree"])
        draft, p = as_batch(tables, KINDS[case["draft"]], shape, [d])
        verdict = verifier(draft, p)
        distribution: dict[str, float] = {}
        for n in range(draft.tree.num_nodes):
            after = verdict.after(np.array([n]))[0].tolist()
            for y, probability in enumerate(after):
                block = ",".join(map(str, (*d.paths[n], y)))
                distribution[block] = distribution.get(block, 0.0) + float(verdict.stop[0, n]) * probability
        for block in distribution.keys() | given["laws"][method].keys():
            assert distribution.get(block, 0.0) == pytest.approx(
                given["laws"][method].get(block, 0.0), abs=CLOSED
            ), block


def test_enumeration_covers_all_drafts():
    case = ORACLE["block_level"][0]
    shape, counts = topology(case, "gtv")
    drafts = enumerate_drafts(markov(case), IID, counts, case["depth"])
    assert sum(d.probability for d in drafts) == pytest.approx(1, abs=1e-12)
    assert shape is TreeShape.PATHS
    assert tree.pad([(d.tokens, d.parents) for d in drafts]).num_nodes == 1 + case["depth"] * case["paths"]
