"""Bad input, from the command line: one line that names what was wrong and what is allowed, and nothing is written."""

import json
import re

import numpy as np
import pytest
import yaml
from accelerate.state import AcceleratorState
from PIL import Image
from transformers import ResNetBackbone, ResNetConfig

from regard.configuration.recurrent import ALIGNMENT_NAMES
from regard.tokenization.words import train_words
from regard.training.families.captioner import CAPTIONER
from regard.training.families.train import train

TINY = {
    "image_size": 32,
    "max_length": 8,
    "batch_size": 4,
    "steps": 2,
    "validation": "0.25",
    "config": {"hidden_size": 16},
}


def write_images(folder, number: int = 8) -> str:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = []
    for index in range(number):
        Image.fromarray(rng.integers(256, size=(33, 35, 3), dtype=np.uint8)).save(folder / f"{index}.png")
        rows.append({"file_name": f"{index}.png", "text": f"a picture of {'noise' if index % 2 else 'snow'}"})
    write_rows(folder, rows)
    return str(folder)


def write_rows(folder, rows: list[dict]) -> None:
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def read_rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines()]


def damage(path) -> None:
    """Cuts an image file off in its middle."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.fixture
def images(tmp_path):
    """A folder of captioned images, to be spoilt."""
    write_images(tmp_path / "images")
    return tmp_path / "images"


@pytest.fixture(scope="module")
def captioner_folder(tmp_path_factory):
    """A captioner's run that has ended."""
    folder = tmp_path_factory.mktemp("captioner")
    AcceleratorState._reset_state(reset_partial_state=True)
    settings = {**TINY, "data": [write_images(folder / "images")], "log_with": ["none"]}
    train(CAPTIONER, folder / "run", settings)
    return folder / "run"


@pytest.fixture
def refused_run(refusal, flags, tmp_path):
    """The line that a training is refused with; its output folder is as it was."""

    def run(family: str, settings: dict) -> str:
        line = refusal("train", family, *flags(settings), "--output", tmp_path / "runs" / "run")
        assert not (tmp_path / "runs").exists()
        # Neither in a folder that is there.
        (tmp_path / "there").mkdir()
        assert refusal("train", family, *flags(settings), "--output", tmp_path / "there") == line
        assert list((tmp_path / "there").iterdir()) == []
        return line

    return run


def test_what_is_spoilt_here_works_unspoilt(command, flags, images, captioner_folder, tmp_path):
    settings = {**TINY, "data": [str(images)]}
    assert command("train", "captioner", *flags(settings), "--output", tmp_path / "run").code == 0
    for model in (tmp_path / "run", captioner_folder):
        ended = command("generate", images / "0.png", "--model", model)
        assert ended.code == 0
        assert ended.err == ""
        assert len(ended.out.splitlines()) == 1


# Generating


def test_a_source_longer_than_the_positions(refusal, trained):
    line = refusal("generate", "r" * 100, "--model", trained("transformer"))
    assert re.search(r"\b10\d > 32 \(`max_position_embeddings`\)", line)


@pytest.mark.parametrize("family", ["decoder", "transformer", "recurrent"])
@pytest.mark.parametrize("source", ["", " \n\t"])
def test_an_empty_source(refusal, trained, family, source):
    assert "`prompt` is empty: give it a word or more" in refusal("generate", source, "--model", trained(family))


@pytest.mark.parametrize("name", ["", "nowhere.png", "a river", "."])
def test_a_prompt_that_is_no_file(refusal, captioner_folder, name):
    line = refusal("generate", name, "--model", captioner_folder)
    assert f"`prompt` ({name}) must be the file of an image" in line


@pytest.mark.parametrize("kind", ["truncated", "text", "empty"])
def test_a_file_that_is_no_image(refusal, captioner_folder, images, kind):
    path = images / "3.png"
    if kind == "truncated":
        damage(path)
    else:
        path.write_text("a river" if kind == "text" else "")
    line = refusal("generate", path, "--model", captioner_folder)
    assert f"the image {path} cannot be read: " in line


# Images to train on


def test_an_image_that_is_not_there(refused_run, images):
    (images / "3.png").unlink()
    line = refused_run("captioner", {**TINY, "data": [str(images)]})
    assert f"{images / 'metadata.jsonl'}:4 names the image '3.png', but there is no file" in line


def test_an_image_that_is_damaged(refused_run, images):
    damage(images / "3.png")
    line = refused_run("captioner", {**TINY, "data": [str(images)]})
    assert f"{images / '3.png'}: the image does not decode: " in line


def test_a_caption_of_unknown_words(refused_run, images, tmp_path):
    rows = read_rows(images)
    for row in rows:
        row["text"] = "zwölf Boxkämpfer"
    write_rows(images, rows)
    train_words(["a picture of snow"]).save_pretrained(tmp_path / "words")
    line = refused_run("captioner", {**TINY, "data": [str(images)], "tokenizer": str(tmp_path / "words")})
    assert "the caption 'zwölf Boxkämpfer' holds no word that the tokenizer knows: " in line
    assert "another `tokenizer`" in line


def test_an_empty_caption(refused_run, images):
    rows = read_rows(images)
    rows[2]["text"] = " "
    write_rows(images, rows)
    line = refused_run("captioner", {**TINY, "data": [str(images)]})
    assert f"{images / 'metadata.jsonl'}:3" in line
    assert "'text'" in line


def test_images_without_captions(refused_run, images):
    (images / "metadata.jsonl").unlink()
    line = refused_run("captioner", {**TINY, "data": [str(images)]})
    assert f"folder {str(images)!r} holds no metadata file (metadata.jsonl, metadata.csv, metadata.parquet)" in line


def test_a_folder_without_the_caption_column(refused_run, images):
    line = refused_run("captioner", {**TINY, "data": [str(images)], "caption_column": "caption"})
    assert "has no column 'caption'; `caption_column` can be 'file_name', 'text'" in line


def test_a_backbone_for_images_of_other_channels(refused_run, images, tmp_path):
    small = {"embedding_size": 8, "hidden_sizes": [12], "depths": [1], "layer_type": "basic", "num_channels": 1}
    ResNetBackbone(ResNetConfig(**small)).save_pretrained(tmp_path / "grey")
    line = refused_run("captioner", {**TINY, "data": [str(images)], "backbone": str(tmp_path / "grey")})
    assert "the backbone (`num_channels` 1) must read 3 channels" in line


def test_a_configured_backbone_for_images_of_other_channels(refused_run, images):
    own = yaml.safe_dump({"model_type": "resnet", "num_channels": 4}, default_flow_style=True).strip()
    line = refused_run("captioner", {**TINY, "data": [str(images)], "config": {"backbone_config": own}})
    assert "the backbone (`num_channels` 4) must read 3 channels" in line


# Names and tables


@pytest.mark.parametrize("family", ["captioner", "recurrent"])
def test_an_unknown_alignment(refused_run, family):
    line = refused_run(family, {"alignment": "bahdanau"})
    assert f"`alignment` ('bahdanau') must be one of {', '.join(ALIGNMENT_NAMES)}" in line


def test_an_unknown_type_of_decoder(refused_run):
    line = refused_run("captioner", {"decoder_type": "cnn"})
    assert "`decoder_type` ('cnn') must be one of recurrent, transformer" in line


@pytest.mark.parametrize("alignment", ["dot", "scaled_dot"])
def test_a_dot_product_of_unequal_widths(refused_run, alignment):
    line = refused_run("recurrent", {"alignment": alignment, "config": {"hidden_size": 32, "encoder_hidden_size": 20}})
    assert (
        "needs queries and keys of one width, got 32 and 40: make them equal, or use 'bilinear' or 'additive'" in line
    )


@pytest.mark.parametrize("setting", ["source_column", "target_column"])
@pytest.mark.parametrize("family", ["transformer", "recurrent"])
def test_a_table_without_the_column(refused_run, tmp_path, family, setting):
    file = tmp_path / "pairs.csv"
    file.write_text("source,target,note\n" + "a,b,c\n" * 20)
    line = refused_run(family, {"data": [str(file)], setting: "english"})
    assert f"{file}:" in line
    assert f"has no column 'english'; `{setting}` can be 'source', 'target', 'note'" in line


@pytest.mark.parametrize("family", ["transformer", "recurrent"])
def test_dates_of_an_unknown_locale(refused_run, family):
    line = refused_run(family, {"data": ["dates:de,fr_FR"]})
    assert "'dates:de,fr_FR' names an unknown locale, 'fr_FR' (did you mean 'fr'?); there are " in line
    assert "en_US" in line.partition("there are ")[2]
