"""`polydraft check --url`: a lossless server passes, one with a relaxed acceptance is found, from outside and with the judge of transformers."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from polydraft import Engine
from polydraft.check.audit import audit
from polydraft.check.remote import Completions
from polydraft.cli.commands import EXIT_STATUS
from polydraft.cli.main import app
from polydraft.errors import InvalidInputError
from polydraft.models import load, pair
from polydraft.models.torch.module import load_module
from tests.server.conftest import serving

FOLDER = str(pair.target_folder())


def engine(verifier, **options):
    return Engine.embedded(verifier=verifier, depth=4, max_num_seqs=4, max_model_len=512, **options)


@pytest.fixture(scope="module")
def judge():
    return load_module(FOLDER, dtype="float32")


def asked(served, judge, temperature, tokens=800, kind=Completions, **more):
    tokenizer = load.load_tokenizer(FOLDER)
    prompts = [load.encode(tokenizer, p.text) for p in pair.prompts()[:4]]
    options = {"temperature": temperature, "max_tokens": 16, "tokens": tokens, "eos_token_ids": (0,), **more}
    return audit(kind(served.url, tokenizer), judge, prompts, **options)


def test_a_lossless_server_passes_and_says_what_it_would_have_shown(judge):
    with serving(engine("block", drafter="model:chain")) as served:
        sampled, greedy = (asked(served, judge, temperature) for temperature in (1.0, 0.0))
    assert sampled.verdict[0] == "passed" and sampled.tokens > 600 and 0 < sampled.detectable < 0.1
    assert (
        greedy.verdict[0] == "passed"
        and not greedy.differences
        and sampled.noise < 0.02
        and not sampled.guessed
    )


def test_a_relaxed_acceptance_is_found(judge):
    with serving(engine("typical", drafter="model:chain")) as served:
        found = asked(served, judge, 1.0, tokens=1600)
    assert found.verdict[0] == "failed"
    behind = [f.p_value for f in found.findings if f.what.startswith("all behind the first")]
    assert min(behind) < 1e-5


def test_another_model_is_found_by_its_log_probabilities_and_texts(judge):
    model = str(pair.draft_folder())
    with serving(
        Engine.from_pretrained(model, drafter="ngram", depth=3, max_num_seqs=4, max_model_len=512)
    ) as served:
        found = asked(served, judge, 0.0, tokens=120)
    assert found.noise > 0.25 and found.differences and "both differ" in found.verdict[1]
    assert all(one.margin > found.margin for one in found.differences)


class Misreporting(Completions):
    """A server that reports log-probabilities of something else for a third of its tokens."""

    def texts(self, prompts, temperature, max_tokens, seeds):
        for text in super().texts(prompts, temperature, max_tokens, seeds):
            yield replace(text, logprobs=[x - 3 * (i % 3 == 0) for i, x in enumerate(text.logprobs or ())])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_of_something_else_fail_alone_where_the_tokens_are_the_models(judge, temperature):
    with serving(engine("block", drafter="model:chain")) as served:
        found = asked(served, judge, temperature, tokens=1400, kind=Misreporting)
    assert (
        found.tokens_verdict[0] == "passed"
        and found.p_value > 0.001
        and 0.3 < found.off < 0.4
        and found.noise > 0.9
    )
    assert (
        found.logprobs_verdict[0] == "failed"
        and found.verdict[1] == "reported log-probabilities differ, tokens do not"
    )
    told = found.to_dict()
    assert [told[f"{what}_verdict"]["status"] for what in ("tokens", "logprobs")] == ["passed", "failed"]


def test_the_command_tells_and_ends_with_its_status():
    given = ["check", "--model", FOLDER, "--steps", "60", "--max-tokens", "8", "--temperature", "0"]
    with serving(engine("match", drafter="ngram")) as served:
        found = CliRunner().invoke(app, [*given, "--url", f"{served.url}/v1", "--json"])
        shown = CliRunner().invoke(app, [*given, "--url", served.url])
    assert found.exit_code == 0 and json.loads(found.stdout)["status"] == "passed"
    assert shown.exit_code == 0 and "near ties" in shown.stdout
    assert "tokens            passed" in shown.stdout and "log-probabilities passed" in shown.stdout


def test_what_cannot_be_asked_is_refused(judge):
    alone = CliRunner().invoke(app, ["check", "--url", "http://127.0.0.1:9"])
    assert alone.exit_code == EXIT_STATUS and "without --model" in alone.stderr
    nobody = CliRunner().invoke(app, ["check", "--url", "http://127.0.0.1:9", "--model", FOLDER])
    assert nobody.exit_code == EXIT_STATUS and "no server of models answers" in nobody.stderr
    with (
        serving(engine("match", drafter="ngram"), keys=["k"]) as served,
        pytest.raises(InvalidInputError, match="status 401"),
    ):
        asked(served, judge, 0.0)
