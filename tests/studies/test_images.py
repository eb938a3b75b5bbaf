"""The study of pictures, on very few of them: a folder that loads."""

import json

import pytest
import torch

from polydraft.errors import InvalidInputError
from polydraft.papers.lantern.engine import ImageEngine
from polydraft.papers.lantern.folder import ImageFolder, ImageSizes, digits_folder
from studies.images import training
from studies.images.data import Pictures, emoji
from tests.support.closeness import assert_close


@pytest.fixture(scope="module")
def pictures():
    """Digits, as the folder that comes along has coded them."""
    folder = ImageFolder.load(digits_folder())
    some = folder.texts[:200]
    labels = torch.from_numpy(some[:, 0] - folder.tokenizer.sizes.num_codes)
    return Pictures(folder.tokenizer.decode(torch.from_numpy(some[:, 1:])), labels, folder.classes)


def test_a_trained_folder_makes_pictures(pictures, tmp_path):
    sizes = ImageSizes(width=8, num_codes=16)
    settings = training.Settings(
        sizes,
        (1, 32),
        (1, 32),
        tokenizer_steps=30,
        target_steps=3,
        draft_steps=2,
        batch=8,
        copies=1,
        samples=20,
    )
    said = []
    folder = training.train_folder(settings, pictures, tmp_path / "work", tmp_path / "model", said.append)
    assert said and folder.texts.shape == (200, 17)
    assert ImageEngine(folder, depth=2).generate(["3", "9"]).pixels.shape == (2, 1, 8, 8)


def test_the_guided_distribution_of_training_is_that_of_two_rows():
    folder = ImageFolder.load(digits_folder())
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder.target, dtype=torch.float32)
    rows = torch.from_numpy(folder.texts[:2, :6])
    found = training.guided(model, rows, folder.no_class, 3.0)
    bare = torch.cat([torch.full((2, 1), folder.no_class), rows[:, 1:]], 1)
    c = model(rows).logits
    u = model(bare).logits
    assert_close(found, 3 * c - 2 * u)


def test_emoji_are_read_from_their_package(tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "img" / "google" / "64").mkdir(parents=True)
    listed = [{"image": f"{name}.png", "category": name} for name in ("dogs", "cats", "none")]
    (tmp_path / "emoji.json").write_text(json.dumps(listed))
    for name in ("cats", "dogs"):
        image.new("RGBA", (64, 64), (255, 0, 0, 128)).save(tmp_path / "img" / "google" / "64" / f"{name}.png")
    found = emoji(tmp_path, 16)
    assert found.classes == ("cats", "dogs") and found.labels.tolist() == [1, 0]
    assert found.pixels[0, :, 0, 0].tolist() == pytest.approx([1.0, 0.5, 0.5], abs=0.01)
    with pytest.raises(InvalidInputError, match="npm pack"):
        emoji(tmp_path / "nothing", 16)
