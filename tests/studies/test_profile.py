"""Where a round's time goes, and what a pass costs."""

from studies import passes
from studies.profile import PARTS, SIZES, profile


def test_the_parts_of_a_round_add_up_and_none_is_missing():
    found = profile(SIZES["3M"], num_rounds=4)
    assert list(found) == list(PARTS)
    assert all(ms >= 0 for ms in found.values()) and found["projections"] > 0 and found["noise"] > 0


def test_a_pass_is_measured_in_every_weight_format_at_every_number_of_rows():
    found, read = passes.pass_costs(SIZES["3M"], 64, repetitions=1)
    assert set(found) == {"float32", "bfloat16", "int8", "int4", "transformers"}
    assert read["int4"] < read["int8"] < read["bfloat16"] < read["float32"] <= read["transformers"]
    assert all(list(rows) == list(passes.ROWS) and min(rows.values()) > 0 for rows in found.values())


def test_a_product_of_blocks_is_measured_at_every_number_of_rows():
    seconds, size = passes.product_costs("Q6_K", 64, 256, rows=(1, 5), num_bytes=1 << 16, repetitions=1)
    assert list(seconds) == [1, 5] and min(seconds.values()) > 0
    assert size == 64 * 256 * 6.5625 // 8


def test_a_pass_on_a_device_is_measured_at_every_batch_and_number_of_rows():
    found, about = passes.device_costs(SIZES["3M"], 64, "cpu", batches=(1, 2), repetitions=1, dtype="float32")
    assert (
        set(found) == {(batch, rows) for batch in (1, 2) for rows in passes.ROWS} and min(found.values()) > 0
    )
    assert about["memory"] >= about["weights"] > 0
