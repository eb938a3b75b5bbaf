"""The benchmark at equal bits: every contender says its bits and is held to the distribution of its own weights."""

import pytest

from polydraft.bench.report import as_dict, markdown
from polydraft.errors import UnknownNameError
from polydraft.models import pair
from studies import equal_bits
from studies.equal_bits import AtEqualBits, shown_rows


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equal_bits, "LOOKUPS", ())
        yield from measured()


def measured():
    """Without lookups of llama.cpp, each of which loads a file."""
    made = AtEqualBits(
        target=str(pair.draft_folder()), formats=["int4"], ways=["none", "ngram@1x3"], temperature=0.0
    )
    try:
        prompts = made.prompts(2)
        yield made, prompts, made.run(prompts, max_tokens=12, repetitions=1)
    finally:
        made.close()


def test_contenders_of_a_format_have_its_bits_and_are_compared_with_each_other(found):
    rows = {row["contender"]: row for row in found[2].rows()}
    assert 4.4 < rows["int4 plain"]["bits_per_weight"] == rows["int4 ngram@1x3"]["bits_per_weight"] < 4.8
    assert rows["int4 plain"]["compared"]["llama.cpp"] == "llama.cpp Q4_1"
    if "llama.cpp" not in found[2].absent:
        assert rows["llama.cpp Q4_1"]["bits_per_weight"] == 5
    assert "| int4 ngram@1x3 | 4." in markdown(as_dict(found[2]))


def test_the_page_has_ours_plain_and_fastest_and_the_fastest_of_each_format_of_llama_cpp():
    speeds = {
        "int4 plain": 5,
        "int4 ngram": 7,
        "int4 suffix": 6,
        "llama.cpp Q4_1": 3,
        "llama.cpp Q4_1 ngram-simple": 4,
    }
    rows = [
        {
            "contender": name,
            "tokens_per_cpu_second": speed,
            "compared": {"own plain": "int4 plain" if "int4" in name else "llama.cpp Q4_1"},
        }
        for name, speed in speeds.items()
    ]
    shown = shown_rows([*rows, {"contender": "transformers", "compared": {"own plain": ""}}])
    assert {row["contender"] for row in shown} == {
        "int4 plain",
        "int4 ngram",
        "llama.cpp Q4_1 ngram-simple",
        "transformers",
    }


def test_columns_that_the_page_leaves_out_are_in_the_table_beside_it(found, tmp_path):
    equal_bits.write(as_dict(found[2]), tmp_path / "figures.json")
    page, table = ((tmp_path / f"figures.{kind}").read_text() for kind in ("md", "csv"))
    assert "| int4 plain | 4." in page and "[Every contender and column](figures.csv)" in page
    assert "memory MiB" in table.splitlines()[0] and "memory MiB" not in page


def test_drafts_keep_the_distribution_of_the_rounded_weights_and_another_text_is_found(found):
    made, prompts, findings = found
    by_name = {m.contender.name: m for m in findings.measurements}
    assert all(findings.checks[name]["passed"] for name in ("int4 plain", "int4 ngram@1x3", "transformers"))
    assert by_name["int4 plain"].runs[0].outputs == by_name["int4 ngram@1x3"].runs[0].outputs
    by_name["int4 plain"].runs[0].outputs[0][3] ^= 1
    assert not made.check(by_name["int4 plain"], prompts, findings.measurements)["passed"]


def test_a_format_that_is_none_is_refused_by_name():
    with pytest.raises(UnknownNameError, match="int5"):
        AtEqualBits(target=str(pair.draft_folder()), formats=["int5"])
