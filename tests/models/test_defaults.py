"""Sampling defaults are those that a model's authors wrote into its folder or its file."""

import json
import shutil

import pytest

from polydraft import Engine
from polydraft.errors import ModelLoadError
from polydraft.models import pair
from polydraft.models.store.store import sampling_defaults
from tests.models.gguf_files import write
from tests.models.test_gguf import small

WRITTEN = {
    "temperature": 0.6,
    "top_p": 0.8,
    "top_k": 20,
    "min_p": None,
    "repetition_penalty": 1.05,
    "eos_token_id": 0,
}


def folder_with(place, settings):
    shutil.copytree(pair.draft_folder(), place)
    (place / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(place)


def test_a_folders_defaults_are_those_of_its_generation_config_for_texts_and_chats(tmp_path):
    folder = folder_with(tmp_path / "model", WRITTEN)
    engine = Engine.from_pretrained(folder, drafter=None, device="cpu", max_num_seqs=1, max_model_len=64)
    for chat in (False, True):
        params = engine.default_params(chat=chat)
        assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (
            0.6,
            0.8,
            20,
            1.05,
        )


def test_a_files_defaults_are_those_of_its_metadata(tmp_path):
    def settings(writer):
        writer.add_float32("general.sampling.temp", 0.25)
        writer.add_int32("general.sampling.top_k", 40)
        writer.add_float32("general.sampling.penalty_repeat", 1.5)

    file = write(tmp_path / "m.gguf", small("llama"), tokenizer=settings)
    assert sampling_defaults(file) == {"temperature": 0.25, "top_k": 40, "repetition_penalty": 1.5}


def test_a_model_without_defaults_samples_its_own_distribution_and_chats_cooler(tmp_path):
    engine = Engine.from_pretrained(
        str(pair.draft_folder()), drafter=None, device="cpu", max_num_seqs=1, max_model_len=64
    )
    assert (engine.default_params().temperature, engine.default_params().top_p) == (1.0, 1.0)
    assert (engine.default_params(chat=True).temperature, engine.default_params(chat=True).top_p) == (
        0.7,
        0.95,
    )


@pytest.mark.parametrize("settings", [{"temperature": -1}, {"top_p": 7}, {"top_k": "many"}])
def test_defaults_out_of_range_are_refused_with_the_file(tmp_path, settings):
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json.*{next(iter(settings))}="):
        sampling_defaults(folder_with(tmp_path / "model", settings))
