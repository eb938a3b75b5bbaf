"""The page of each lossless verifier: claim, paper, traps, cost, no acceptance above the optimum, an example that prints what the page says."""

import importlib.util
from pathlib import Path

import pytest

from polydraft.methods import registry

ROOT = Path(__file__).parents[2]


def _pages():
    spec = importlib.util.spec_from_file_location("rule_pages", ROOT / "docs" / "rule_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages = _pages()
RULES = {info.name: info for info in pages.lossless()}


def test_every_lossless_verifier_of_the_package_has_a_page():
    assert set(RULES) == {name for name in registry.VERIFIERS if registry.verifier(name).info.lossless}
    assert all(f"]({name}.md)" in pages.index() for name in RULES)


@pytest.mark.parametrize("name", RULES)
def test_a_page_says_what_the_verifier_is_exact_for_what_it_costs_and_where_it_breaks(name):
    info = RULES[name]
    page = pages.page(info)
    assert (info.arxiv in page and "arXiv" in page) or not info.arxiv
    assert "Cost: " in page and "O(" in page
    assert "Trap" in page or "biased" in page
    assert "Lossless" in page or "lossless" in page
    assert "[What we measured](" in page
    assert pages.printed(pages.example(info)) in page


@pytest.mark.parametrize("name", RULES)
def test_no_acceptance_is_above_the_optimum_beside_it(name):
    shown = list(pages.accepted(RULES[name]))
    assert {children for _, children, _, _ in shown} >= {1}
    for _, _, value, best in shown:
        assert 0 < value <= 1 + 1e-9
        assert best is None or value <= best + 1e-9
