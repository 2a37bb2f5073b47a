"""Training the captioner: examples and figures, runs with every kind of decoder, and backbones."""

import dataclasses
import json
import logging

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, Value
from PIL import Image as PillowImage
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    BertConfig,
    ResNetBackbone,
    ResNetConfig,
    ResNetForImageClassification,
)

from regard.configuration.recurrent import ALIGNMENT_NAMES, RNN_TYPES
from regard.tokenization.processor import make_captioner_processor
from regard.tokenization.words import train_words
from regard.training import captioner
from regard.training.captioner import CAPTIONER, CaptionCollator, CaptionerSettings, CaptionExamples
from regard.training.evaluation import evaluate_model
from regard.training.family import train
from regard.training.glyphs import load_glyphs
from regard.training.loop import Loop
from regard.training.settings import TrainingSettings
from regard.training.targets import TargetTask

MODES = ("L", "RGBA", "P", "I;16", "RGB", "LA", "1")
SIZED = {
    "recurrent": {"hidden_size": 24},
    "transformer": {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40},
}
TINY = {
    "image_size": 33,
    "max_length": 7,
    "batch_size": 4,
    "steps": 3,
    "validation": "0.25",
    "log_with": ["none"],
    "config": SIZED["recurrent"],
}
LARGE_PATCHES = {"model_type": "convnext", "patch_size": 16, "hidden_sizes": [8] * 4, "depths": [1] * 4}
SMALL_RESNET = {"embedding_size": 8, "hidden_sizes": [12, 20], "depths": [1, 1], "layer_type": "basic"}


def draw(mode: str, seed: int) -> PillowImage.Image:
    """An image of noise, of a size of its own."""
    rng = np.random.default_rng(seed)
    if mode == "I;16":
        return PillowImage.fromarray(rng.integers(2**16, size=(37, 41 + seed), dtype=np.uint16))
    return PillowImage.fromarray(rng.integers(256, size=(29 + seed, 43, 3), dtype=np.uint8)).convert(mode)


def write_images(folder, captions: list[str], modes=MODES, column: str = "text") -> str:
    folder.mkdir(parents=True)
    for number in range(len(captions)):
        image = draw(modes[number % len(modes)], number)
        image.save(folder / f"{number}.png")
        assert PillowImage.open(folder / f"{number}.png").mode == image.mode
    rows = ({"file_name": f"{number}.png", column: caption} for number, caption in enumerate(captions))
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(folder)


CAPTIONS = [f"a {'grey' if number % 2 else 'bright'} image no. {number % 5}" for number in range(20)]


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> str:
    """A folder of twenty images of all kinds."""
    return write_images(tmp_path_factory.mktemp("images") / "images", CAPTIONS)


@pytest.fixture(scope="session")
def caption(images):
    """Runs a tiny training in a folder; what is given goes before the tiny settings."""

    def run(folder, resume: bool = False, **given) -> dict:
        return train(CAPTIONER, folder, {**TINY, "data": [images], **given}, resume=resume)

    return run


@pytest.fixture(scope="session")
def backbone_folder(tmp_path_factory) -> str:
    """A small trained backbone."""
    torch.manual_seed(5)
    backbone = ResNetBackbone(ResNetConfig(**SMALL_RESNET, out_features=["stage2"]))
    for name, buffer in backbone.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
    folder = tmp_path_factory.mktemp("backbone") / "backbone"
    backbone.save_pretrained(folder)
    return str(folder)


def make_rows(captions: list[str]) -> Dataset:
    columns = {"image": [draw("RGB", number) for number in range(len(captions))], "text": captions}
    return Dataset.from_dict(columns, features=Features({"image": Image(), "text": Value("string")}))


def make_examples(captions: list[str], known: list[str] | None = None, max_length: int = 9, seed: int = 0):
    processor = make_captioner_processor(train_words(known or captions), (15, 21))
    return CaptionExamples(make_rows(captions), processor, max_length, seed)


# Examples


def test_labels_are_the_words_and_the_end():
    captions = ["the river, the stone", "A river", "stone", "river </s> <pad>"]
    examples = make_examples(captions, captions[:3])
    words = train_words(captions[:3])
    expected = [[*words(text)["input_ids"]] for text in captions[:3]]
    assert [example["labels"].tolist() for example in examples.in_order()][:3] == expected
    assert all(row[-1] == words.eos_token_id for row in expected)
    # The names of special tokens are words like any others, here unknown ones.
    labels = examples.in_order()[3]["labels"].tolist()
    assert labels == [words.convert_tokens_to_ids("river"), *[words.unk_token_id] * 7, words.eos_token_id]
    assert len(examples.ids) == sum(map(len, expected)) + 9


def test_an_epoch_is_a_function_of_seed_and_number():
    captions = [f"{'word ' * (1 + number % 3)}{number}" for number in range(40)]

    def order_of(seed: int, number: int) -> list[str]:
        epoch = make_examples(captions, seed=seed).epoch(number)
        assert len(epoch) == 40
        assert sorted(epoch.order.tolist()) == list(range(40))
        rows, seen = make_rows(captions), make_examples(captions)
        for index in (0, 17, 39):
            row = int(epoch.order[index])
            assert np.array_equal(np.asarray(epoch[index]["image"]), np.asarray(rows[row]["image"]))
            assert epoch[index]["labels"].tolist() == seen.in_order()[row]["labels"].tolist()
        return epoch.order.tolist()

    orders = [order_of(3, 0), order_of(3, 1), order_of(4, 0)]
    assert order_of(3, 1) == orders[1]
    assert len({tuple(order) for order in orders}) == 3
    assert make_examples(captions).in_order().order.tolist() == list(range(40))
    for index in (-1, 40):
        with pytest.raises(IndexError, match=f"example {index} of 40"):
            make_examples(captions).epoch(0)[index]


def test_long_captions_are_cut_and_told_of(caplog):
    captions = ["a", "a b", "a b c", "a b c d", "a b c d e"]
    examples = make_examples(captions, max_length=4)
    assert [len(example["labels"]) for example in examples.in_order()] == [2, 3, 4, 4, 4]
    cut, whole = (examples.in_order()[row]["labels"].tolist() for row in (4, 2))
    assert cut == whole
    assert caplog.messages == ["2 of 5 captions are longer than `max_length` (4) and cut."]
    caplog.clear()
    make_examples(captions, max_length=6)
    assert caplog.messages == []


def test_a_caption_of_unknown_words_is_not_trained_on():
    captions = ["a river", "zwölf Boxkämpfer", "a zwölf"]
    examples = make_examples(captions, ["a river"])
    with pytest.raises(ValueError, match="the caption 'zwölf Boxkämpfer' holds no word that the tokenizer knows: "):
        examples.epoch(0)
    # It is evaluated on, and one known word is enough to train on.
    assert len(examples.in_order()) == 3
    assert len(make_examples([captions[0], captions[2]], ["a river"]).epoch(0)) == 2


def test_batches():
    captions = ["a", "a b c", "a b"]
    examples = make_examples(captions)
    processor = make_captioner_processor(train_words(captions), (15, 21))
    batch = CaptionCollator(processor)(list(examples.in_order()))
    assert batch.keys() == {"pixel_values", "labels"}
    assert batch["pixel_values"].shape == (3, 3, 15, 21)
    assert batch["pixel_values"].dtype == torch.float32
    alone = processor(images=examples.in_order()[1]["image"], return_tensors="pt")
    assert torch.equal(batch["pixel_values"][1:2], alone["pixel_values"])
    rows = [example["labels"].tolist() for example in examples.in_order()]
    assert batch["labels"].tolist() == [[*row, *[-100] * (4 - len(row))] for row in rows]
    task = TargetTask(examples, examples, captioner.CaptionCollator(processor))
    assert task.tokens(batch) == sum(map(len, rows)) == 9
    assert task.counts(batch) == {"num_items_in_batch": 9}


# Figures of what was generated


@pytest.fixture
def figures(monkeypatch):
    """The figures of given captions for images of others."""

    def run(predictions: list[str], references: list[str], known: list[str], **given) -> dict:
        settings = CaptionerSettings(**{"batch_size": 2, **given})
        processor = make_captioner_processor(train_words(known), 16)
        sizes = []

        def generate(model, tokenizer, batches, **options):
            sizes.extend(len(batch["pixel_values"]) for batch in batches)
            assert options == {"max_new_tokens": settings.max_length, "num_beams": settings.beams}
            return predictions

        monkeypatch.setattr(captioner, "generate_texts", generate)
        tried = CAPTIONER.try_out(settings, None, processor, make_rows(references))
        assert sum(sizes) == len(predictions)
        assert max(sizes) == 2
        assert [row["prediction"] for row in tried["generated"]] == predictions
        return tried

    return run


def test_figures_against_a_count_by_hand(figures):
    references = ["Small letter A with dot", "small letter a", "letter b with dot and tail"]
    predictions = ["small letter a with dot", "small letter a with tail", "letter c with dot"]
    tried = figures(predictions, references, references)
    assert tried["metrics"] == pytest.approx(
        {"exact_match": 1 / 3, "token_f1": (1 + 2 * 3 / (5 + 3) + 2 * 3 / (4 + 6)) / 3, "base_letter": 2 / 3}
    )
    # As the model can write them.
    assert tried["generated"][0]["target"] == "small letter a with dot"


@pytest.mark.parametrize("reference", ["zzz", "a zzz", "zzz a", "zzz zzz", "<unk>", "a <unk>", " "])
def test_an_unknown_word_is_never_right(figures, reference):
    # Nothing that can be generated, and decoded without special tokens, is the reference.
    for prediction in ("", "a", "a a", "zzz"):
        tried = figures([prediction, "a"], [reference, "a"], ["a"])
        assert tried["metrics"]["exact_match"] == 0.5
        assert tried["metrics"]["token_f1"] < 1
    assert figures(["", "a"], ["zzz", "a"], ["a"])["metrics"]["token_f1"] == 0.5


@pytest.mark.parametrize(
    ("data", "validation", "has"),
    [
        (["glyphs"], "0.05", True),
        (["own"], "glyphs", True),
        (["glyphs"], "own", False),
        (["own"], "0.1", False),
        (["glyphs", "own"], "0.1", False),
    ],
)
def test_base_letters_are_those_of_glyphs(figures, data, validation, has):
    metrics = figures(["a", "a"], ["a", "b"], ["a b"], data=data, validation=validation)["metrics"]
    assert ("base_letter" in metrics) == has


def test_as_many_are_captioned_as_are_evaluated_on(figures):
    captions = ["a", "b", "c", "d", "e"]
    tried = figures(["a", "b", "x", "d"], captions, captions, evaluation_batches=2)
    assert [row["target"] for row in tried["generated"]] == captions[:4]
    assert tried["metrics"]["exact_match"] == 0.75


# Runs


@pytest.fixture(scope="module", params=["recurrent", "transformer"])
def run(request, caption, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "run"
    given = {"decoder_type": request.param, "config": SIZED[request.param], "learning_rate": 0.01}
    return folder, caption(folder, **given), given


def test_what_a_run_tells(run):
    folder, results, given = run
    assert results["family"] == "captioner"
    assert results["architecture"] == "RegardCaptionerForConditionalGeneration"
    assert (results["step"], results["epoch"], results["processes"]) == (3, 1, 1)
    # Five words, a full stop and the end.
    assert results["data"] == {"images": 15, "tokens": 15 * 7, "held_out_images": 5}
    assert results["metrics"].keys() == {"loss", "perplexity", "token_accuracy", "exact_match", "token_f1"}
    assert results["metrics"]["perplexity"] == pytest.approx(np.exp(results["metrics"]["loss"]))
    assert len(results["generated"]) == 5
    assert {shown["target"] for shown in results["generated"]} <= {text.replace(".", " .") for text in CAPTIONS}
    assert results["settings"]["decoder_type"] == given["decoder_type"]
    assert results == json.loads((folder / "results.json").read_text())


def test_the_model_is_loaded_and_captions_images(run, images):
    folder, results, given = run
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    processor = AutoProcessor.from_pretrained(folder / "model")
    assert type(model.decoder).__name__ == f"Regard{given['decoder_type'].capitalize()}Decoder"
    assert model.num_parameters() == results["parameters"]
    assert model.generation_config.max_new_tokens == results["settings"]["max_length"] == 7
    _, held_out = CAPTIONER.load_data(CaptionerSettings(**{**TINY, "data": [images]}))
    assert [row.lower().replace(".", " .") for row in held_out["text"]] == [
        shown["target"] for shown in results["generated"]
    ]
    inputs = processor(images=held_out[:]["image"], return_tensors="pt")
    assert inputs["pixel_values"].shape == (5, 3, 33, 33)
    generated = processor.batch_decode(model.generate(**inputs), skip_special_tokens=True)
    assert generated == [shown["prediction"] for shown in results["generated"]]
    assert all(len(text.split()) <= 7 for text in generated)


def test_the_tokenizer_of_the_model_is_a_stock_one(run):
    folder, _, _ = run
    config = json.loads((folder / "model" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["model_max_length"] == 7
    backend = json.loads((folder / "model" / "tokenizer.json").read_text())
    assert backend["truncation"] is backend["padding"] is None
    for file in (folder / "tokenizer").iterdir():
        assert (folder / "model" / file.name).read_bytes() == file.read_bytes()


def test_an_evaluation_gives_what_the_run_ended_with(run, images):
    folder, results, _ = run
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    again = evaluate_model(folder)
    assert again == {name: results[name] for name in ("family", "metrics", "data", "generated")}
    whole = evaluate_model(folder, images)
    assert len(whole["generated"]) == whole["data"]["held_out_images"] == 20
    assert whole["metrics"]["loss"] != results["metrics"]["loss"]
    # A model by itself knows how long its captions were.
    alone = evaluate_model(folder / "model", images, {"batch_size": 4})
    assert alone["metrics"] == pytest.approx(whole["metrics"], rel=1e-6)
    assert alone["generated"] == whole["generated"]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_long_and_unknown_captions_are_evaluated_on(run, tmp_path, caplog):
    folder, _, _ = run
    other = write_images(tmp_path / "other", ["a grey image " * 5, "zwölf", "a bright image no. 3"], ["RGB"])
    for model in (folder, folder / "model"):
        caplog.clear()
        results = evaluate_model(model, other)
        assert "1 of 3 captions are longer than `max_length` (7) and cut." in caplog.messages
        assert [row["target"] for row in results["generated"]][1] == "<unk>"
        assert results["metrics"]["exact_match"] <= 1 / 3


def test_a_run_can_be_repeated_to_the_bit(run, caption, tmp_path, weights_of):
    folder, results, given = run
    again = caption(tmp_path / "again", **given)
    assert again | {"seconds": results["seconds"]} == results
    weights, expected = weights_of(tmp_path / "again"), weights_of(folder)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    caption(tmp_path / "other", **given, seed=1)
    other = weights_of(tmp_path / "other")
    assert any(not torch.equal(weights[name], other[name]) for name in weights)


class Killed(BaseException):
    """What no code catches."""


@pytest.mark.parametrize("decoder_type", SIZED)
def test_a_run_that_is_killed_ends_as_one_that_is_not(decoder_type, caption, tmp_path, weights_of, history_of):
    # Three steps an epoch: it is killed at the end of the second, and goes on from within it.
    settings = {"steps": 8, "save_every": 4, "evaluate_every": 3, "log_every": 1, "dropout": 0.2}
    settings |= {"decoder_type": decoder_type, "config": SIZED[decoder_type]}
    expected = caption(tmp_path / "straight", **settings)
    whole = Loop._step

    def until(self, *args):
        result = whole(self, *args)
        if self.progress.step == 6:
            raise Killed
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_step", until)
        with pytest.raises(Killed):
            caption(tmp_path / "run", **settings)
    results = caption(tmp_path / "run", resume=True, **settings)
    for name in ("metrics", "generated", "tokens", "epoch"):
        assert results[name] == expected[name]
    weights, expected_weights = weights_of(tmp_path / "run"), weights_of(tmp_path / "straight")
    assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
    assert history_of(tmp_path / "run") == history_of(tmp_path / "straight")


@pytest.mark.parametrize(
    ("alignment", "rnn_type"), [(name, RNN_TYPES[number % 2]) for number, name in enumerate(ALIGNMENT_NAMES)]
)
def test_alignments_and_layers_are_those_asked_for(alignment, rnn_type, caption, tmp_path):
    results = caption(tmp_path / "run", steps=1, alignment=alignment, rnn_type=rnn_type)
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert (config["alignment"], config["rnn_type"]) == (alignment, rnn_type)
    assert np.isfinite(results["metrics"]["loss"])


@pytest.mark.parametrize("decoder_type", SIZED)
def test_eight_glyphs_are_learned_by_heart(decoder_type, caption, tmp_path):
    glyphs, seen = load_glyphs("train", image_size=32, size=40), {}
    for row in glyphs:
        seen.setdefault(row["text"], row["image"])
    (tmp_path / "eight").mkdir()
    captions = list(seen)[:8]
    for number, text in enumerate(captions):
        seen[text].save(tmp_path / "eight" / f"{number}.png")
    rows = ({"file_name": f"{number}.png", "text": text} for number, text in enumerate(captions))
    (tmp_path / "eight" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = {"data": [str(tmp_path / "eight")], "validation": str(tmp_path / "eight"), "image_size": 32}
    own |= {"max_length": 16, "batch_size": 8, "steps": 100, "learning_rate": 0.01, "dropout": 0.0}
    own |= {"evaluate_every": 0, "save_every": 0, "decoder_type": decoder_type}
    results = caption(tmp_path / "run", **own, config={"hidden_size": 64, "intermediate_size": 96})
    assert results["metrics"]["exact_match"] == results["metrics"]["token_accuracy"] == 1
    assert results["metrics"]["token_f1"] == 1
    assert all(shown["prediction"] == shown["target"] for shown in results["generated"])


def test_glyphs_are_the_default(tmp_path):
    assert CaptionerSettings().data == ["glyphs"]
    settings = {**TINY, "max_images": 12, "image_size": 32, "max_length": 16, "evaluation_batches": 2}
    del settings["validation"]
    results = train(CAPTIONER, tmp_path / "run", {**settings, "steps": 1})
    assert results["data"]["images"] == 12
    assert results["data"]["held_out_images"] == 1_000
    assert "base_letter" in results["metrics"]
    captions = load_glyphs("validation", image_size=32)[:5]["text"]
    for caption, row in zip(captions, results["generated"], strict=True):
        # Twelve letters do not have all of the words.
        words = zip(caption.split(), row["target"].split(), strict=True)
        assert all(word in (own, "<unk>") for own, word in words)


# Backbones


def in_model(weights: dict) -> dict:
    prefix = "encoder.backbone."
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("is_trained", [True, False])
def test_backbones(is_frozen, is_trained, caption, backbone_folder, tmp_path, weights_of):
    given = {"freeze_backbone": is_frozen, "backbone": backbone_folder if is_trained else None}
    started = {}
    make = CAPTIONER.make_model

    def watched(settings, processor=None):
        model = make(settings, processor)
        if processor is not None:
            started.update({name: value.clone() for name, value in model.state_dict().items()})
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CAPTIONER, "make_model", watched)
        caption(tmp_path / "run", **given, learning_rate=0.01)
    ended = weights_of(tmp_path / "run")
    if is_trained:
        expected = ResNetBackbone.from_pretrained(backbone_folder).state_dict()
        assert in_model(started).keys() == expected.keys()
        assert all(torch.equal(in_model(started)[name], expected[name]) for name in expected)
    kept = {name: torch.equal(weight, in_model(started)[name]) for name, weight in in_model(ended).items()}
    assert len(kept) > 10
    if is_frozen:
        # Its running means as well.
        assert all(kept.values())
    else:
        assert not any(same for name, same in kept.items() if "running" in name or name.endswith("weight"))
    others = [name for name in ended if not name.startswith("encoder.backbone.")]
    assert not any(torch.equal(ended[name], started[name]) for name in others)
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["freeze_backbone"] is is_frozen
    assert (config["backbone_config"]["hidden_sizes"] == [12, 20]) == is_trained


def test_a_backbone_may_be_part_of_another_model(tmp_path):
    """That of an image classifier, as most are on the Hub: its last stage is read."""
    classifier = ResNetForImageClassification(ResNetConfig(**SMALL_RESNET))
    classifier.save_pretrained(tmp_path / "classifier")
    processor = make_captioner_processor(train_words(["a b"]), 32)
    model = CAPTIONER.make_model(CaptionerSettings(backbone=str(tmp_path / "classifier")), processor)
    expected, weights = classifier.resnet.state_dict(), model.encoder.backbone.state_dict()
    assert weights.keys() <= expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert model.encoder.backbone.channels == [20]


def test_backbones_that_cannot_be(caption, backbone_folder, tmp_path):
    BertConfig().save_pretrained(tmp_path / "bert")
    ResNetConfig(**SMALL_RESNET).save_pretrained(tmp_path / "empty")
    ResNetBackbone(ResNetConfig(**SMALL_RESNET, num_channels=1)).save_pretrained(tmp_path / "grey")
    other = ResNetBackbone(ResNetConfig(**{**SMALL_RESNET, "depths": [1, 2]}))
    other.config.depths = [2, 2]
    other.save_pretrained(tmp_path / "lacking")
    (tmp_path / "none").mkdir()
    for name, complaint in (
        ("bert", "of the model type 'bert', of which there is no AutoBackbone"),
        ("grey", r"the backbone \(`num_channels` 1\) must read 3 channels"),
        ("empty", "no file named model.safetensors"),
        ("lacking", r"lacks \d+ of the weights that it needs, such as encoder"),
        ("nowhere", r"`backbone` \(.*nowhere\) is no folder here, and the Hub did not give it"),
    ):
        with pytest.raises((ValueError, OSError), match=complaint) as raised:
            caption(tmp_path / "run", backbone=str(tmp_path / name))
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "run").exists()


# Settings

# What these change, the weights show.
CHANGE_THE_WEIGHTS = {
    "caption_column": {"caption_column": "other"},
    "max_images": {"max_images": 12},
    "image_size": {"image_size": 41},
    "max_length": {"max_length": 5},
    "batch_size": {"batch_size": 3},
    "min_frequency": {"min_frequency": 5},
    "decoder_type": {"decoder_type": "transformer", "config": SIZED["transformer"]},
    "alignment": {"alignment": "bilinear"},
    "rnn_type": {"rnn_type": "gru"},
    "attention_regularization": {"attention_regularization": 0.0},
    "label_smoothing": {"label_smoothing": 0.2},
    "size": {"size": "mini", "config": {"hidden_size": 256}},
    "config": {"config": {"hidden_size": 24, "num_hidden_layers": 2}},
    "dropout": {"dropout": 0.4},
}
ELSEWHERE = {
    "data",  # test_glyphs_are_the_default
    "tokenizer",  # below, as the next ones
    "beams",
    "language",
    "backbone",  # test_backbones, as for the next
    "freeze_backbone",
}


def test_no_setting_is_forgotten():
    inherited = {field.name for field in dataclasses.fields(TrainingSettings)} - {"data", "max_length", "batch_size"}
    own = {field.name for field in dataclasses.fields(CaptionerSettings)} - inherited
    assert own == {*CHANGE_THE_WEIGHTS, *ELSEWHERE}


@pytest.fixture(scope="module")
def two_columns(tmp_path_factory) -> str:
    """Images with two captions each, some of whose words are rare."""
    folder = tmp_path_factory.mktemp("two") / "images"
    write_images(folder, CAPTIONS)
    lines = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["other"] = f"{'dark' if number % 3 else 'light'} picture {number}"
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(folder)


@pytest.fixture(scope="module")
def plain_weights(two_columns, caption, tmp_path_factory, weights_of):
    folder = tmp_path_factory.mktemp("plain") / "run"
    caption(folder, data=[two_columns], steps=2)
    return weights_of(folder)


@pytest.mark.parametrize("name", CHANGE_THE_WEIGHTS)
def test_settings_that_change_what_is_learned(name, two_columns, plain_weights, caption, tmp_path, weights_of):
    caption(tmp_path / "run", **{"data": [two_columns], "steps": 2, **CHANGE_THE_WEIGHTS[name]})
    weights = weights_of(tmp_path / "run")
    assert weights.keys() != plain_weights.keys() or any(
        weights[key].shape != plain_weights[key].shape or not torch.equal(weights[key], plain_weights[key])
        for key in weights
    )


def test_settings_reach_the_configuration():
    given = {"label_smoothing": 0.2, "attention_regularization": 0.4, "dropout": 0.3, "max_length": 11}
    given |= {"alignment": "dot", "rnn_type": "gru", "freeze_backbone": True, "size": "mini"}
    config = CAPTIONER.make_config(CaptionerSettings(**given))
    assert (config.label_smoothing, config.attention_regularization, config.hidden_dropout_prob) == (0.2, 0.4, 0.3)
    assert (config.max_position_embeddings, config.alignment, config.rnn_type) == (11, "dot", "gru")
    assert (config.freeze_backbone, config.hidden_size, config.num_hidden_layers) == (True, 256, 1)
    assert CAPTIONER.make_config(CaptionerSettings(**given, decoder_type="transformer")).num_hidden_layers == 4


def test_several_sources_are_joined(images, two_columns, caption, tmp_path):
    own = {"data": [images, two_columns], "validation": "0.5", "steps": 1}
    assert caption(tmp_path / "all", **own)["data"]["images"] == 20
    # The most images are those of all together.
    assert caption(tmp_path / "some", **own, max_images=24)["data"]["images"] == 12


@pytest.mark.parametrize("beams", [1, 3])
def test_beams_search_for_the_captions(beams, run, monkeypatch):
    asked = []
    folder, _, _ = run
    whole = captioner.generate_texts

    def watched(*args, **options):
        asked.append(options["num_beams"])
        return whole(*args, **options)

    monkeypatch.setattr(captioner, "generate_texts", watched)
    evaluate_model(folder, settings={"beams": beams})
    assert asked == [beams]


def test_the_language_is_in_the_card(images, tmp_path):
    from regard.train import train_captioner

    train_captioner(tmp_path / "run", {**TINY, "data": [images], "steps": 1, "language": "eo"})
    assert "language: eo\n" in (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")


def test_a_tokenizer_is_taken_as_it_is(caption, tmp_path):
    words = train_words(["a grey bright image no", "of nothing else"], lowercase=False)
    words.save_pretrained(tmp_path / "words")
    results = caption(tmp_path / "run", tokenizer=str(tmp_path / "words"))
    processor = AutoProcessor.from_pretrained(tmp_path / "run" / "model")
    assert processor.tokenizer.get_vocab() == words.get_vocab()
    # The signs and numbers are not among its words.
    assert all(shown["target"].endswith("image no <unk> <unk>") for shown in results["generated"])
    assert results["metrics"]["exact_match"] == 0
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["vocab_size"] == len(words)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"max_images": 0}, r"`max_images` \(0\) must be at least 1"),
        ({"image_size": 0}, r"`image_size` \(0\) must be at least 1"),
        ({"min_frequency": 0}, r"`min_frequency` \(0\) must be at least 1"),
        ({"min_frequency": 99}, r"no words that occur `min_frequency` \(99\) times"),
        ({"beams": 0}, r"`beams` \(0\) must be at least 1"),
        ({"max_length": 1}, r"`max_length` \(1\) must be at least 2: one word and the end"),
        ({"decoder_type": "cnn"}, r"`decoder_type` \('cnn'\) must be one of recurrent, transformer"),
        ({"alignment": "dott"}, r"`alignment` \('dott'\) must be one of dot, scaled_dot, bilinear, additive, none"),
        ({"rnn_type": "rnn"}, r"`rnn_type` \('rnn'\) must be one of gru, lstm"),
        ({"label_smoothing": 1.0}, r"`label_smoothing` \(1.0\) must be at least 0 and less than 1"),
        ({"attention_regularization": -1.0}, r"`attention_regularization` \(-1.0\) must be at least 0"),
        ({"size": "huge"}, r"`size` \('huge'\) must be one of tiny"),
        ({"dropout": 1.0}, r"`dropout` \(1.0\) must be at least 0 and less than 1"),
        ({"config": {"vocab_size": 5}}, "`vocab_size` of at least"),
        (
            {"config": {"max_position_embeddings": 6}},
            r"`max_length` \(7\) is more than `max_position_embeddings` \(6\)",
        ),
        ({"config": {"hiden_size": 6}}, "hiden_size.*hidden_size"),
        (
            {"image_size": 9, "config": {"backbone_config": LARGE_PATCHES}},
            "the backbone cannot read images of 9 x 9 pixels",
        ),
        ({"backbone": "x/y", "config": {"backbone_config": {}}}, r"`backbone` \(x/y\) has a configuration: leave"),
        ({"data": ["glyphs:latin"]}, r"`data` \('glyphs:latin'\) asks for some of 'glyphs', which has no parts"),
        ({"data": ["glyphs"], "image_size": 31}, r"`image_size` \(31\) must be at least 32"),
        ({"data": []}, "`data` names no source"),
        ({"batch_size": 16}, "15 examples, fewer than one batch"),
        ({"caption_column": "words"}, "no column 'words'; `caption_column` can be 'file_name', 'text'"),
    ],
)
def test_nothing_is_written_for_a_run_that_cannot_be(given, complaint, caption, tmp_path):
    with pytest.raises(ValueError, match=complaint) as raised:
        caption(tmp_path / "run", **given)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_run_says_what_it_read(caption, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="regard"):
        caption(tmp_path / "run", steps=1)
    assert "15 images, captions of 105 tokens; held out: 5 images." in caplog.messages
