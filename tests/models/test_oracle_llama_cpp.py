"""llama.cpp itself gives the golden files the log-probabilities of transformers; see oracle_gguf/README.md."""

import json
from multiprocessing import get_context

import pytest

from tests.models.test_oracle_gguf import FILES

NATS = 0.2
"""By which log-probabilities may differ: llama.cpp rounds rows to float16 beside matrices in float16, and looks GELU up in a table. What is wrong in these
files changes them by whole nats."""
OTHERWISE = {
    "command-r": "reads norms of heads from 64 layers on",
    "dots1": "expects as many heads of keys as of queries",
    "ernie4_5-moe": "expects shared experts of another width",
    "exaone4": "has windows from 64 layers on",
    "mellum": "ends by an assertion where it finds no layer with a window",
    "nemotron_h_moe": "reads a layer that is only a dense feed-forward as a state space: the converter writes the width of experts alone",
    "nemotron_h_moe-whole": "reads a layer that is only a dense feed-forward as a state space: the converter writes the width of experts alone",
    "olmoe": "expects as many heads of keys as of queries",
    "phimoe": "has no windows",
}
"""What llama.cpp does with a file that is not what its converter's source ran."""
SIGMOID_GATES = ("exaone-moe", "minimax-m2")
"""Their settings name no gating function, as those of the published models do: the converter wrote none, and llama.cpp has no default."""
STEPS = (0, 1, 7, 23)
CONTEXT = 256
"""Up to which the factors of a rotation for short texts hold."""


def with_sigmoid_gates(file, folder):
    """The file with the key of a published one."""
    import gguf
    from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

    reader = gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(folder / file.name, arch=architecture)
    gate = MetadataDetails(gguf.GGUFValueType.UINT32, int(gguf.ExpertGatingFuncType.SIGMOID))
    copy_with_new_metadata(reader, writer, {f"{architecture}.expert_gating_func": gate}, [])
    return folder / file.name


def best_tokens(file, texts, pipe):
    """The ten best tokens that llama.cpp sees behind each text, in a process of its own, which it may end."""
    from polydraft.bench.llama_cpp import LlamaCpp
    from polydraft.core import SamplingParams
    from polydraft.models.load import encode, load_tokenizer

    engine = LlamaCpp(file, context=CONTEXT)
    params = SamplingParams(temperature=0, max_tokens=1)
    letter = encode(load_tokenizer(str(file)), "a")[-1]
    sampled = {"n_probs": 10, "logit_bias": [[letter, 1000]]}  # it keeps back what is no whole character
    for text in texts:
        answer = engine.server.handle_completions(engine.request(text, params, **sampled))
        (step,) = answer["choices"][0]["logprobs"]["content"]
        pipe.send({top["id"]: top["logprob"] for top in step["top_logprobs"]})


def misfit(best, expected):
    """The largest difference between log-probabilities of the five best tokens of transformers."""
    return max(abs(best.get(token, -float("inf")) - log_prob) for token, log_prob in expected[:5])


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_llama_cpp_has_the_log_probabilities_of_transformers(file, tmp_path):
    pytest.importorskip("xllamacpp")
    if file.stem in OTHERWISE:
        pytest.skip(f"llama.cpp {OTHERWISE[file.stem]}")
    cases = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))["cases"]
    steps = [(case["prompt"] + case["ids"][:step], case["top10"][step]) for case in cases for step in STEPS]
    if file.stem in SIGMOID_GATES:
        file = with_sigmoid_gates(file, tmp_path)
    context = get_context("spawn")
    here, there = context.Pipe(duplex=False)
    texts = [text for text, _ in steps]
    process = context.Process(target=best_tokens, args=(file, texts, there), daemon=True)
    process.start()
    there.close()
    try:
        assert max(misfit(here.recv(), expected) for _, expected in steps) < NATS
    finally:
        process.kill()
        process.join()
