"""The tables of prompts and batches, on a small model."""

import numpy as np

from polydraft.models import pair
from studies.batches import BATCHES, batches, prompts


def test_every_format_and_peer_is_timed():
    folder = str(pair.target_folder())
    read = prompts(folder, 40, 1)
    assert list(read) == [
        "None",
        "int8",
        "int4",
        "transformers bfloat16",
        "transformers float32",
    ]
    rates, cache = batches(folder, "int8", 4, 1)
    assert tuple(rates) == BATCHES and cache > 0
    assert np.isfinite([*read.values(), *rates.values()]).all()
    assert min(*read.values(), *rates.values()) > 0
