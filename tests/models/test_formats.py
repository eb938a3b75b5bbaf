"""Matrices in panels: what is written is what is read, block for block."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from polydraft.models.matrices.formats import (
    BLOCKS,
    DTYPES,
    pack,
    pack_blocks,
    panels_for,
    raw_blocks,
    unpack,
)
from polydraft.models.matrices.vectors import LANES, PANEL
from polydraft.models.store.gguf_header import LAYOUTS, UNREAD
from polydraft.numerics.floats import as_bfloat16
from tests.models.blocks import dequantised, random_blocks

BITS = {
    "Q4_K": 4.75,
    "Q5_K": 6,
    "Q5_0": 6,
    "Q5_1": 6,
    "Q6_K": 6.75,
    "Q8_0": 8.6,
    "Q4_0": 4.5,
    "Q4_1": 5,
    "MXFP4": 4.25,
}
"""Most bits of a weight in panels."""


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_a_file_are_kept_bit_for_bit(name):
    inputs = 3 * BLOCKS[name].inputs
    for seed in range(3):
        raw = random_blocks(name, 70, inputs, seed)
        out = panels_for(70, inputs, name)
        pack_blocks(raw, out)
        assert np.array_equal(unpack(out, 70, inputs).view(np.uint32), dequantised(name, raw).view(np.uint32))
        assert not unpack(out, len(out) * LANES, inputs)[70:].any()


@pytest.mark.parametrize(("name", "most"), BITS.items())
def test_panels_take_few_more_bits_than_the_file(name, most):
    assert 8 * panels_for(PANEL, 256, name).nbytes <= most * PANEL * 256


def test_no_two_formats_look_alike():
    assert len(set(DTYPES.values())) == len(DTYPES)


@pytest.mark.parametrize(("name", "share"), [("Q8_0", 1.05), ("Q4_0", 1.01), ("Q4_1", 1.01)])
def test_rounding_loses_no_more_than_the_reference_does(name, share):
    weight = np.random.default_rng(0).standard_normal((70, 100), np.float32)
    weight[3] = 0
    out = panels_for(70, 100, name)
    lost, total = pack(weight, out)
    padded = np.pad(weight, ((0, 0), (0, 28)))
    kind = GGMLQuantizationType[name]
    reference = np.square(quants.dequantize(quants.quantize(padded, kind), kind) - padded).sum()
    assert lost == pytest.approx(np.square(weight - unpack(out, 70, 100)).sum(), rel=1e-5)
    assert total == pytest.approx(np.square(weight).sum(), rel=1e-5)
    assert lost < share * reference
    assert not unpack(out, 70, 100)[3].any()


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("outputs", [3, PANEL, 2 * PANEL + 5])
def test_a_panel_of_numbers_holds_what_its_definition_says(monkeypatch, name, outputs):
    monkeypatch.setattr("polydraft.models.matrices.formats.TOGETHER", 1)
    weight = as_bfloat16(np.random.default_rng(0).standard_normal((outputs, 8)))
    out = panels_for(outputs, 8, name)
    assert pack(weight, out)[0] == 0
    assert np.array_equal(unpack(out, outputs, 8), weight.astype(np.float32))
    assert not unpack(out, len(out) * PANEL, 8)[outputs:].any()
    for o, i in ((0, 0), (1, 5), (outputs - 1, 7)):
        panel, c = divmod(o, PANEL)
        stored = (
            out[panel, i // 2, c, i % 2] if name == "bfloat16" else out[panel, i, c].view(np.uint32) >> 16
        )
        assert stored == weight.view(np.uint16)[o, i]


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0"])
def test_a_word_of_codes_is_four_inputs_of_every_output(name):
    raw = np.zeros((LANES + 1, 2), raw_blocks(name))
    raw["codes"] = np.arange(raw["codes"].size).reshape(raw["codes"].shape)
    out = panels_for(LANES + 1, 64, name)
    pack_blocks(raw, out)
    flipped = 0x80808080 if name == "Q8_0" else 0
    assert out["codes"][1, 1, 2, 0] == raw["codes"][LANES, 1, 2] ^ flipped


def test_every_number_format_of_gguf_has_its_name():
    named = {number: layout.type for number, layout in LAYOUTS.items()} | UNREAD
    assert named == {kind.value: kind.name for kind in GGMLQuantizationType}
