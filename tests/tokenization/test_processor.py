"""Images of every kind and captions, to what the captioner takes."""

import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, pipeline
from transformers.utils import is_torchvision_available

from regard import RegardCaptionerConfig, RegardCaptionerForConditionalGeneration
from regard.tokenization.processor import (
    RegardCaptionerProcessor,
    make_captioner_processor,
    open_image,
    to_rgb,
)
from regard.tokenization.words import train_words

HEIGHT, WIDTH = 13, 7


@pytest.fixture
def tokenizer():
    return train_words(["a red cat", "a blue dog, sitting"])


@pytest.fixture
def processor(tokenizer):
    return make_captioner_processor(tokenizer, (HEIGHT, WIDTH), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))


def noise(*channels: int, highest: int = 256) -> np.ndarray:
    return np.random.default_rng(5).integers(0, highest, (HEIGHT, WIDTH, *channels)).astype(np.uint8)


def on_white(colour: np.ndarray, opacity: np.ndarray) -> np.ndarray:
    opacity = opacity[..., None] / 255
    return colour * opacity + 255 * (1 - opacity)


def grey(pixels: np.ndarray) -> np.ndarray:
    return np.repeat(pixels[..., None], 3, axis=2)


def palette_image() -> tuple[Image.Image, np.ndarray, np.ndarray]:
    indices, colours = noise(highest=4), np.array([[250, 10, 20], [0, 90, 200], [30, 60, 90], [255, 255, 0]])
    image = Image.fromarray(indices, "L").copy()
    image.putpalette(colours.astype(np.uint8).flatten().tolist())
    return image, colours[indices], indices


def kinds() -> dict[str, tuple[Image.Image, np.ndarray]]:
    """Images by their kind, and the RGB that each is, worked out by hand."""
    rgb, rgba, la, cmyk = noise(3), noise(4), noise(2), noise(4)
    sixteen = np.random.default_rng(6).integers(0, 65536, (HEIGHT, WIDTH)).astype(np.uint16)
    bits = noise(highest=2).astype(bool)
    floats = np.random.default_rng(7).random((HEIGHT, WIDTH)).astype(np.float32)
    one_colour = noise(highest=3)
    one_colour_image = Image.fromarray(one_colour)
    one_colour_image.info["transparency"] = 1
    opaque, colours, indices = palette_image()
    holed, _, _ = palette_image()
    holed.info["transparency"] = 2
    veiled, _, _ = palette_image()
    opacities = np.array([255, 128, 0, 60], dtype=np.uint8)
    veiled.info["transparency"] = opacities.tobytes()
    return {
        "RGB": (Image.fromarray(rgb), rgb),
        "L": (Image.fromarray(rgb[..., 0]), grey(rgb[..., 0])),
        "L, one transparent": (one_colour_image, np.where(grey(one_colour) == 1, 255, grey(one_colour))),
        "RGBA": (Image.fromarray(rgba), on_white(rgba[..., :3], rgba[..., 3])),
        "LA": (Image.fromarray(la, "LA"), on_white(grey(la[..., 0]), la[..., 1])),
        "P": (opaque, colours),
        "P, one transparent": (holed, np.where(grey(indices) == 2, 255, colours)),
        "P, each its own": (veiled, on_white(colours, opacities[indices])),
        "1": (Image.fromarray(bits), grey(bits * 255)),
        "I;16": (Image.fromarray(sixteen), grey(sixteen / 65535 * 255)),
        "I": (Image.fromarray(sixteen.astype(np.int32)), grey(sixteen / 65535 * 255)),
        "F to 1": (Image.fromarray(floats), grey(floats * 255)),
        "F to 255": (Image.fromarray(floats * 255), grey(floats * 255)),
        "CMYK": (Image.fromarray(cmyk, "CMYK"), (255.0 - cmyk[..., :3]) * (255 - cmyk[..., 3:]) / 255),
    }


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", list(kinds()))
def test_every_kind_of_image(kind, processor):
    image, expected = kinds()[kind]
    assert kind.startswith(image.mode)
    rgb = to_rgb(open_image(image))
    assert rgb.mode == "RGB"
    assert np.abs(np.asarray(rgb).astype(float) - expected).max() <= 1.01
    pixel_values = processor(images=image, return_tensors="pt")["pixel_values"]
    assert pixel_values.shape == (1, 3, HEIGHT, WIDTH)
    normal = (expected / 255 - np.array([0.1, 0.2, 0.3])) / np.array([0.4, 0.5, 0.6])
    assert np.abs(pixel_values[0].permute(1, 2, 0).numpy() - normal).max() < 1.1 / 255 / 0.4


@pytest.mark.parametrize("mode", ["PA", "La", "RGBa"])
def test_rarer_kinds_are_laid_onto_white_too(mode):
    clear = Image.new(mode, (4, 3), (0, 0) if mode == "PA" else 0)
    assert clear.mode == mode
    assert np.asarray(to_rgb(clear)).min() == 255


def test_files_of_sixteen_bits_and_transparency(tmp_path):
    sixteen = np.arange(HEIGHT * WIDTH, dtype=np.uint16).reshape(HEIGHT, WIDTH) * 700
    Image.fromarray(sixteen).save(tmp_path / "16.png")
    assert np.abs(np.asarray(to_rgb(open_image(tmp_path / "16.png"))) - grey(sixteen / 257)).max() <= 1
    palette, colours, indices = palette_image()
    palette.save(tmp_path / "p.png", transparency=0)
    assert (
        np.asarray(to_rgb(open_image(str(tmp_path / "p.png")))) == np.where(grey(indices) == 0, 255, colours)
    ).all()


@pytest.mark.parametrize("kind", ["int", "negative", "float", "not a number"])
def test_pixels_of_no_known_range_are_refused(kind):
    pixels = {
        "int": np.full((2, 2), 65536, dtype=np.int32),
        "negative": np.full((2, 2), -1, dtype=np.int32),
        "float": np.full((2, 2), 255.5, dtype=np.float32),
        "not a number": np.full((2, 2), np.nan, dtype=np.float32),
    }[kind]
    with pytest.raises(
        ValueError, match=r"^an image of the mode [IF] has pixels outside of 0 to (65535|1, or 0 to 255)$"
    ):
        to_rgb(Image.fromarray(pixels))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_stand_as_their_exif_data_says(orientation, processor, tmp_path):
    pixels = noise(3)
    turned = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.swapaxes(0, 1),
        6: np.rot90(pixels, -1),
        7: pixels.swapaxes(0, 1)[::-1, ::-1],
        8: np.rot90(pixels),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    assert (np.asarray(to_rgb(open_image(tmp_path / "turned.png"))) == turned).all()
    expected = processor(images=Image.fromarray(np.ascontiguousarray(turned)), return_tensors="pt")["pixel_values"]
    with Image.open(tmp_path / "turned.png") as image:
        assert processor(images=image, return_tensors="pt")["pixel_values"].equal(expected)


def test_paths_and_arrays_are_images_too(processor, tmp_path):
    pixels = noise(3)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    expected = processor(images=Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    for source in (tmp_path / "image.png", str(tmp_path / "image.png"), pixels, [pixels], (tmp_path / "image.png",)):
        assert processor(images=source, return_tensors="pt")["pixel_values"].equal(expected)
    assert processor(images=[pixels] * 3, return_tensors="pt")["pixel_values"].shape[0] == 3


def test_images_that_cannot_be_read_are_named(processor, tmp_path):
    whole = tmp_path / "whole.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60, 3)).astype(np.uint8)).save(whole)
    content = whole.read_bytes()
    damaged = bytearray(content)
    damaged[100] ^= 255
    header = b"IHDR" + struct.pack(">IIBBBBB", 10**5, 10**5, 8, 2, 0, 0, 0)
    huge = content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]
    cases = {"cut.png": content[:3000], "text.png": b"no image", "huge.png": huge, "damaged.png": bytes(damaged)}
    for name, data in cases.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"^the image .+ cannot be read: ") as error:
            processor(images=[whole, path])
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)
    lazy = Image.open(tmp_path / "cut.png")
    with pytest.raises(ValueError, match=r"^the image .*cut\.png cannot be read: image file is truncated"):
        processor(images=lazy)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.png"):
        processor(images=tmp_path / "nowhere.png")
    with pytest.raises(TypeError, match=r"^an image must be a PIL image, an array or a path, not int$"):
        processor(images=[3])


def test_a_text_is_how_the_caption_begins(processor, tokenizer):
    ids = processor(text="a blue dog", return_tensors="pt")["decoder_input_ids"]
    assert ids.tolist() == [[tokenizer.bos_token_id, *tokenizer.convert_tokens_to_ids(["a", "blue", "dog"])]]
    assert processor(text="")["decoder_input_ids"] == [[tokenizer.bos_token_id]]
    assert processor(text=["a", "red"])["decoder_input_ids"] == [
        [1, tokenizer.convert_tokens_to_ids(t)] for t in ("a", "red")
    ]
    assert set(processor(images=noise(3))) == {"pixel_values"}
    with pytest.raises(
        ValueError, match=r"^the texts of a batch must have equally many tokens, not \[2, 0\]: give them"
    ):
        processor(text=["a red", ""])


def test_labels_end_and_are_padded(processor, tokenizer):
    captions = ["a cat", "A blue dog, sitting"]
    expected = [[*tokenizer(caption, add_special_tokens=False)["input_ids"], 2] for caption in captions]
    assert [len(row) for row in expected] == [3, 6]
    assert processor(labels=captions)["labels"] == expected
    padded = processor(images=[noise(3)] * 2, labels=captions, return_tensors="pt")
    assert padded["labels"].tolist() == [expected[0] + [-100] * 3, expected[1]]
    assert padded["pixel_values"].shape[0] == 2
    assert processor(labels=captions, max_length=4)["labels"] == [expected[0], [*expected[1][:3], 2]]
    assert processor(labels="a cat", return_tensors="pt")["labels"].tolist() == [expected[0]]


@pytest.mark.parametrize("name", ["text", "labels"])
def test_a_caption_of_unknown_tokens_is_named(name, processor):
    with pytest.raises(ValueError, match=r"^the caption 'zebra unicorn' has no token of the vocabulary$"):
        processor(**{name: ["a cat", "zebra unicorn"]})
    assert processor(**{name: "a unicorn"})
    with pytest.raises(ValueError, match=r"^the caption '' has no token of the vocabulary$"):
        processor(labels="")
    with pytest.raises(ValueError, match=r"^give `images`, `text` or `labels`$"):
        processor()
    with pytest.raises(ValueError, match=r"^give `text`, to generate from, or `labels`, to train on, and not both$"):
        processor(text="a", labels="a cat")


def test_a_tokenizer_needs_a_beginning_and_an_end(tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"^`tokenizer` must have a `eos_token`"):
        make_captioner_processor(tokenizer, 16)


@pytest.fixture
def folder(processor, tokenizer, tmp_path):
    backbone = {"model_type": "resnet", "embedding_size": 5, "hidden_sizes": [7, 10], "depths": [1, 1]}
    backbone |= {"layer_type": "basic", "out_features": ["stage2"]}
    config = RegardCaptionerConfig(backbone_config=backbone, vocab_size=len(tokenizer), hidden_size=12)
    model = RegardCaptionerForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_processor_is_saved_beside_the_model(folder, processor):
    loaded = AutoProcessor.from_pretrained(folder)
    assert type(loaded) is RegardCaptionerProcessor
    model = AutoModelForImageTextToText.from_pretrained(folder)
    for name, texts in (("labels", ["a cat", "a red dog"]), ("text", ["a", "red"])):
        given = {"images": [noise(3), noise(3)], name: texts}
        expected, actual = (each(**given, return_tensors="pt") for each in (processor, loaded))
        assert (
            expected.keys() == actual.keys() == {"pixel_values", "labels" if name == "labels" else "decoder_input_ids"}
        )
        if not is_torchvision_available():
            assert all(actual[key].equal(value) for key, value in expected.items())
        assert model(**actual).logits.isfinite().all()
    captions = model.generate(**actual, max_new_tokens=4)
    assert [text.split()[0] for text in loaded.batch_decode(captions, skip_special_tokens=True)] == ["a", "red"]


def test_the_pipeline(folder, processor):
    captioner = pipeline("image-text-to-text", model=str(folder))
    model, image = captioner.model, Image.fromarray(noise(3))
    pixel_values = processor(images=image, return_tensors="pt")["pixel_values"]
    expected = processor.batch_decode(model.generate(pixel_values, max_new_tokens=5), skip_special_tokens=True)
    assert captioner(images=image, text="", max_new_tokens=5)[0]["generated_text"] == expected[0]
    begun = captioner(images=image, text="a blue", max_new_tokens=3)[0]
    assert begun["input_text"] == "a blue"
    assert begun["generated_text"].startswith("a blue")
    several = captioner(images=[image, image], text=["", ""], max_new_tokens=5)
    assert [each["generated_text"] for each in several] == expected * 2
