"""Models, images and data of anyone, from the command line: what does not do is refused in one line that names it."""

import io
import json
import random
import shutil
import struct
import sys
import zlib

import datasets
import numpy as np
import pytest
from PIL import Image
from transformers import BertConfig

import regard.commands.app
from regard.commands.push import plain_card
from regard.training.reading import sources
from tests.regard.commands.test_bad_input import write_rows
from tests.support.thorough import chosen, one_or_all

ROWS = [{"text": f"a {animal} sat", "label": animal} for animal in ("cat", "dog")] * 8
NOISE = random.Random(0).randbytes(300)


@pytest.fixture
def spoilt(whole, tmp_path):
    """Copies a model, with some fields of one of its files changed."""

    def copy(kind, file="config.json", **fields):
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        shutil.copytree(whole / kind, tmp_path / "model")
        path = tmp_path / "model" / file
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        return tmp_path / "model"

    return copy


@pytest.fixture
def lines(corpus_folder, tmp_path, monkeypatch):
    """The command lines that take a model of some kind."""
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    output, model = tmp_path / "output", tmp_path / "model"
    own = ["--data", tmp_path / "rows.jsonl", "--log-with", "none", "--epochs", "1", "--output", output]
    evaluate = ["evaluate", model, "--data", corpus_folder, "--batches", "1", "--setting", "max_length=16"]
    return {
        "fill": ("bert", ["fill", "a [MASK] cat", "--model", model]),
        "finetune": ("bert", ["finetune", "classification", "--model", model, *own]),
        "export": ("bert", ["export", model, output]),
        "push": ("decoder", ["push", model, "me/x"]),
        "generate": ("decoder", ["generate", "a cat", "--model", model, "--max-new-tokens", "2"]),
        "evaluate": ("decoder", evaluate),
        "evaluate bert": ("bert", evaluate),
        "attention": (
            "decoder",
            ["inspect", "attention", model, "--text", "a cat", "--output", tmp_path / "a.html"],
        ),
    }


COMMANDS = ["fill", "finetune", "export", "push", "generate", "evaluate", "evaluate bert", "attention"]
every_command = pytest.mark.parametrize("name", COMMANDS)


# Models


@one_or_all
@every_command
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_damaged_file(refusal, lines, spoilt, tmp_path, name, file, thorough):
    kind, line = lines[name]
    path = spoilt(kind) / file
    content = path.read_bytes()
    damages = [b"", content[: len(content) // 2], NOISE, b"[]", content + content]
    for damage in chosen(damages, COMMANDS.index(name), thorough):
        path.write_bytes(damage)
        told = refusal(*line)
        assert str(path.parent) in told
        assert file in told
    path.unlink()
    path.mkdir()
    assert str(path.parent) in refusal(*line)
    assert not (tmp_path / "output").exists()


@one_or_all
@pytest.mark.parametrize(("name", "turn"), [("fill", 0), ("generate", 1)])
def test_a_field_of_another_type(command, lines, spoilt, name, turn, thorough):
    kind, line = lines[name]
    names = json.loads((spoilt(kind) / "config.json").read_text())
    others = ("id2label", "quantization_config", "return_dict", "output_attentions", "output_hidden_states")
    for number, field in enumerate((*names, *others), turn):
        for value in chosen(["x", -1, None, 10**30], number, thorough):
            folder = spoilt(kind, **{field: value})
            code, _, err = command(*line)
            told = err.splitlines()
            assert code == 0 or (code == 2 and len(told) == 1 and str(folder) in told[0]), f"{field}: {value!r}: {err}"


@pytest.mark.parametrize(("name", "kind"), [("fill", "bert"), ("evaluate", "decoder"), ("evaluate bert", "bert")])
@pytest.mark.parametrize("fields", [{"return_dict": False}, {"output_attentions": True}], ids=str)
def test_the_form_of_outputs_in_a_configuration_changes_nothing(command, lines, spoilt, name, kind, fields):
    spoilt(kind)
    expected = command(*lines[name][1])
    spoilt(kind, **fields)
    assert expected.code == 0
    assert command(*lines[name][1]) == expected


def test_a_number_beyond_64_bits(refusal, spoilt, images, tmp_path):
    model = spoilt("captioner", attention_regularization=10**30)
    told = refusal("evaluate", model, "--data", images)
    assert f"`model` ({model}) cannot be loaded: `attention_regularization` ({10**30}) must be a number of at" in told


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model_max_length": 1.5}, "has a tokenizer whose `model_max_length` (1.5) must be a number of at least 1"),
        ({"model_input_names": []}, "has a tokenizer whose `model_input_names` ([]) do not name 'input_ids'"),
        ({"unk_token": "x"}, "has a tokenizer that fails on an unknown character: "),
        ({"comment": "\ud800"}, "has a tokenizer_config.json that is not JSON: 'utf-8' codec can't encode"),
        ({"pad_token": None}, "has no pad token, which is needed"),
    ],
)
@pytest.mark.parametrize("name", ["finetune", "evaluate bert"])
def test_a_tokenizer_that_would_fail_later(refusal, lines, spoilt, tmp_path, name, fields, told):
    folder = spoilt("bert", "tokenizer_config.json", **fields)
    assert f"`model` ({folder}) {told}" in refusal(*lines[name][1])
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("token", ["pad", "eos"])
def test_evaluating_without_a_special_token(refusal, lines, spoilt, token):
    folder = spoilt("decoder", "tokenizer_config.json", **{f"{token}_token": None})
    assert f"`model` ({folder}) has no {token} token, which is needed" in refusal(*lines["evaluate"][1])


@every_command
def test_a_file_for_a_model(refusal, lines, tmp_path, name):
    (tmp_path / "model").write_bytes(NOISE)
    told = refusal(*lines[name][1])
    assert str(tmp_path / "model") in told
    assert "it is a file" in told or "must be the folder of a run" in told


def test_exporting_nothing(refusal, tmp_path):
    nowhere = tmp_path / "nowhere"
    assert f"`model` ({nowhere}) is no folder here" in refusal("export", nowhere, tmp_path / "output")


@pytest.mark.parametrize("names", [["a`\n\n# Not this\n"], "x", {"a": 1}, [5], [], None], ids=str)
def test_a_card_shows_no_architecture_that_is_no_name(tmp_path, names):
    # What was exported has a stock configuration, which checks no types.
    config = BertConfig(architectures=names)
    config.save_pretrained(tmp_path)
    card = plain_card(tmp_path, "x", bundle=True)
    assert "# x\n\nA `bert`, made with regard.\n\n## Use\n" in card


# Data and output


@pytest.mark.parametrize("number", ["0.5", "-1", "nan"])
def test_a_share_is_nothing_to_evaluate_on(refusal, lines, spoilt, tmp_path, number):
    spoilt("decoder")
    told = f"`data` ({number}) must be a source, not a number"
    assert told in refusal("evaluate", tmp_path / "model", "--data", number)
    output = ["--output", tmp_path / "a.png"]
    assert told in refusal("inspect", "faithfulness", tmp_path / "model", "--data", number, *output)


def test_an_output_that_cannot_be_is_refused_before_the_work(refusal, tmp_path, monkeypatch):
    for work in ("regard.training.families.evaluate.evaluate_model", "regard.loading.load_model"):
        monkeypatch.setattr(work, lambda *_: pytest.fail("the work has begun"))
    (tmp_path / "folder.svg").mkdir()
    for line in (["evaluate", "x"], ["inspect", "attention", "x", "--text", "a"], ["inspect", "heads", "x"]):
        missing, folder = tmp_path / "nowhere" / "a.svg", tmp_path / "folder.svg"
        assert f"`output` ({missing}) must be in a folder that exists" in refusal(*line, "--output", missing)
        assert f"`output` ({folder}) must be a file" in refusal(*line, "--output", folder)


def test_a_file_whose_name_is_not_utf8(refusal, tmp_path):
    (tmp_path / "a\udc80.txt").write_text("a cat")
    told = refusal("train", "bert", "--data", tmp_path / "a\udc80.txt", "--output", tmp_path / "output")
    assert "the file's name " in told
    assert "which is no text" in told


def test_a_data_set_that_is_a_script(refusal, tmp_path, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("Dataset scripts are no longer supported,\nbut found rows.py")

    monkeypatch.setattr(sources, "load_dataset", fail)
    for family, argument in (("bert", "data"), ("captioner", "folder")):
        told = refusal("train", family, "--data", "me/rows", "--output", tmp_path / "output")
        assert f"`{argument}` ('me/rows') is no file or folder here; as a data set on the Hub: Dataset scripts" in told


def test_a_data_set_whose_rows_do_not_decode(refusal, tmp_path, monkeypatch):
    def decode(batch):
        raise RuntimeError("Could not load libtorchcodec.\nIt is missing.")

    rows = datasets.Dataset.from_dict({"text": ["a cat", "a dog"]}).with_transform(decode)
    monkeypatch.setattr(sources, "load_dataset", lambda *args, **options: rows)
    told = refusal("train", "bert", "--data", "me/rows", "--output", tmp_path / "output")
    assert "me/rows:1 can't be read: Could not load libtorchcodec. It is missing." in told


# The command line itself


def test_memory_that_does_not_suffice(refusal, command, monkeypatch):
    def fail(error):
        def work(*args):
            raise error

        monkeypatch.setattr("regard.training.families.evaluate.evaluate_model", work)

    for error in (RuntimeError("DefaultCPUAllocator: can't allocate memory:\nno"), MemoryError(), MemoryError("no")):
        fail(error)
        assert refusal("evaluate", "x").startswith("regard: the memory does not suffice (")
    fail(RuntimeError("a fault of ours"))
    with pytest.raises(RuntimeError, match="a fault of ours"):
        command("evaluate", "x")


def test_what_the_terminal_has_no_character_for(whole, monkeypatch):
    written = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setattr(sys, "argv", ["regard", "generate", "a 猫 cat", "--model", str(whole / "decoder")])
    with pytest.raises(SystemExit) as end:
        regard.commands.app.main()
    assert not end.value.code
    written.flush()
    assert written.buffer.getvalue().startswith(rb"a \u732b cat")


# Images


def picture(mode="RGB", size=(35, 33)):
    pixels = np.random.default_rng(0).integers(256, size=(size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def png(width, height):
    """A file that says it is so large."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(bytes(100))), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def saved(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


GOOD = {
    "one.png": saved(picture(size=(1, 1)), "PNG"),
    "tall.png": saved(picture(size=(1, 999)), "PNG"),
    "cmyk.jpg": saved(picture("CMYK"), "JPEG"),
    "palette.png": saved(picture("P"), "PNG", transparency=bytes(range(256))),
    "deep.png": saved(Image.fromarray(np.arange(63, dtype=np.uint16).reshape(7, 9) * 1000), "PNG"),
    "moving.gif": saved(picture(), "GIF", save_all=True, append_images=[picture("L")]),
}
BAD = {
    "cut.png": saved(picture(), "PNG")[:900],
    "cut.jpg": saved(picture(), "JPEG")[:900],
    "empty.png": b"",
    "text.png": b"a river",
    "bomb.png": png(50_000, 50_000),
    "nothing.png": png(0, 0),
    "bright.tiff": saved(Image.fromarray(np.full((7, 9), 1e9, dtype=np.float32)), "TIFF"),
}


@pytest.fixture
def images(tmp_path):
    """A folder of captioned images."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(2):
        picture().save(folder / f"{number}.png")
    write_rows(folder, [{"file_name": f"{number}.png", "text": "a red cat"} for number in range(2)])
    return folder


def with_image(images, name, content):
    (images / name).write_bytes(content)
    names = ["0.png", "1.png", name]
    write_rows(images, [{"file_name": each, "text": "a red cat"} for each in names])
    return images / name


@pytest.mark.parametrize("name", GOOD)
def test_images_of_every_kind(command, whole, images, tmp_path, name):
    image, model = with_image(images, name, GOOD[name]), whole / "captioner"
    output = ["--output", tmp_path / "a.svg", "--target", "a cat"]
    for line in (
        ["generate", image, "--model", model],
        ["inspect", "attention", model, "--image", image, *output],
        ["evaluate", model, "--data", images],
    ):
        ended = command(*line)
        assert ended.code == 0, ended.err


def test_a_photograph_is_turned_upright(command, whole, images, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned to the left
    upright, lying = tmp_path / "upright.png", tmp_path / "lying.png"
    picture().save(upright)
    picture().transpose(Image.Transpose.ROTATE_90).save(lying, exif=exif)
    line = ["inspect", "shapes", whole / "captioner", "--target", "a cat", "--image"]
    assert command(*line, lying).out == command(*line, upright).out
    picture().transpose(Image.Transpose.ROTATE_90).save(lying)
    assert command(*line, lying).out != command(*line, upright).out


@pytest.mark.parametrize("name", BAD)
def test_images_that_cannot_be_read(refusal, command, whole, images, tmp_path, name):
    image, model = with_image(images, name, BAD[name]), whole / "captioner"
    output = tmp_path / "a.svg"
    assert f"the image {image} cannot be read: " in refusal("generate", image, "--model", model)
    line = ["inspect", "attention", model, "--image", image, "--output", output]
    assert f"the image {image} cannot be read: " in refusal(*line)
    assert not output.exists()
    line = ["evaluate", model, "--data", images]
    assert f"{image}: the image does not decode: " in refusal(*line)
    skipped = command(*line, "--setting", "bad_records=skip")
    assert skipped.code == 0
    assert "1 bad record was left out" in skipped.out
