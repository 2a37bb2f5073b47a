"""Training the captioner: examples and figures."""

import numpy as np
import pytest
import torch

from regard.tokenization.processor import make_captioner_processor
from regard.tokenization.words import train_words
from regard.training.examples.captions import CaptionCollator
from regard.training.families import captioner
from regard.training.families.captioner import CAPTIONER, CaptionerSettings
from regard.training.families.seq2seq_objective import Seq2SeqObjective
from tests.support.captions import make_examples, make_rows

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
        with pytest.raises(IndexError, match=f"the epoch has 40 examples and no example {index}"):
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
    task = Seq2SeqObjective(examples, examples, captioner.CaptionCollator(processor))
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
        tried = CAPTIONER.sample_outputs(settings, None, processor, make_rows(references))
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
