"""transformers' pipelines take a folder with one of our models and a stock tokenizer as it is."""

import pytest
import torch
from transformers import AutoTokenizer, BertTokenizer, pipeline

from regard import (
    RegardBertForMaskedLM,
    RegardBertForSequenceClassification,
    RegardBertForTokenClassification,
    RegardBertModel,
)

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat dog sat ran on a mat ##s . in tree ##ing walk red".split()
SENTENCES = ["The cat sat on a red mat.", "Dogs walking", "the tree"]


@pytest.fixture
def save(make_model, tmp_path):
    """A folder with a model of a class and a tokenizer whose words are spread over its vocabulary."""

    def to_folder(model_class, **fields):
        model = make_model(model_class, **fields)
        model.save_pretrained(tmp_path)
        BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)}, model_max_length=12).save_pretrained(
            tmp_path
        )
        return str(tmp_path), model

    return to_folder


def encode(folder, texts):
    return AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")


def test_fill_mask(save):
    folder, model = save(RegardBertForMaskedLM, vocab_size=len(WORDS))
    fill = pipeline("fill-mask", model=folder)
    assert type(fill.model) is RegardBertForMaskedLM
    guesses = fill("The [MASK] sat.", top_k=len(WORDS))
    batch = encode(folder, ["The [MASK] sat."])
    assert batch["input_ids"].tolist() == [[2, 5, 4, 8, 14, 3]]
    expected = model(**batch).logits[0, 2].softmax(dim=-1)
    scores = {guess["token"]: guess["score"] for guess in guesses}
    assert [scores[index] for index in range(len(WORDS))] == pytest.approx(expected.tolist(), abs=1e-5)
    assert {guess["token_str"] for guess in guesses} >= {"cat", "dog"}


def test_text_classification(save):
    labels = {0: "calm", 1: "cross", 2: "sad"}
    folder, model = save(RegardBertForSequenceClassification, id2label=labels, num_labels=3)
    classify = pipeline("text-classification", model=folder, top_k=None, batch_size=2)
    assert type(classify.model) is RegardBertForSequenceClassification
    expected = model(**encode(folder, SENTENCES)).logits.softmax(dim=-1)
    for row, answers in enumerate(classify(SENTENCES)):
        scores = {answer["label"]: answer["score"] for answer in answers}
        assert [scores[label] for label in labels.values()] == pytest.approx(expected[row].tolist(), abs=1e-5)


def test_token_classification(save):
    labels = {0: "O", 1: "B-X", 2: "I-X", 3: "B-Y"}
    folder, model = save(RegardBertForTokenClassification, id2label=labels, num_labels=4)
    tag = pipeline("token-classification", model=folder, ignore_labels=[])
    assert type(tag.model) is RegardBertForTokenClassification
    batch = encode(folder, [SENTENCES[0]])
    best = model(**batch).logits[0].argmax(dim=-1)[1:-1].tolist()
    tagged = tag(SENTENCES[0])
    assert [word["word"] for word in tagged] == ["the", "cat", "sat", "on", "a", "red", "mat", "."]
    assert [word["entity"] for word in tagged] == [labels[index] for index in best]
    assert SENTENCES[0][tagged[5]["start"] : tagged[5]["end"]] == "red"


def test_feature_extraction(save):
    folder, model = save(RegardBertModel)
    features = pipeline("feature-extraction", model=folder, return_tensors=True, batch_size=3)(SENTENCES)
    batch = encode(folder, SENTENCES)
    expected = model(**batch).last_hidden_state
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    assert sorted(lengths) == [4, 6, 10]
    for row, (feature, length) in enumerate(zip(features, lengths, strict=True)):
        torch.testing.assert_close(feature[0, :length], expected[row, :length], atol=1e-5, rtol=0)
