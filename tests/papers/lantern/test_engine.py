"""Pictures of the digits that come along: guided distributions with drafts, LANTERN in the engine, and input that does not fit."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from polydraft import Engine, SamplingParams
from polydraft.decoding.guidance import Guidance
from polydraft.errors import IncompatibleError, InvalidInputError, ModelLoadError
from polydraft.models.load import load_model
from polydraft.papers.lantern.comparison import MeteredVerifier, compare, contenders
from polydraft.papers.lantern.engine import ImageEngine, neighbourhoods
from polydraft.papers.lantern.folder import ImageFolder, digits_folder
from polydraft.sampling.softmax import log_softmax

SCALE = 2.5


@pytest.fixture(scope="module")
def folder():
    return ImageFolder.load(digits_folder())


def guided_distribution(folder, text, scale):
    """The distribution behind a text, from transformers' model alone."""
    model = AutoModelForCausalLM.from_pretrained(folder.target, dtype=torch.float32)
    with torch.no_grad():
        ids = torch.tensor([text, [folder.no_class, *text[1:]]])
        own, bare = model(ids).logits[:, -1, : folder.tokenizer.sizes.num_codes].numpy()
    return log_softmax(bare + scale * (own - bare))


def codes(made):
    return [r.token_ids for r in made.results]


@pytest.mark.parametrize("drafter", ["paths", "tree", "ngram"])
def test_guided_rows_behind_drafts_are_those_of_two_whole_passes(folder, drafter):
    """Bonus rows and caches too: every emitted token's logarithm is that of the reference."""
    engine = ImageEngine(folder, guidance=SCALE, drafter=drafter, num_paths=3, depth=4).engine
    bans = dict.fromkeys(folder.others, -np.inf)
    params = SamplingParams(seed=3, max_tokens=16, logprobs=0, logprobs_mode="processed", logit_bias=bans)
    prompt = [folder.class_token("4")]
    (result,) = engine.generate([prompt], params)
    assert result.stats.accepted_tokens > 0 or drafter == "ngram"
    for at, (token, found) in enumerate(zip(result.token_ids, result.samples[0].logprobs, strict=True)):
        distribution = guided_distribution(folder, [*prompt, *result.token_ids[:at]], SCALE)
        assert found.logprob == pytest.approx(
            float(distribution[token]), abs=0.05
        )  # keys and values in bfloat16


def test_with_shared_noise_drafts_change_no_guided_picture(folder):
    def made(**options):
        target = load_model(folder.target, max_num_seqs=8, threads=1)
        distribution = Guidance([folder.no_class], SCALE)
        engine = Engine.of(target, decoding=distribution, verifier="race", **options)
        params = SamplingParams(seed=5, max_tokens=16, logit_bias=dict.fromkeys(folder.others, -np.inf))
        return [r.token_ids for r in engine.generate([[folder.class_token(c)] for c in range(4)], params)]

    plain = made(drafter=None)
    assert (
        made(
            drafter="model:coupled", draft_model=load_model(folder.draft, max_num_seqs=4, threads=1), depth=4
        )
        == plain
    )


def test_a_distribution_that_forgets_to_guide_the_last_row_is_found(folder):
    """The bonus token follows the wrong distribution: the picture is another one."""

    class Forgetful(Guidance):
        def __call__(self, scores, tree, contexts, second=None):
            rows = super().__call__(scores, tree, contexts, second).copy()
            rows[:, -1] = scores.logits[:, -1]
            return rows

    def made(distribution):
        target = load_model(folder.target, max_num_seqs=2, threads=1)
        small = load_model(folder.draft, max_num_seqs=2, threads=1)
        engine = Engine.of(target, decoding=distribution, draft_model=small, depth=3, num_paths=1)
        params = SamplingParams(
            temperature=0, max_tokens=16, logit_bias=dict.fromkeys(folder.others, -np.inf)
        )
        return [engine.generate([[folder.class_token(c)]], params)[0].token_ids for c in range(6)]

    greedy = codes(ImageEngine(folder, guidance=4.0, drafter="none").generate(range(6), temperature=0))
    assert made(Guidance([folder.no_class], 4.0)) == greedy
    assert made(Forgetful([folder.no_class], 4.0)) != greedy


def test_guidance_of_one_is_the_model_itself(folder):
    alone = codes(ImageEngine(folder, guidance=1, drafter="none").generate([1, 5, 8], seed=2))
    target = load_model(folder.target, max_num_seqs=8, threads=1)
    engine = Engine.of(target, drafter=None, decoding=Guidance([folder.no_class], 1.0))
    params = SamplingParams(seed=2, max_tokens=16, logit_bias=dict.fromkeys(folder.others, -np.inf))
    assert [
        r.token_ids for r in engine.generate([[folder.class_token(c)] for c in (1, 5, 8)], params)
    ] == alone


def test_without_a_budget_pictures_are_those_of_the_exact_rule(folder):
    """`recursive` has no walk, and so draws by its verdict as LANTERN does."""
    made = [
        codes(ImageEngine(folder, verifier=v, depth=3).generate([0, 3, 6, 9], seed=8))
        for v in ("recursive", neighbourhoods(folder))
    ]
    assert made[0] == made[1]


def test_lantern_keeps_more_and_says_how_far_it_is_from_the_distribution(folder):
    made = contenders(folder, "model", [0.05, 0.4], [])
    compare(folder, made, range(10), samples=2)
    calls = [one.tokens_per_step for one in made]
    assert calls[0] == 1.0 and calls == sorted(calls) and calls[3] > 1.3 * calls[1]
    variation = [one.total_variation for one in made]
    assert variation[:2] == [0.0, 0.0] and 0 < variation[2] < variation[3] < 1
    distribution = "the guided distribution of the target's two prompts"
    assert [one.row()["lossless_to"] for one in made] == [distribution, distribution, None, None]


def test_greedy_lantern_is_greedy_decoding_without_a_budget(folder):
    def made(**budget):
        rule = neighbourhoods(folder, greedy=True, **budget)
        return ImageEngine(folder, drafter="tree", num_paths=3, verifier=rule).generate(range(6))

    plain = codes(ImageEngine(folder, drafter="none").generate(range(6), temperature=0))
    assert codes(made()) == plain
    relaxed = made(delta=0.4)
    assert sum(r.stats.steps for r in relaxed.results) < sum(r.stats.steps for r in made().results)


def test_a_measured_rule_is_the_rule(folder):
    rule = neighbourhoods(folder, delta=0.2)
    plain, measured = (
        codes(ImageEngine(folder, verifier=v).generate([2, 4], seed=1)) for v in (rule, MeteredVerifier(rule))
    )
    assert plain == measured


def test_codes_and_back(folder):
    codes = torch.from_numpy(folder.texts[:20, 1:])
    pictures = folder.tokenizer.decode(codes)
    assert pictures.shape == (20, 1, 8, 8) and pictures.std() > 0.2
    near = folder.tokenizer.neighbours(5, folder.num_tokens)
    assert (near[folder.others] == -1).all()
    rows = folder.tokenizer.codebook.detach()
    assert near[7, 0] == (rows - rows[7]).square().sum(1).argsort()[1]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda f: f.class_token("ten"), "expected one of 0, 1"),
        (lambda f: f.class_token(10), "class 10"),
        (lambda f: ImageEngine(f).generate([]), "no class"),
        (lambda f: ImageEngine(f, drafter="heads"), "'heads'"),
        (lambda f: ImageEngine(f, guidance=float("nan")), "scale=nan"),
        (lambda f: neighbourhoods(f, num_neighbours=0, delta=0.1), "0 neighbours"),
        (lambda f: neighbourhoods(f, delta=1.5), "delta=1.5"),
        (lambda f: f.tokenizer.decode(torch.zeros(1, 9, dtype=torch.long)), "\\(1, 9\\)"),
    ],
)
def test_input_that_means_nothing_is_refused(folder, call, said):
    with pytest.raises(InvalidInputError, match=said):
        call(folder)


@pytest.mark.parametrize("part", ["images.json", "target/config.json", "draft/config.json", "size"])
def test_parts_of_another_codebook_are_refused(tmp_path, part):
    own = tmp_path / "digits"
    shutil.copytree(digits_folder(), own)
    file = own / ("target/config.json" if part == "size" else part)
    found = json.loads(file.read_text())
    found |= {"vocab_size": 77} if part == "size" else {"codebook": "0" * 64}
    file.write_text(json.dumps(found))
    with pytest.raises(IncompatibleError, match=r"one training"):
        ImageFolder.load(own)


@pytest.mark.parametrize("damage", [lambda f: (f / "codes.safetensors").write_bytes(b"no"), lambda f: (f / "images.json").write_text("{}"), lambda f: (f / "tokenizer.safetensors").unlink()])  # fmt: skip
def test_a_damaged_folder_is_refused(tmp_path, damage):
    own = tmp_path / "digits"
    shutil.copytree(digits_folder(), own)
    damage(own)
    with pytest.raises(ModelLoadError, match="no model of pictures"):
        ImageFolder.load(own)
