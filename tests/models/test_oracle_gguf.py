"""GGUF files that llama.cpp's converter wrote are the models that transformers ran, however their tokens are scored; see oracle_gguf/README.md."""

import json
from pathlib import Path

import numpy as np
import pytest

from polydraft.core.geometry import pad
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.load import load_model
from polydraft.models.loading.gguf import GgufWeights
from polydraft.sampling.softmax import log_softmax
from tests.models.tree_rounds import outcome

FOLDER = Path(__file__).parent / "oracle_gguf"
FILES = sorted(FOLDER.glob("*.gguf"))


def is_compiled(file):
    """Whether the compiled path has all that a file's model needs."""
    return not file.network.lacks and file.network.why_refused(file.config) is None


MODELS = [
    (path.stem, way)
    for path in FILES
    for way in ("transformers", "compiled")[: 1 + is_compiled(GgufWeights.of(path))]
]
EXACT = {"compiled": {"cache_dtype": "float32"}, "transformers": {}}
NATS = 1e-3
"""By which log-probabilities of float32 arithmetic may differ."""


@pytest.fixture(params=MODELS, ids=lambda model: "-".join(model), scope="module")
def model(request):
    """A target, and its cases: prompt, and ids and log-probabilities of what follows."""
    name, backend = request.param
    target = load_model(
        str(FOLDER / f"{name}.gguf"), backend=backend, max_num_seqs=1, max_model_len=96, **EXACT[backend]
    )
    assert isinstance(target, CompiledModel) == (backend == "compiled")
    return target, json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="module")
def in_pieces(model):
    """The same, with one case where passes are slow."""
    target, cases = model
    return target, cases if isinstance(target, CompiledModel) else cases[1:2]


def assert_step(logits, case, step):
    """The next token, and the ten best log-probabilities, are those of the reference."""
    best, log_probs = zip(*case["top10"][step], strict=True)
    row = log_softmax(logits.astype(np.float64))
    assert int(row.argmax()) == case["ids"][step]
    assert np.abs(row[list(best)] - np.array(log_probs)).max() < NATS


def score(target, nodes, parents):
    return target.score([0], pad([(nodes, parents)]))


def test_a_text_in_one_pass_has_the_log_probabilities_of_transformers(model):
    target, cases = model
    for case in cases:
        for length in (0, 1, 23):
            target.release([0])
            scores = target.prefill([0], [case["prompt"] + case["ids"][:length]])
            assert_step(scores.logits[0, 0], case, length)


def test_a_text_in_pieces_has_them_token_by_token(in_pieces):
    target, cases = in_pieces
    for case in cases:
        target.release([0])
        *read, root = case["prompt"]
        for piece in (read[:1], read[1:8], read[8:]):
            if piece:
                target.prefill([0], [piece])
        for step, token in enumerate([root, *case["ids"][:-1]]):
            scores = score(target, [token], [-1])
            assert_step(scores.logits[0, 0], case, step)
            target.commit([0], outcome([[]], [0]))


def test_drafts_that_are_rejected_at_every_position_leave_them_as_they_are(in_pieces):
    target, cases = in_pieces
    for case in cases:
        target.release([0])
        *read, root = case["prompt"]
        target.prefill([0], [read])
        step = 0
        accepted = 0
        while step + accepted < 24:
            right = case["ids"][step : step + accepted]
            nodes = [root]
            parents = [-1]
            for depth, token in enumerate(
                [*right, 0]
            ):  # a wrong sibling stands before each right one, and behind the last
                above = 2 * depth
                nodes = [*nodes, (token + 7) % target.vocab_size, token]
                parents = [*parents, above, above]
            nodes = nodes[:-1]
            parents = parents[:-1]
            scores = score(target, nodes, parents)
            path = [2 * depth for depth in range(1, accepted + 1)]
            for depth, node in enumerate([0, *path]):
                assert_step(scores.logits[0, node], case, step + depth)
            target.commit([0], outcome([path], [0]))
            root = case["ids"][step + accepted]
            step = step + accepted + 1
            accepted = accepted + 1
        assert step > 12


@pytest.mark.parametrize("backend", ["transformers", "compiled"])
def test_divisors_of_long_contexts_are_taken_for_every_text_of_one(backend):
    cases = json.loads((FOLDER / "phi3-longrope.json").read_text(encoding="utf-8"))["cases_long"]
    with pytest.warns(UserWarning, match="rotary frequencies"):
        target = load_model(
            str(FOLDER / "phi3-longrope.gguf"),
            backend=backend,
            max_num_seqs=1,
            max_model_len=512,
            **EXACT[backend],
        )
    for case in cases:
        target.release([0])
        assert_step(target.prefill([0], [case["prompt"]]).logits[0, 0], case, 0)


@pytest.mark.parametrize(("name", "part"), [("gpt2", "embeddings of positions")])
def test_a_line_says_what_the_compiled_path_lacks(name, part):
    with pytest.warns(UserWarning, match=f"runs through transformers, .* lacks .*{part}"):
        load_model(str(FOLDER / f"{name}.gguf"), max_num_seqs=1, max_model_len=96)
