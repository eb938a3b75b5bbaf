"""The study of NEST."""

import pytest

from studies.passages import docstrings, main


def test_documentation_strings_are_what_the_modules_say_of_themselves():
    found = dict(docstrings(30))
    assert len(found) > 5 and all(len(text) > 200 and "def " not in text[:20] for text in found.values())


@pytest.mark.slow
def test_it_runs(tmp_path):
    pytest.importorskip("usearch")
    main(out=tmp_path, quick=True)
    assert (tmp_path / "passages.json").exists()
