"""Matrices in panels: what is written is what is read, block for block."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from polydraft.models.compiled.formats import BLOCKS, pack, pack_blocks, panels_for, raw_blocks, unpack
from polydraft.models.compiled.vectors import LANES, PANEL


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_a_file_are_kept_as_they_are(name):
    kind = GGMLQuantizationType[name]
    raw = quants.quantize(np.random.default_rng(0).normal(size=(70, 96)).astype(np.float32), kind)
    out = panels_for(70, 96, BLOCKS[name])
    pack_blocks(raw.view(raw_blocks(name)), out)
    assert np.array_equal(unpack(out, 70, 96).numpy(), quants.dequantize(raw, kind))


@pytest.mark.parametrize(("name", "share"), [("Q8_0", 1.05), ("Q4_0", 1.01), ("Q4_1", 1.01)])
def test_rounding_loses_no_more_than_the_reference_does(name, share):
    weight = torch.randn(70, 100, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    out = panels_for(70, 100, BLOCKS[name])
    lost, total = pack(weight, out)
    padded = np.pad(weight.numpy(), ((0, 0), (0, 28)))
    kind = GGMLQuantizationType[name]
    reference = np.square(quants.dequantize(quants.quantize(padded, kind), kind) - padded).sum()
    assert lost == pytest.approx(float((weight - unpack(out, 70, 100)).square().sum()), rel=1e-5)
    assert total == pytest.approx(float(weight.square().sum()), rel=1e-5)
    assert lost < share * reference
    assert not unpack(out, 70, 100)[3].any()


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("outputs", [3, PANEL, 2 * PANEL + 5])
def test_a_panel_of_numbers_holds_what_its_definition_says(monkeypatch, dtype, outputs):
    monkeypatch.setattr("polydraft.models.compiled.formats.TOGETHER", 1)
    weight = torch.randn(outputs, 8).bfloat16()
    out = panels_for(outputs, 8, dtype)
    assert pack(weight, out)[0] == 0
    assert torch.equal(unpack(out, outputs, 8), weight.float())
    assert not unpack(out, len(out) * PANEL, 8)[outputs:].any()
    for o, i in ((0, 0), (1, 5), (outputs - 1, 7)):
        panel, c = divmod(o, PANEL)
        stored = out[panel, i // 2, c, i % 2] if dtype is np.uint16 else out[panel, i, c].view(np.uint32) >> 16
        assert stored == weight.view(torch.uint16)[o, i].item()


@pytest.mark.parametrize("name", BLOCKS)
def test_a_group_of_codes_is_four_inputs_of_every_output(name):
    raw = np.zeros((LANES + 1, 2), raw_blocks(name))
    raw["codes"] = np.arange(raw["codes"].size).reshape(raw["codes"].shape) % 251
    out = panels_for(LANES + 1, 64, BLOCKS[name])
    pack_blocks(raw, out)
    flipped = 128 if name == "Q8_0" else 0
    assert out["codes"][1, 1, 2, 0].tolist() == [x ^ flipped for x in raw["codes"][LANES, 1, 8:12].tolist()]
