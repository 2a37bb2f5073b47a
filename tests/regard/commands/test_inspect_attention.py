"""`regard inspect attention`: files of trained models of each kind, and mistakes told in one line."""

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers import BertConfig, BertModel

import regard
from regard.commands.inspect_attention import draw_attention
from regard.loading import for_attention, load_network
from regard.tokenization.processor import make_captioner_processor
from regard.tokenization.wordpiece import train_wordpiece
from regard.tokenization.words import train_words


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """The folder of a stock model."""
    folder = tmp_path_factory.mktemp("stock")
    tokenizer = train_wordpiece(["the river runs", "a bank"] * 4, vocab_size=60)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=16,
        max_position_embeddings=20,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def captioner(tmp_path_factory):
    """The folder of a captioner, with an image beside it."""
    folder = tmp_path_factory.mktemp("captioner")
    tokenizer = train_words(["a small red bird"])
    backbone = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}
    config = regard.RegardCaptionerConfig(backbone_config=backbone, vocab_size=len(tokenizer), hidden_size=16)
    regard.RegardCaptionerForConditionalGeneration(config).save_pretrained(folder)
    make_captioner_processor(tokenizer, 40).save_pretrained(folder)
    Image.fromarray(np.zeros((30, 50), dtype=np.uint8)).save(folder / "image.png")
    return folder


def test_the_face_of_the_package():
    from regard.inspection.maps.attention_map import attention_map

    assert regard.attention_map is attention_map


@pytest.mark.parametrize("ending", ["html", "png", "svg"])
def test_a_file_of_each_format(command, stock, tmp_path, ending):
    file = tmp_path / f"map.{ending}"
    ended = command("inspect", "attention", stock, "--text", "the river", "--output", file)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"Wrote {file} (")
    assert "self attention, 2 layer(s) of 4 head(s), 4 queries, 4 keys" in ended.out
    content = file.read_bytes()
    assert content.startswith({"html": b"<!doctype html>", "png": b"\x89PNG", "svg": b"<?xml"}[ending])


def test_layer_head_and_words(command, stock, tmp_path):
    pictures = []
    for number, options in enumerate(
        ([], ["--layer", "0"], ["--head", "2"], ["--head", "max"], ["--words"], ["--layer", "-1", "--head", "mean"])
    ):
        file = tmp_path / f"{number}.png"
        assert command("inspect", "attention", stock, "--text", "the unriver", *options, "--output", file).code == 0
        pictures.append(file.read_bytes())
    assert len(set(pictures)) == 5
    assert pictures[0] == pictures[5]


@pytest.mark.parametrize(
    ("family", "kind"),
    [("decoder", "self"), ("transformer", "cross"), ("transformer", "encoder"), ("recurrent", None)],
)
def test_runs_of_every_family(command, trained, tmp_path, family, kind):
    file = tmp_path / "map.html"
    options = [] if kind is None else ["--kind", kind]
    ended = command("inspect", "attention", trained(family), "--text", "river", *options, "--output", file)
    assert ended.code == 0, ended.err
    assert f"{kind or 'alignment'} attention" in ended.out


def test_a_target_and_an_image(captioner, tmp_path, command):
    image, file = captioner / "image.png", tmp_path / "map.html"
    ended = command("inspect", "attention", captioner, "--image", image, "--target", "a red bird", "--output", file)
    assert ended.code == 0, ended.err
    assert "image attention" in ended.out
    assert "4 queries" in ended.out


SIGHT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 48, "patch_size": 8}


@pytest.mark.parametrize("in_one", [False, True])
def test_a_stock_captioner(captioner, stock, command, tmp_path, in_one):
    """Its tokenizer and image processor are saved apart, or in one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(stock)
    text = transformers.BertConfig.from_pretrained(stock, is_decoder=True, add_cross_attention=True)
    config = transformers.VisionEncoderDecoderConfig(encoder=transformers.ViTConfig(**SIGHT), decoder=text)
    config.decoder_start_token_id = tokenizer.cls_token_id
    config.pad_token_id = tokenizer.pad_token_id
    folder = tmp_path / "model"
    transformers.VisionEncoderDecoderModel(config).save_pretrained(folder)
    image_processor = transformers.ViTImageProcessorPil(size={"height": 48, "width": 48})
    parts = [transformers.TrOCRProcessor(image_processor, tokenizer)] if in_one else [image_processor, tokenizer]
    for part in parts:
        part.save_pretrained(folder)
    options = ["--image", captioner / "image.png", "--target", "a bank", "--output", tmp_path / "map.png"]
    ended = command("inspect", "attention", folder, *options)
    assert (ended.code, ended.err) == (0, "")
    assert "image attention, 2 layer(s) of 4 head(s), 4 queries, 36 keys" in ended.out


@pytest.mark.parametrize("option", ["text", "image"])
def test_a_stock_model_of_texts_and_images(captioner, stock, command, tmp_path, option):
    tokenizer = transformers.AutoTokenizer.from_pretrained(stock)
    text = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": len(tokenizer)}
    config = transformers.CLIPConfig(text_config=text, vision_config=SIGHT)
    folder = tmp_path / "model"
    transformers.CLIPModel(config).save_pretrained(folder)
    image_processor = transformers.CLIPImageProcessorPil(
        size={"height": 48, "width": 48}, crop_size={"height": 48, "width": 48}
    )
    transformers.CLIPProcessor(image_processor, tokenizer).save_pretrained(folder)
    given = {"text": "the river", "image": captioner / "image.png"}[option]
    ended = command("inspect", "attention", folder, f"--{option}", given, "--output", tmp_path / "map.html")
    assert ended.code == 0, ended.err
    assert {"text": "self attention, 2 layer(s)", "image": "image attention, 1 layer(s)"}[option] in ended.out


def test_the_library_does_the_same(stock, tmp_path):
    seen = draw_attention(stock, tmp_path / "map.html", "the river", layer=0, head=3)
    model, tokenizer = load_network(stock, for_attention)
    assert seen.title == str(stock)
    np.testing.assert_array_equal(seen.weights, regard.attention_map(model, tokenizer, "the river").weights)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--text", "river", "--output", "map.gif"], "`output` (map.gif) must end with .html, .png or .svg"),
        (["--output", "map.html"], "`text` is missing"),
        (["--text", "", "--output", "map.html"], "`text` ('') has no tokens"),
        (["--text", "river " * 30, "--output", "map.html"], "shorten it"),
        (["--text", "river", "--layer", "2", "--output", "map.png"], "`layer` (2) must be 0 to 1"),
        (["--text", "river", "--head", "4", "--output", "map.html"], "`head` (4) must be 0 to 3"),
        (["--text", "river", "--head", "sum", "--output", "map.html"], "`head` ('sum') must be 0 to 3"),
        (["--text", "river", "--kind", "cross", "--output", "map.html"], "`kind` ('cross') must be 'self'"),
        (["--text", "river", "--target", "a", "--output", "map.html"], "`target` is not allowed here"),
        (["--text", "river", "--image", "no.png", "--output", "map.html"], "`image` (no.png) must be the file"),
    ],
)
def test_mistakes(refusal, stock, tmp_path, monkeypatch, options, told):
    monkeypatch.chdir(tmp_path)
    assert told in refusal("inspect", "attention", stock, *options)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there(refusal, tmp_path):
    told = refusal("inspect", "attention", tmp_path, "--text", "a", "--output", tmp_path / "map.html")
    assert "holds no model" in told
