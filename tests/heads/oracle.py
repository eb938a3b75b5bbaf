"""Golden cases of published draft heads as their authors' code computes them: files as a user has them, and what is drafted over four rounds.

Each round begins with `start` committed tokens before the newest one, `anchor`; then `accepted` drafts and `bonus` are committed. Of the
logits every fourth column is kept, and of the files no embedding and output rows that are the target's: `folder` puts them back.
"""

import json
from functools import lru_cache
from pathlib import Path
from shutil import copyfile, copytree
from tempfile import mkdtemp

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from polydraft.models import load

KEPT = Path(__file__).parent / "oracle_heads"
COLUMN = 4
SLOT = 1
TARGETS = {"dspark-gemma4": "dspark-gemma4/target"}


def target_folder(kind):
    """Of the model that a head is for."""
    return KEPT / TARGETS.get(kind, "target-qwen3")


@lru_cache(maxsize=64)
def folder(kind):
    """The head's, whole."""
    tensors = load_file(KEPT / kind / "model.safetensors")
    files = load_file(target_folder(kind) / "model.safetensors")
    embedding = files["model.embed_tokens.weight"]
    where = Path(mkdtemp())
    rows = files.get("lm_head.weight", embedding)
    if "d2t" in tensors:
        rows = rows[torch.arange(len(tensors["d2t"])) + tensors["d2t"]]
    own = {"embed_tokens.weight": embedding, "lm_head.weight": rows}
    save_file(
        {name: x if x.numel() else own[name].clone() for name, x in tensors.items()},
        where / "model.safetensors",
    )
    copyfile(KEPT / kind / "config.json", where / "config.json")
    return where


def changed(tmp_path, kind, tensors=(), **settings):
    """The same with other settings and tensors."""
    where = copytree(folder(kind), tmp_path / "head")
    config = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps(config | settings))
    save_file(load_file(where / "model.safetensors") | dict(tensors), where / "model.safetensors")
    return where


@lru_cache(maxsize=4)
def _target(folder, backend):
    exact = {"cache_dtype": "float32"} if backend == "compiled" else {}
    return load.load_model(
        str(folder), backend=backend, device="cpu", max_num_seqs=3, max_model_len=256, **exact
    )


def target(kind, backend="transformers"):
    return _target(target_folder(kind), backend)


@lru_cache(maxsize=64)
def arrays(kind):
    return load_file(KEPT / kind / "cases.safetensors")


def states(kind, layers):
    """Of all committed tokens but the last, side by side, as the head reads them."""
    text = arrays(kind)["committed"][0].tolist()
    model = target(kind)
    scores = model.prefill([0], [text], hidden=tuple(sorted({*layers})))
    model.release([0])
    return np.concatenate([scores.hidden[layer][0] for layer in layers], -1)


def rounds(kind):
    """Of each round its arrays, the states `first` .. `start` of which are new, and the tokens behind them."""
    found = arrays(kind)
    number = 0
    first = 0
    while f"r{number}.start" in found:
        arrays_of = {
            name.partition(".")[2]: array for name, array in found.items() if name.startswith(f"r{number}.")
        }
        start = int(arrays_of["start"])
        yield arrays_of | {
            "first": first,
            "start": start,
            "tokens": found["committed"][0, first + 1 : start + 1].tolist(),
        }
        number = number + 1
        first = start


def assert_close(logits, expected):
    """Within 1e-4 of the largest; expected: of some columns."""
    actual = np.asarray(logits)[..., ::COLUMN].reshape(expected.shape)
    expected = np.asarray(expected)
    assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()
