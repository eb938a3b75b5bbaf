"""`generate` with the custom loop against plain `generate`: the same tokens at temperature 0, the same distribution above it."""

from copy import deepcopy

import numpy as np
import pytest
import torch
import transformers as hf
from scipy.stats import chi2
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

import polydraft
from polydraft.errors import IncompatibleError, InvalidInputError, ModelLoadError, PolydraftError
from polydraft.integrations.transformers_distribution import ByRow
from polydraft.models import pair
from tests.models.tree_rounds import ARCHITECTURES, V, small_model
from tests.support.closeness import assert_close

EOS = 58
PAD = 0


def model_of(name="llama", config=None):
    model = small_model(config or ARCHITECTURES[name])
    model.generation_config = hf.GenerationConfig(eos_token_id=EOS, pad_token_id=PAD, bos_token_id=1)
    return model


def noisy_copy(model, scale=0.05):
    """A draft that is often right."""
    copy = deepcopy(model)
    torch.manual_seed(1)
    for weight in copy.parameters():
        weight.data += scale * torch.randn_like(weight)
    return copy


@pytest.fixture(scope="module")
def llama():
    model = model_of()
    return model, noisy_copy(model)


PADDED = {
    "input_ids": torch.tensor([[0, 0, 0, 9, 8, 7], [6, 11, 12, 9, 8, 7], [0, 0, 3, 3, 3, 3]]),
    "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6, [0, 0, 1, 1, 1, 1]]),
}
SINGLE = {"input_ids": torch.tensor([[9, 8, 7, 9, 8, 7, 9, 8]])}


def both(model, draft, inputs, **options):
    plain = model.generate(**inputs, **options)
    return plain, model.generate(
        **inputs, **options, custom_generate=polydraft.custom_generate(draft_model=draft, depth=4)
    )


GREEDY_OPTIONS = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.3},
    "ngrams": {"no_repeat_ngram_size": 2},
    "least length": {"min_new_tokens": 12},
    "bans": {"bad_words_ids": [[9], [8, 7]]},
    "bias": {"sequence_bias": {(9, 8): -5.0, (11,): 4.0}},
    "suppressed": {"suppress_tokens": [9, 3]},
    "end forced": {"forced_eos_token_id": EOS},
    "constrained": {"prefix_allowed_tokens_fn": lambda b, ids: [[9, 8, 7, 30], [11, 12, 44], [3, 60, 2]][b]},
}


@pytest.mark.parametrize("options", GREEDY_OPTIONS.values(), ids=GREEDY_OPTIONS)
def test_greedy_texts_of_a_left_padded_batch_are_those_of_generate(llama, options):
    plain, drafted = both(*llama, PADDED, do_sample=False, max_new_tokens=20, **options)
    assert np.array_equal(plain, drafted)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_neox", "phi3", "gemma"])
def test_greedy_texts_agree_for_other_architectures(name):
    model = model_of(name)
    plain, drafted = both(model, noisy_copy(model), PADDED, do_sample=False, max_new_tokens=16)
    assert np.array_equal(plain, drafted)


def test_a_sequence_that_ends_early_is_padded_while_others_go_on(llama):
    model, draft = llama
    found = model.generate(**PADDED, do_sample=False, max_new_tokens=20)
    end = int(found[1, 9])
    plain, drafted = both(model, draft, PADDED, do_sample=False, max_new_tokens=20, eos_token_id=end)
    assert np.array_equal(plain, drafted)
    assert (plain[1] == PAD).any()


def test_without_a_draft_model_earlier_text_is_copied(llama):
    model, _ = llama
    loop = polydraft.custom_generate(depth=4)
    drafted = model.generate(**SINGLE, do_sample=False, max_new_tokens=40, custom_generate=loop)
    assert np.array_equal(drafted, model.generate(**SINGLE, do_sample=False, max_new_tokens=40))
    assert loop.stats[0].drafted_tokens > 0


def test_drafts_save_passes_and_the_loop_can_be_used_again(llama):
    model, draft = llama
    loop = polydraft.custom_generate(draft_model=draft, depth=4)
    for inputs, count in ((SINGLE, 30), (PADDED, 40), (SINGLE, 10)):
        drafted = model.generate(**inputs, do_sample=False, max_new_tokens=count, custom_generate=loop)
        assert np.array_equal(drafted, model.generate(**inputs, do_sample=False, max_new_tokens=count))
    assert loop.stats[0].accepted_tokens > 0
    assert loop.stats[0].steps < loop.stats[0].generated_tokens


def test_weights_that_change_between_calls_are_the_weights_that_are_used(llama):
    model = deepcopy(llama[0])
    loop = polydraft.custom_generate(depth=3)
    model.generate(**SINGLE, do_sample=False, max_new_tokens=5, custom_generate=loop)
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0).clone()
    drafted = model.generate(**SINGLE, do_sample=False, max_new_tokens=20, custom_generate=loop)
    assert np.array_equal(drafted, model.generate(**SINGLE, do_sample=False, max_new_tokens=20))


def test_scores_and_logits_are_those_of_generate(llama):
    options = {"do_sample": False, "max_new_tokens": 12, "repetition_penalty": 1.2, "min_new_tokens": 12}
    asks = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain, drafted = both(*llama, PADDED, **options, **asks)
    assert np.array_equal(plain.sequences, drafted.sequences)
    for name in ("scores", "logits"):
        assert len(plain[name]) == len(drafted[name]) == 12
        for expected, found in zip(plain[name], drafted[name], strict=True):
            assert np.array_equal(expected.isinf(), found.isinf())
            assert_close(expected, found)
    again = llama[0].compute_transition_scores(drafted.sequences, drafted.scores, normalize_logits=True)
    assert again.shape == (3, 12)


class Streamed(BaseStreamer):
    def __init__(self):
        self.seen = []
        self.ended = False

    def put(self, value):
        self.seen += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize("loop", [None, polydraft.custom_generate(depth=3)], ids=["generate", "polydraft"])
def test_a_streamer_gets_prompt_tokens_and_end(llama, loop):
    streamer = Streamed()
    found = llama[0].generate(
        **SINGLE, do_sample=False, max_new_tokens=9, streamer=streamer, custom_generate=loop
    )
    assert streamer.seen == found[0].tolist()
    assert streamer.ended


class StopsAt(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


def test_custom_stopping_criteria_cut_inside_a_block(llama):
    model, draft = llama
    token = int(model.generate(**SINGLE, do_sample=False, max_new_tokens=9)[0, 14])
    criteria = StoppingCriteriaList([StopsAt(token)])
    plain, drafted = both(
        model, draft, SINGLE, do_sample=False, max_new_tokens=30, stopping_criteria=criteria
    )
    assert np.array_equal(plain, drafted)
    assert plain.shape[1] < 38


def test_stop_strings_through_their_criterion():
    folder = str(pair.target_folder())
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("import os\nimport ", return_tensors="pt")
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, ["os"])])
    options = {"do_sample": False, "max_new_tokens": 40, "stopping_criteria": criteria}
    plain = model.generate(inputs["input_ids"], **options)
    drafted = model.generate(
        inputs["input_ids"],
        **options,
        custom_generate=polydraft.custom_generate(draft_model=str(pair.draft_folder())),
    )
    assert np.array_equal(plain, drafted)
    assert tokenizer.decode(drafted[0]).endswith("os")


# The distribution

TINY = hf.LlamaConfig(
    vocab_size=8,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=32,
)
LENGTH = 3
ROWS = 300
CALLS = 3
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 4, "top_p": 0.95, "repetition_penalty": 1.4}


def distribution_of(model, prompt):
    """Probability of every continuation of LENGTH tokens under `generate` with SAMPLED, by its own scores."""
    distribution = np.zeros((8,) * LENGTH)

    def grow(path, weight):
        if len(path) == LENGTH:
            distribution[path] = weight
            return
        ids = torch.tensor([[*prompt, *path]])
        options = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": 1,
            "return_dict_in_generate": True,
            "output_scores": True,
            **SAMPLED,
        }
        p = model.generate(ids, **options).scores[0][0].double().softmax(-1)
        for token in np.flatnonzero(p.numpy()):
            grow((*path, int(token)), weight * float(p[token]))

    grow((), 1.0)
    return distribution.ravel()


def p_value(samples, distribution):
    """Chi-square; cells with fewer than five expected are put together."""
    code = (samples * np.array([64, 8, 1])).sum(1)
    seen = np.bincount(code, minlength=512).astype(float)
    expected = distribution * len(samples)
    if seen[expected == 0].sum():
        return 0.0
    big = expected >= 5
    seen = np.append(seen[big], seen[~big].sum())
    expected = np.append(expected[big], expected[~big].sum())
    keep = expected > 0
    return chi2.sf(((seen - expected)[keep] ** 2 / expected[keep]).sum(), keep.sum() - 1)


def sampled(drafter):
    model = model_of(config=TINY)
    model.generation_config = hf.GenerationConfig(eos_token_id=None, pad_token_id=PAD)
    loop = polydraft.custom_generate(draft_model=noisy_copy(model, 0.2), drafter=drafter, depth=2)
    prompt = [1, 2, 3, 2]
    torch.manual_seed(11)
    rows = [
        model.generate(
            torch.tensor([prompt]),
            **SAMPLED,
            max_new_tokens=LENGTH,
            num_return_sequences=ROWS,
            custom_generate=loop,
        ).numpy()[:, len(prompt) :]
        for _ in range(CALLS)
    ]
    return np.concatenate(rows), distribution_of(model, prompt)


@pytest.mark.parametrize("drafter", ["model:chain", pytest.param("model:coupled", marks=pytest.mark.slow)])
def test_sampled_texts_follow_the_distribution_of_generate(drafter):
    assert p_value(*sampled(drafter)) > 1e-3


def test_processors_left_out_at_drafted_nodes_are_caught(monkeypatch):
    right = ByRow.__call__

    def only_at_roots(self, b, ids, scores):
        return right(self, b, ids, scores) if ids.shape[1] == 4 else scores

    monkeypatch.setattr(ByRow, "__call__", only_at_roots)
    assert p_value(*sampled("model:chain")) < 1e-6


def test_a_seed_of_torch_repeats_the_texts_and_samples_differ(llama):
    model, draft = llama
    loop = polydraft.custom_generate(draft_model=draft, depth=3)
    options = {"do_sample": True, "max_new_tokens": 10, "num_return_sequences": 4, "custom_generate": loop}
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append(model.generate(**PADDED, **options))
    assert np.array_equal(texts[0], texts[1])
    assert not np.array_equal(texts[0], texts[2])
    assert len({tuple(row) for row in texts[0][:4].tolist()}) > 1


# Refusals


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"encoder_repetition_penalty": 1.5}, "encoder_repetition_penalty"),
        ({"token_type_ids": torch.zeros(1, 8, dtype=torch.int64)}, "token_type_ids"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused_by_name(llama, options, name):
    model = llama[0]
    if name == "token_type_ids":
        model = model_of("gpt2")
    with pytest.raises(IncompatibleError, match=name):
        model.generate(**SINGLE, max_new_tokens=4, custom_generate=polydraft.custom_generate(), **options)


def test_an_assistant_and_a_streamer_for_a_batch_are_refused(llama):
    model, draft = llama
    with pytest.raises(IncompatibleError, match="assistant_model"):
        model.generate(
            **SINGLE, max_new_tokens=4, assistant_model=draft, custom_generate=polydraft.custom_generate()
        )
    with pytest.raises(IncompatibleError, match=r"streamer.*3 were given"):
        model.generate(
            **PADDED, max_new_tokens=4, streamer=Streamed(), custom_generate=polydraft.custom_generate()
        )


class Counts(LogitsProcessor):
    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + self.calls * torch.arange(scores.shape[1])


class LooksAtOthers(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores + (input_ids == 6).sum() * torch.arange(scores.shape[1])


@pytest.mark.parametrize("processor", [Counts(), LooksAtOthers()], ids=["state", "other rows"])
def test_processors_that_keep_state_or_look_at_other_rows_are_refused(llama, processor):
    with pytest.raises(IncompatibleError, match=type(processor).__name__):
        llama[0].generate(
            **PADDED,
            max_new_tokens=4,
            logits_processor=LogitsProcessorList([processor]),
            custom_generate=polydraft.custom_generate(),
        )


def test_padding_on_the_right_and_empty_constraints_are_refused(llama):
    inputs = {"input_ids": PADDED["input_ids"].flip(1), "attention_mask": PADDED["attention_mask"].flip(1)}
    with pytest.raises(InvalidInputError, match="left padding"):
        llama[0].generate(**inputs, max_new_tokens=4, custom_generate=polydraft.custom_generate())
    banned = LogitsProcessorList([hf.SuppressTokensLogitsProcessor(range(V))])
    with pytest.raises(InvalidInputError, match="no token for row 0"):
        llama[0].generate(
            **SINGLE, max_new_tokens=4, logits_processor=banned, custom_generate=polydraft.custom_generate()
        )


def test_a_draft_of_another_vocabulary_and_a_model_that_cannot_roll_back_are_refused(llama):
    with pytest.raises(IncompatibleError, match=r"8 rows of logits and the model 61"):
        llama[0].generate(
            **SINGLE,
            max_new_tokens=4,
            custom_generate=polydraft.custom_generate(draft_model=model_of(config=TINY)),
        )
    mamba = small_model(hf.MambaConfig(vocab_size=V, hidden_size=32, num_hidden_layers=1, state_size=4))
    with pytest.raises(ModelLoadError, match="Mamba"):
        mamba.generate(**SINGLE, max_new_tokens=4, custom_generate=polydraft.custom_generate())


@pytest.mark.parametrize(
    ("draft", "said"),
    [(3, "draft_model=3 was given; expected a smaller model"), ("/nowhere/model", "does not exist")],
)
def test_a_draft_that_is_no_model_is_refused_before_generate_runs(draft, said):
    with pytest.raises(PolydraftError, match=said):
        polydraft.custom_generate(draft_model=draft)
