import copy
import json
import math
import re

import pytest
from huggingface_hub import ModelCard

from regard.configuration.captioner import RegardCaptionerConfig
from regard.configuration.recurrent import RegardRecurrentConfig
from regard.sharing.cards import examples_of, figure_rows, model_card, write_card
from regard.training.families.recipes import TRAINABLE
from tests.support.cards import ALL_RESULTS, CONFIG, CONFIGS, EXAMPLES, FAMILIES, RESULTS, cells, changed, rows
from tests.support.families import FAMILY_CARDS


def test_a_card_is_read_back_with_its_figures(tmp_path):
    CONFIG.save_pretrained(tmp_path)
    write_card(tmp_path, RESULTS)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "fill-mask"
    assert card.data.language == "en"
    assert card.data.tags == ["regard", "regard_bert"]
    figures = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert figures == {"accuracy": 0.4124, "cross_entropy": 3.1416}
    assert {result.task_type for result in card.data.eval_results} == {"fill-mask"}
    assert card.data.model_name == "BERT"
    assert model_card(RESULTS, CONFIG, title="Ours: a BERT").data.model_name == "Ours: a BERT"


def test_what_a_card_says():
    text = model_card(RESULTS, CONFIG).text
    for part in ("3 layers, 128 wide, 4 heads, 1,234 word pieces", "1,234,567 parameters", "next sentence prediction"):
        assert part in text
    for part in ("4,321 documents, 765,432 word pieces, 0.123% of them unknown", "1,000 steps of 32 examples"):
        assert part in text
    assert "4,567,890 tokens in 321 seconds on 1 × cpu, precision float32" in text
    assert "15% of the tokens predicted." in text
    assert "Versions: torch 2.13.0, transformers 5.24.0." in text
    assert "45 examples from 21 held-out documents" in text
    assert [cells(row) for row in rows(model_card(RESULTS, CONFIG), "figure")] == [
        ["masked tokens predicted right", "41.2%", "7.9% (the most frequent token)"],
        ["loss per masked token, nats", "3.142", "6.500 (token frequencies)"],
        ["next sentences told from random ones", "87.6%", "51.2% (the more frequent kind)"],
    ]
    assert [cells(row) for row in rows(model_card(RESULTS, CONFIG), "sentence")] == [
        ["The [MASK] sat.", "cat", "dog, cat, ##s"]
    ]


def test_what_a_card_says_of_other_settings():
    metrics = {name: value for name, value in RESULTS["metrics"].items() if name.startswith("masked")}
    results = changed(settings={"next_sentence": False, "whole_words": True, "precision": "bf16"}, filled=[])
    card = model_card({**results, "metrics": metrics}, CONFIG)
    assert "next sentence" not in card.text
    assert "15% of the tokens predicted, whole words at a time." in card.text
    assert "precision bf16" in card.text
    assert len(rows(card, "figure")) == 2
    assert "| sentence |" not in card.text
    assert "[MASK]" in card.text


# All families


def test_every_family_has_a_card():
    assert list(FAMILY_CARDS) == FAMILIES
    assert set(TRAINABLE) <= set(FAMILY_CARDS)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_card_of_each_family_is_read_back(family, tmp_path):
    CONFIGS[family].save_pretrained(tmp_path)
    write_card(tmp_path, ALL_RESULTS[family])
    card = ModelCard.load(tmp_path / "README.md")
    assert card.content == model_card(ALL_RESULTS[family], CONFIGS[family]).content
    assert card.data.tags == ["regard", f"regard_{family}"]
    assert card.data.language == {"transformer": "multilingual", "recurrent": "multilingual"}.get(family, "en")
    assert card.data.model_name == FAMILY_CARDS[family].title
    assert f"\n# {FAMILY_CARDS[family].title}\n" in card.text
    assert "1,234 " in card.text
    assert "1,234,567 parameters" in card.text
    assert "4,321 " in card.text
    # Nothing is left of the template, and no two empty lines follow each other.
    assert not re.search(r"[{}]|\n\n\n", card.text)
    assert card.text.endswith(".\n")


PIPELINES = {
    "bert": "fill-mask",
    "decoder": "text-generation",
    "transformer": "text-generation",
    "recurrent": "text-generation",
    "captioner": "image-to-text",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_metadata_holds_the_metrics(family):
    metrics = ALL_RESULTS[family]["metrics"]
    card = model_card(ALL_RESULTS[family], CONFIGS[family])
    assert card.data.pipeline_tag == PIPELINES[family]
    values = [result.metric_value for result in card.data.eval_results]
    kinds = [result.metric_type for result in card.data.eval_results]
    assert len(set(kinds)) == len(kinds)
    # By type, which is the Hub's own name of the metric.
    by_type = {
        "bert": {"accuracy": "masked_accuracy", "cross_entropy": "masked_loss"},
        "decoder": {"accuracy": "token_accuracy", "cross_entropy": "loss"},
    }.get(family, {"accuracy": "token_accuracy", "cross_entropy": "loss", "f1": "token_f1"})
    assert values == [round(metrics[by_type.get(kind, kind)], 4) for kind in kinds]
    assert {result.task_type for result in card.data.eval_results} == {PIPELINES[family]}
    assert json.dumps(card.data.to_dict(), allow_nan=False)


def number_of(cell: str) -> tuple[float, float]:
    """The number that a cell begins with, and half a unit of its last digit."""
    text = cell.split()[0].replace(",", "")
    scale = 100 if text.endswith("%") else 1
    digits = len(text.rstrip("%").partition(".")[2])
    return float(text.rstrip("%")) / scale, 0.5001 * 10**-digits / scale


@pytest.mark.parametrize("family", FAMILIES)
def test_every_figure_of_the_table_is_that_of_its_metric(family):
    results = ALL_RESULTS[family]
    metrics = dict(results["metrics"])
    table = [cells(row) for row in rows(model_card(results, CONFIGS[family]), "figure")]
    assert len(table) == len(FAMILY_CARDS[family].figures)
    for figure, (label, value, *baseline) in zip(FAMILY_CARDS[family].figures, table, strict=True):
        assert label == figure.label
        number, precision = number_of(value)
        assert number == pytest.approx(metrics.pop(figure.metric), abs=precision)
        if figure.baseline is not None:
            name, described = figure.baseline
            number, precision = number_of(baseline[0])
            assert number == pytest.approx(metrics.pop(name), abs=precision)
            assert described in baseline[0]
    # All that was measured is told.
    assert metrics == {}
    assert len({len(row) for row in table}) == 1
    assert len(table[0]) == (3 if family in ("bert", "decoder") else 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_figures_that_were_not_measured_are_left_out(family):
    first = FAMILY_CARDS[family].figures[0]
    wanted = [first.metric, *([first.baseline[0]] if first.baseline else [])]
    metrics = {name: ALL_RESULTS[family]["metrics"][name] for name in wanted}
    assert [row.label for row in figure_rows(FAMILY_CARDS[family], metrics)] == [first.label]
    card = model_card({**ALL_RESULTS[family], "metrics": metrics}, CONFIGS[family])
    assert len(rows(card, "figure")) == 1
    assert len(card.data.eval_results) == 1


def test_an_infinite_figure_is_told_but_not_in_the_metadata():
    results = changed("decoder", metrics={"perplexity": math.inf})
    card = model_card(results, CONFIGS["decoder"])
    assert cells(rows(card, "figure")[0])[1] == "inf"
    assert {result.metric_type for result in card.data.eval_results} == {"accuracy", "cross_entropy"}


def test_the_examples_of_each_family():
    heads = {"decoder": "beginning", "transformer": "source", "recurrent": "source", "captioner": "caption"}
    tables = {family: rows(model_card(ALL_RESULTS[family], CONFIGS[family]), head) for family, head in heads.items()}
    pair = [["en: 1/2/2003", "2003-01-02", "2003-02-01"]]
    assert {family: list(map(cells, table)) for family, table in tables.items()} == {
        "decoder": [["Returns the", "length of it."]],
        "transformer": pair,
        "recurrent": pair,
        "captioner": [["latin small letter a", "latin small letter e"]],
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_what_else_an_example_holds_is_left_out(family):
    name = EXAMPLES[family]
    (example,) = ALL_RESULTS[family][name]
    results = changed(family, **{name: [{**example, "image": b"\x89PNG"}]})
    assert model_card(results, CONFIGS[family]).content == model_card(ALL_RESULTS[family], CONFIGS[family]).content
    assert examples_of({**results, name: []}) == []
    without = {key: value for key, value in results.items() if key != name}
    card = model_card(without, CONFIGS[family])
    assert FAMILY_CARDS[family].examples[1] not in card.text
    assert not re.search(r"\n\n\n", card.text)


@pytest.mark.parametrize("family", ["transformer", "recurrent"])
def test_exact_match_by_parts(family):
    card = model_card(ALL_RESULTS[family], CONFIGS[family])
    assert list(map(cells, rows(card, "dates"))) == [["1", "1,200", "98.8%"], ["2", "7", "54.3%"]]
    assert list(map(cells, rows(card, "characters, at least"))) == [["20", "1,111", "87.7%"]]
    for settings in ({"data": ["dates:de", "org/data"]}, {"validation": "org/data"}):
        other = model_card(changed(family, settings=settings), CONFIGS[family])
        assert list(map(cells, rows(other, "words"))) == [["1", "1,200", "98.8%"], ["2", "7", "54.3%"]]


def test_what_the_cards_say_of_the_models():
    texts = {family: model_card(ALL_RESULTS[family], CONFIGS[family]).text for family in FAMILIES}
    assert "3 layers, 128 wide, 4 heads, 1,234 tokens" in texts["decoder"]
    assert "3 encoder and 2 decoder\nlayers, 128 wide, 4 heads" in texts["transformer"]
    assert "LSTM layers, 2 in the" in texts["recurrent"]
    assert "by the alignment `bilinear`" in texts["recurrent"]
    assert "an LSTM decoder\n(1 layer, 128 wide)" in texts["captioner"]
    assert "by the alignment `scaled_dot`" in texts["captioner"]
    fixed = RegardRecurrentConfig(alignment="none", rnn_type="gru")
    text = model_card(ALL_RESULTS["recurrent"], fixed).text
    assert "GRU layers" in text
    assert "has no attention" in text
    text = model_card(ALL_RESULTS["captioner"], RegardCaptionerConfig(alignment="none")).text
    assert "has no attention" in text
    crossing = RegardCaptionerConfig(decoder_type="transformer", num_attention_heads=8)
    text = model_card(ALL_RESULTS["captioner"], crossing).text
    assert "a Transformer decoder" in text
    assert "cross-attention with 8 heads" in text
    assert "alignment" not in text


def test_what_the_cards_say_of_the_settings():
    def text(family: str, config=None, **settings) -> str:
        return model_card(changed(family, settings=settings), config or CONFIGS[family]).text

    assert "single characters" in text("recurrent")
    assert "byte-level pieces" in text("recurrent", units="pieces")
    assert "- Tokens:" not in text("recurrent", tokenizer="org/tokenizer")
    assert "greedily" in text("recurrent")
    for family in ("transformer", "captioner"):
        assert "with 4 beams" in text(family, beams=4)
        assert "num_beams=4" in text(family, beams=4)
        assert "num_beams" not in text(family)
        assert "Label smoothing 0.1." in text(family, label_smoothing=0.1)
        assert "smoothing" not in text(family)
    assert "was trained from scratch." in text("captioner")
    assert "began with trained weights (`org/resnet`)." in text("captioner", backbone="org/resnet")
    frozen = RegardCaptionerConfig(freeze_backbone=True)
    assert "trained weights (`org/resnet`) and was left as" in text("captioner", frozen, backbone="org/resnet")
    assert "left with random weights" in text("captioner", frozen)


def test_the_language():
    def language(family: str, **settings):
        return model_card(changed(family, settings=settings), CONFIGS[family]).data.language

    assert language("transformer", data=["org/data"]) is None
    assert language("transformer", data=["org/data"], language="de") == "de"
    assert language("transformer", language="de") == "de"
    assert language("captioner", data=["org/images"]) is None
    assert "language" not in model_card(changed("captioner", settings={"data": ["a"]}), CONFIGS["captioner"]).content
    results = copy.deepcopy(ALL_RESULTS["captioner"])
    del results["settings"]["language"]
    assert model_card(results, CONFIGS["captioner"]).data.language == "en"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_figures_were_measured_on(family):
    held_out = {"bert": "45 examples from 21 held-out documents", "decoder": "4,567 tokens of 21 held-out documents"}
    what = held_out.get(family, {"captioner": "1,001 held-out images"}.get(family, "1,207 held-out pairs"))
    card = model_card(ALL_RESULTS[family], CONFIGS[family])
    assert f"On {what}:" in card.text
    assert "of the same source" in card.text
    card = model_card(changed(family, settings={"validation": "org/other", "evaluation_batches": 3}), CONFIGS[family])
    assert f"On {what} of the data set `org/other` (at most 96 examples of them):" in card.text
    assert "of that source" in card.text
    noun = FAMILY_CARDS[family].held_out
    assert card.data.eval_results[0].dataset_name == f"held-out {noun} of the data set org/other"
