"""The benchmark: interleaved, fair to those that fail, and not to be fooled by fast wrong answers."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from polydraft.bench.compare import Contender, Measurement, Run, Timer, measure
from polydraft.bench.peers import transformers_contender
from polydraft.bench.report import as_dict, markdown
from polydraft.bench.suite import Bench, Findings
from polydraft.bench.ways import Way
from polydraft.check.texts import check_distribution, integral_transform
from polydraft.cli.main import app
from polydraft.core import SamplingParams
from polydraft.errors import InvalidInputError
from polydraft.models import load, pair
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.torch.module import load_module
from polydraft.sampling.softmax import softmax
from polydraft.train.run import untrained
from studies import bench_picture
from studies.inflate import inflate
from tests.support.draws import multinomial

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


@pytest.fixture(scope="module")
def judge():
    return load_module(str(pair.draft_folder()), device="cpu")


def contender(name, order, temperature=0.0, fails_at=None):
    def generate(prompts, params):
        order.append(name)
        if fails_at is not None and order.count(name) > fails_at:
            raise RuntimeError("out of luck")
        return Timer().run([[0] * params.max_tokens for _ in prompts])

    return Contender(name, None, None, temperature, generate)


def test_everyone_runs_each_step_and_the_first_one_changes():
    order = []
    found = measure([contender(n, order) for n in "abc"], PROMPTS, max_tokens=2, repetitions=2)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert rounds == ["abc", "bca", "cab"] * 2
    assert [len(m.runs) for m in found] == [6, 6, 6]


def test_one_that_fails_is_named_and_the_others_go_on():
    order = []
    found = measure(
        [contender("a", order), contender("b", order, fails_at=1)], PROMPTS, max_tokens=2, repetitions=1
    )
    assert [m.error for m in found] == [None, "RuntimeError: out of luck"]
    assert [len(m.runs) for m in found] == [3, 1]
    assert order.count("b") == 2


def test_speed_is_the_median_of_ratios_within_a_round():
    fast = Measurement(contender("f", []))
    slow = Measurement(contender("s", []))
    fast.runs = [Run([[0] * 10], s, s, [s / 2, s]) for s in (1.0, 2.0, 4.0)]
    slow.runs = [Run([[0] * 10], s, s, [s]) for s in (2.0, 6.0, 8.0)]
    assert fast.speedup_over(slow).ratio == 2.0
    assert fast.tokens_per_second == 5.0
    assert fast.time_to_first_token == 1.0
    assert fast.inter_token(50) == 1.0


@torch.inference_mode()
def test_a_table_has_an_interval_for_each_speed_up_and_says_where_it_is_too_noisy_to_tell():
    seconds = {
        "plain": [1.0, 2.0, 1.0, 2.0, 1.0, 2.0],
        "fast": [0.5, 1.0, 0.4, 1.0, 0.5, 0.8],
        "noisy": [0.5, 3.0, 0.8, 1.0, 1.5, 2.0],
    }
    found = [
        Measurement(contender(name, []), [Run([[0]], s, s, []) for s in each], memory=0)
        for name, each in seconds.items()
    ]
    settings = {
        "threads": 1,
        "temperature": 0.0,
        "batch": 1,
        "num_prompts": 6,
        "max_tokens": 1,
        "repetitions": 1,
    }
    checks = {name: {"kind": "own", "passed": True} for name in seconds}
    table = markdown(as_dict(Findings(settings, found, checks, {}, dict.fromkeys(seconds, 0.0), {})))
    over_plain = {
        line.split(" | ")[0]: line.split(" | ")[3] for line in table.splitlines() if line.count(" | ") > 3
    }
    assert over_plain["| plain"] == "1" and over_plain["| fast"] == "2.00 [2.00, 2.50]"
    assert over_plain["| noisy"] == "too noisy to tell [0.67, 2.00]"


def sampled(judge, temperature, count, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([PROMPTS[0]] * 8)
    for _ in range(count):
        p = (judge(ids).logits[:, -1] / temperature).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(p, 1, generator=generator)], 1)
    return ids[:, 3:].tolist()


@pytest.mark.parametrize(("drawn_at", "passes"), [(1.0, True), (0.7, False), (1.4, False)])
def test_a_distribution_that_is_too_sharp_or_too_flat_is_disqualified(judge, drawn_at, passes):
    found = Measurement(contender("x", [], temperature=1.0))
    found.runs = [Run(sampled(judge, drawn_at, 40, seed=3), 1.0, 1.0, [])]
    assert check_distribution(judge, 1.0, found.texts([PROMPTS[0]], 8))["passed"] is passes


def test_the_integral_transform_is_uniform_on_rows_of_known_distribution():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((4000, 7))
    tokens = multinomial(softmax(logits), rng).tolist()
    u = integral_transform(logits, tokens, 1.0, rng)
    assert abs(np.histogram(u, 10, (0, 1))[0] - 400).max() < 80


def test_greedy_tokens_that_are_not_the_argmax_are_counted(judge):
    right = load.load_model(str(pair.draft_folder()), device="cpu", max_num_seqs=1)
    right.prefill([0], [PROMPTS[0]])
    with torch.inference_mode():
        best = int(judge(torch.tensor([PROMPTS[0]])).logits[0, -1].argmax())
    for token, wrong in ((best, 0), (best + 1, 1)):
        found = Measurement(contender("x", []))
        found.runs = [Run([[token]], 1.0, 1.0, [])]
        assert check_distribution(judge, 0.0, found.texts([PROMPTS[0]]))["wrong"] == wrong


def test_an_inflated_model_costs_more_and_says_the_same(judge):
    grown = inflate(judge, 2)
    ids = torch.tensor([PROMPTS[2]])
    with torch.inference_mode():
        assert torch.equal(judge(ids).logits, grown(ids).logits)
    assert grown.num_parameters() > judge.num_parameters()
    compiled = [
        CompiledModel(m, max_num_seqs=1, cache_dtype="float32").prefill([0], [PROMPTS[2]]).logits
        for m in (judge, grown)
    ]
    assert np.array_equal(*compiled)
    with pytest.raises(InvalidInputError, match="0 or more"):
        inflate(judge, -1)


def test_llama_cpp_runs_the_same_model(judge, tmp_path):
    pytest.importorskip("xllamacpp")
    from polydraft.bench.llama_cpp import LlamaCpp, write_gguf

    tokenizer = load.load_tokenizer(str(pair.draft_folder()))
    write_gguf(judge, tokenizer, tmp_path / "draft.gguf")
    server = LlamaCpp(tmp_path / "draft.gguf")
    assert server.check_logits(judge, PROMPTS[2]) < 1e-3
    run = server.contender("llama.cpp", 0.0).generate(
        [PROMPTS[2]], SamplingParams(temperature=0, max_tokens=12)
    )
    found = Measurement(contender("llama.cpp", []), [run])
    assert len(run.token_ids) == 12
    assert check_distribution(judge, 0.0, found.texts([PROMPTS[2]]))["passed"]


def test_ways_are_parsed_by_name_and_size():
    assert Way.parse("model:coupled+race") == Way("model:coupled", "race")
    assert Way.parse("ngram@2x5") == Way("ngram", "auto", 5, 2)


@pytest.mark.parametrize("text", ["ngram@3", "ngram@ax4", "ngram@", "model@-1x4", "+block", ""])
def test_a_way_that_cannot_be_read_is_refused_with_its_form(text):
    with pytest.raises(InvalidInputError, match=r"expected DRAFTER\[\+VERIFIER\]\[@PATHSxDEPTH\]"):
        Way.parse(text)
    result = CliRunner().invoke(app, ["bench", "--model", "embedded", "--quick", "--no-peers", "--way", text])
    assert result.exit_code == 2 and "error: --way" in result.stderr


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("nosuch", "unknown drafter 'nosuch'"),
        ("ngram+nosuch", "unknown verifier 'nosuch'"),
        ("ngram+block", "Verifiers that fit: match"),
    ],
)
def test_a_way_that_cannot_be_built_is_refused(way, said):
    result = CliRunner().invoke(
        app, ["bench", "--model", "embedded", "--quick", "--no-peers", "--way", "ngram", "--way", way]
    )
    assert result.exit_code == 2 and result.stdout == ""
    assert said in result.stderr


def test_a_run_in_which_nobody_could_be_measured_is_an_error_with_the_reasons():
    result = CliRunner().invoke(
        app,
        ["bench", "--model", "embedded", "--quick", "--no-peers", "--max-tokens", "5000", "--way", "ngram"],
    )
    assert result.exit_code == 2
    (said,) = [x for x in result.stderr.splitlines() if x.startswith("error: ")]
    assert "no contender could be measured" in said and "the context holds 1024" in said


def test_the_command_writes_json_and_table_of_which_a_study_draws_a_picture(tmp_path):
    file = tmp_path / "bench.json"
    asked = [
        "bench",
        "--model",
        "embedded",
        "--quick",
        "--no-peers",
        "--max-tokens",
        "6",
        "--report",
        str(file),
        "--way",
        "model:chain+block@1x3",
    ]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert [row["contender"] for row in report["rows"]] == ["plain", "model:chain+block@1x3"]
    assert set(report["ratios"]) == {"plain", "model:chain+block@1x3"}
    low, high = report["intervals"]["model:chain+block@1x3"]["plain"]
    assert (
        low <= report["ratios"]["model:chain+block@1x3"]["plain"] <= high
        and f"[{low:.2f}, {high:.2f}] |" in result.output
    )
    wanted = {
        "tokens_per_second",
        "tokens_per_cpu_second",
        "tokens_per_step",
        "time_to_first_token",
        "inter_token_p50",
    }
    assert wanted | {"inter_token_p99", "peak_memory", "spread", "distribution_check"} <= set(
        report["rows"][0]
    )
    assert {"hardware", "versions", "commit", "command"} <= set(report)
    assert file.with_suffix(".md").read_text() in result.output + "\n"
    bench_picture.main(file)
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_command_measures_the_path_for_gpus_on_the_device_that_it_is_told(tmp_path):
    file = tmp_path / "bench.json"
    asked = [
        "bench",
        "--model",
        "embedded",
        "--quick",
        "--no-peers",
        "--max-tokens",
        "4",
        "--report",
        str(file),
        "--way",
        "model@2x2",
        "--batch",
        "2",
    ]
    result = CliRunner().invoke(app, [*asked, "--device", "cpu", "--backend", "transformers"])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert (report["settings"]["device"], report["settings"]["backend"]) == ("cpu", "transformers")
    assert all(row["distribution_check"]["passed"] and row["tokens_per_second"] > 0 for row in report["rows"])


def test_transformers_with_a_static_cache_says_what_it_says_without(judge):
    asked = PROMPTS[:1], SamplingParams(max_tokens=5, temperature=0)
    plain, static = (
        transformers_contender(judge, 0.0, **options) for options in ({}, {"cache_implementation": "static"})
    )
    assert plain.generate(*asked).outputs == static.generate(*asked).outputs


def test_a_file_without_prompts_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    result = CliRunner().invoke(
        app, ["bench", "--model", "embedded", "--no-peers", "--prompts", str(tmp_path / "empty.txt")]
    )
    assert result.exit_code == 2
    assert "holds no prompt" in result.output


def test_a_trained_head_is_measured_by_its_folders_name(tmp_path):
    bench = Bench(peers=False, ways=["ngram"])
    head = untrained("medusa", bench._target, tmp_path / "mine")
    figures = Bench(peers=False, heads=[head], temperature=0.0).run(
        bench.prompts(1), max_tokens=8, repetitions=1
    )
    rows = {row["contender"]: row for row in figures.rows()}
    assert set(rows) == {"plain", "mine@1x3"} and rows["mine@1x3"]["drafter"].startswith("medusa")
    assert all(check["passed"] for check in figures.checks.values())
