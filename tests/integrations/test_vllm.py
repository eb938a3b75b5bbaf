"""What the plug-in for vLLM does without vLLM; `tests/inside_vllm` runs it inside."""

from types import SimpleNamespace

import numpy as np
import pytest

from polydraft.errors import IncompatibleError, InvalidInputError, UnknownNameError
from polydraft.integrations import vllm
from polydraft.integrations.vllm import drafters

VOCABULARY = 64


def config(depth: int = 3, max_model_len: int = 64) -> SimpleNamespace:
    model = SimpleNamespace(
        max_model_len=max_model_len,
        get_vocab_size=lambda: VOCABULARY,
        hf_config=SimpleNamespace(eos_token_id=2),
        tokenizer="",
    )
    return SimpleNamespace(
        model_config=model, speculative_config=SimpleNamespace(num_speculative_tokens=depth)
    )


def asked(proposer: drafters.Proposer, *rows: tuple[list[int], int]) -> list[list[int]]:
    """Drafts for texts, each with how many of its tokens are new."""
    lengths = np.array([len(text) for text, _ in rows])
    texts = np.zeros((len(rows), 64), np.int32)
    for b, (text, _) in enumerate(rows):
        texts[b, : len(text)] = text
    return proposer.propose([text[len(text) - new :] for text, new in rows], lengths, texts)


TEXT = [5, 6, 7, 8, 9, 5, 6]
OTHER = [11, 12, 13, 14, 11, 12]


@pytest.mark.parametrize("name", ["ngram", "suffix", "mixture"])
def test_a_row_is_drafted_for_from_its_own_text_wherever_it_lies(name: str) -> None:
    proposer = getattr(drafters, name)(config())
    assert asked(proposer, (TEXT, 1), (OTHER, 1)) == [[7, 8, 9], [13, 14, 11]]
    assert asked(proposer, ([*OTHER, 13], 1), ([*TEXT, 7, 8], 2))[0][:2] == [14, 11]  # they changed places
    assert asked(proposer, ([*TEXT, 7, 8, 9], 1)) == [[5, 6, 7]]  # one ended
    assert len(proposer._rows) == 1


def test_a_prompt_that_is_still_read_gets_no_draft_and_is_begun_when_it_is_read() -> None:
    proposer = drafters.ngram(config())
    assert asked(proposer, (TEXT[:5], 0)) == [[]]
    assert asked(proposer, (TEXT, 1)) == [[7, 8, 9]]


def test_nothing_is_drafted_beyond_the_context() -> None:
    assert asked(drafters.ngram(config(max_model_len=len(TEXT) + 3)), (TEXT, 1)) == [[7, 8]]
    assert asked(drafters.ngram(config(max_model_len=len(TEXT) + 1)), (TEXT, 1)) == [[]]


def test_a_store_holds_what_finished_requests_emitted_and_not_their_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(drafters.OPTIONS, '{"store": true}')
    proposer = drafters.suffix(config())
    asked(proposer, ([20, 21, 22], 1))
    asked(proposer, ([20, 21, 22, 30, 31, 32, 33], 4))
    assert asked(proposer, ([40, 30, 31], 1)) == [[32, 33]]
    assert asked(proposer, ([41, 20, 21], 1)) == [[]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{", "no JSON"),
        ("[1]", "an object"),
        ('{"store": "here"}', "expected true"),
        ('{"dept": 3}', "no such option"),
        ('{"min_prob": 7}', "min_prob"),
    ],
)
def test_wrong_options_are_refused(options: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(drafters.OPTIONS, options)
    with pytest.raises(InvalidInputError, match=said):
        drafters.suffix(config())


def test_drafters_that_read_the_target_are_refused() -> None:
    with pytest.raises(IncompatibleError, match="texts alone"):
        drafters.phrases(config())
    with pytest.raises(AttributeError, match="sufix"):
        drafters.sufix  # noqa: B018


@pytest.mark.parametrize(
    ("name", "said"), [("typical", "changes the distribution"), ("recursive_wor", "not for chains")]
)
def test_rules_that_vllm_cannot_use_are_refused(name: str, said: str) -> None:
    with pytest.raises(IncompatibleError, match=said):
        vllm.verifier_named(name)
    with pytest.raises(UnknownNameError):
        vllm.verifier_named(f"{name}s")


@pytest.mark.parametrize("found", ["0.31.0", "1.0"])
def test_another_version_is_refused_where_the_option_is_on_and_nothing_happens_where_it_is_off(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "version", lambda name: found)
    monkeypatch.delenv(vllm.VERIFIER, raising=False)
    vllm.register()
    monkeypatch.setenv(vllm.VERIFIER, "block")
    with pytest.raises(IncompatibleError, match=found):
        vllm.register()
