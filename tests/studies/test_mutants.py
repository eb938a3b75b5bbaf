"""The study of mutants: what it draws is code with one mistake, and a mistake that is guarded is killed by name."""

import ast

from studies import mutants
from studies.mutants import Subject


def test_each_mutant_is_a_file_with_one_changed_place():
    original = ast.dump(
        ast.parse((mutants.ROOT / mutants.PACKAGE / "core/geometry.py").read_text(encoding="utf-8"))
    )
    drawn = mutants.mutants("core/geometry.py")
    assert len({(mutant.line, mutant.before, mutant.after) for mutant in drawn}) > 50
    assert all(ast.dump(ast.parse(mutant.text)) != original for mutant in drawn)


def test_what_does_not_run_gets_no_mistake():
    places = [mutant.before for mutant in mutants.mutants("core/geometry.py")]
    assert not any(before.startswith(("import ", "raise ", "Int[")) for before in places)


def test_a_mistake_is_killed_by_the_test_that_guards_it():
    chain = next(mutant for mutant in mutants.mutants("core/geometry.py") if mutant.before == "[1] * depth")
    assert "core.geometry.chain" in mutants.killer(chain, ("src/polydraft/core/geometry.py",), limit=300)


def test_mutants_of_a_subject_are_drawn_by_seed():
    subject = Subject(("core/geometry.py",), ())
    assert mutants.drawn(subject, 5, 1) == mutants.drawn(subject, 5, 1) != mutants.drawn(subject, 5, 2)
