from tests.laws.validity import MARKS, PAGE, markdown


def test_page_has_the_matrix_that_the_checker_finds():
    found = MARKS.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[2] == markdown(), "run `python -m tests.laws.validity`"
