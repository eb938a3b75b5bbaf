"""A GGUF model in several files, or in one without the suffix, is the model of the whole file."""

import json
import shutil
from pathlib import Path

import gguf
import pytest

from polydraft.cli.serve import model_choices
from polydraft.errors import ModelLoadError
from polydraft.models.load import load_model, load_tokenizer
from polydraft.models.loading.gguf import GgufWeights
from polydraft.models.store.hub import _tagged, located
from tests.models.test_oracle_gguf import FOLDER, assert_step

PHI = FOLDER / "phi3.gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The file in three parts, as the `gguf` package writes them: settings lie in the first alone."""
    folder = tmp_path_factory.mktemp("parts")
    reader = gguf.GGUFReader(PHI)
    writer = gguf.GGUFWriter(folder / "phi.gguf", "phi3", split_max_tensors=10)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind, *inner = field.types
        writer.add_key_value(key, field.contents(), kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert [path.name for path in sorted(folder.iterdir())] == [
        f"phi-0000{k}-of-00003.gguf" for k in (1, 2, 3)
    ]
    return folder


def runs(place):
    """It is the model of the whole file."""
    case = json.loads(PHI.with_suffix(".json").read_text(encoding="utf-8"))["cases"][1]
    target = load_model(str(place), max_num_seqs=1, max_model_len=96, cache_dtype="float32")
    assert_step(target.prefill([0], [case["prompt"]]).logits[0, 0], case, 0)
    return target


@pytest.mark.parametrize("name", ["phi-00001-of-00003.gguf", "phi-00003-of-00003.gguf", ""])
def test_parts_are_one_model_by_the_name_of_any_of_them_or_of_their_folder(folder, name):
    place = folder / name
    whole = GgufWeights.of(PHI)
    assert runs(place).name == str(located(place)) == str(folder / "phi-00001-of-00003.gguf")
    file = GgufWeights.of(located(place))
    assert {entry.part for entry in file.store.tensors.values()} == {0, 1, 2}
    assert all(
        file._blocks(name)[1].tobytes() == whole._blocks(name)[1].tobytes() for name in whole.store.tensors
    )
    assert load_tokenizer(str(place)).get_vocab() == load_tokenizer(str(PHI)).get_vocab()


def test_a_part_that_is_missing_or_renamed_is_named(folder, tmp_path):
    first, second, third = (shutil.copy(path, tmp_path / path.name) for path in sorted(folder.iterdir()))
    Path(second).rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(
        ModelLoadError,
        match=r"phi-00002-of-00003\.gguf' was given, but there is no such file. It is one of 3 parts",
    ):
        load_model(str(first))
    with pytest.raises(
        ModelLoadError,
        match=r"elsewhere\.gguf' was given, but it says that it is part 2 of 3; expected part 1 of 1",
    ):
        load_model(str(tmp_path / "elsewhere.gguf"))
    shutil.copy(third, second)
    with pytest.raises(ModelLoadError, match="part 3 of 3; expected part 2 of 3"):
        load_model(str(first))


@pytest.mark.parametrize("name", ["sha256-0123abcd", "Phi.GGUF", "link"])
def test_a_file_is_known_by_its_first_bytes_whatever_its_name(tmp_path, name):
    if name == "link":
        (tmp_path / name).symlink_to(shutil.copy(PHI, tmp_path / "blob"))
    else:
        shutil.copy(PHI, tmp_path / name)
    runs(tmp_path / name)
    if name == "Phi.GGUF":
        assert runs(tmp_path).name == str(tmp_path / name)


@pytest.mark.parametrize("name", ["mmproj-F16.gguf", "phi-mmproj-model.gguf"])
def test_a_projector_of_pictures_beside_a_model_is_no_second_model(tmp_path, name):
    shutil.copy(PHI, tmp_path / "phi-F16.gguf")
    (tmp_path / name).write_bytes(b"GGUF")
    assert runs(tmp_path).name == str(tmp_path / "phi-F16.gguf")
    assert (
        _tagged(["mmproj-F16.gguf", "phi-mmproj-F16.gguf", "some-long-name-F16.gguf"], "owner/tiny", "F16")
        == "some-long-name-F16.gguf"
    )
    assert [choice.name for choice in model_choices([], tmp_path, [])] == ["phi-F16"]
    (tmp_path / "phi-F16.gguf").unlink()
    assert located(tmp_path) == tmp_path / name


def test_a_link_to_a_part_is_the_model_too(folder, tmp_path):
    (tmp_path / "latest").symlink_to(folder / "phi-00001-of-00003.gguf")
    runs(tmp_path / "latest")


def test_a_served_folder_has_one_model_for_all_parts(folder):
    shutil.copy(PHI, folder / "whole.GGUF")
    assert [choice.name for choice in model_choices([], folder, [])] == ["phi", "whole"]
    (folder / "whole.GGUF").unlink()


def test_the_tag_of_a_repository_finds_the_first_part():
    names = ["README.md", *(f"q4_k_m/tiny-Q4_K_M-0000{k}-of-00002.gguf" for k in (2, 1)), "tiny-Q8_0.gguf"]
    assert _tagged(names, "owner/tiny", "q4_k_m") == names[2]
    assert _tagged(names, "owner/tiny", "Q8_0") == "tiny-Q8_0.gguf"
