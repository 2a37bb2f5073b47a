"""Runs of the captioner with every kind of decoder."""

import json

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
)

from regard.configuration.recurrent import ALIGNMENT_NAMES, RNN_TYPES
from regard.training.builtin.glyphs import load_glyphs
from regard.training.families import captioner
from regard.training.families.captioner import CAPTIONER, CaptionerSettings
from regard.training.families.evaluate import evaluate_model
from regard.training.families.train import train
from regard.training.loop.loop import Loop
from tests.support.captions import CAPTIONS, SIZED, TINY, write_images


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
    own |= {"max_length": 16, "batch_size": 8, "steps": 75, "learning_rate": 0.01, "dropout": 0.0}
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
