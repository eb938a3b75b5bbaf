import re

import pytest

import polydraft
from polydraft.engine.api import Engine
from polydraft.errors import UnknownNameError
from polydraft.methods import papers, registry


def test_every_method_with_a_paper_has_its_entry():
    text = papers.bibtex()
    for name in registry.names("verifier"):
        arxiv = registry.verifier(name).info.arxiv
        assert arxiv == "" or (arxiv in papers.PAPERS and f"eprint = {{{arxiv}}}" in text), name
    for name in registry.names("drafter"):
        for info in registry.drafter(name).methods:
            assert info.arxiv == "" or info.arxiv in papers.PAPERS, info.name


def test_keys_of_entries_are_unique():
    keys = re.findall(r"^@\w+\{(.*),$", papers.bibtex(), re.MULTILINE)
    assert len(keys) == len(set(keys)) == len(papers.PAPERS) + 1


def test_only_what_was_used_is_printed(capsys):
    polydraft.citation("block", "model:coupled", "greedy_traversal")
    printed = capsys.readouterr().out
    assert printed.count("@misc") == 2
    assert "2403.10444" in printed
    assert "2504.15475" in printed


@pytest.mark.parametrize(
    ("drafter", "ids"),
    [
        (None, {"2305.09781"}),
        ("model:chain", {"2211.17192", "2403.10444"}),
        ("mixture:suffix,trigram", {"2411.04975", "2407.12021", "2305.09781"}),
        ("mixture:model:top_k,ngram", {"2406.16858", "2304.04487", "2305.09781"}),
    ],
)
def test_an_engine_is_cited_by_what_it_is_made_of(drafter, ids):
    verifier = "block" if drafter == "model:chain" else "auto"
    engine = Engine.embedded(drafter=drafter, verifier=verifier, max_num_seqs=1)
    assert set(re.findall(r"eprint = {(.*)}", papers.bibtex(engine))) == ids


def test_unknown_names_are_refused():
    with pytest.raises(UnknownNameError, match="did you mean 'block'"):
        polydraft.citation("blok")
