"""A word's uses: planted ones are found, and the figures are those of an independent computation."""

import dataclasses
import io
import random

import numpy as np
import pytest
import torch

import regard
from regard.configuration import extras
from regard.inspection.senses.clusters import find_clusters
from regard.inspection.senses.figure import draw_senses, example_line
from regard.inspection.senses.occurrences import Occurrence, WordReader, contextual_vectors
from regard.inspection.senses.senses import word_senses
from regard.inspection.senses.variance import anisotropy, self_similarity, share_between, variance_components
from regard.inspection.senses.word2vec import static_neighbours
from regard.tokenization.byte_level import train_byte_level
from regard.tokenization.wordpiece import train_wordpiece
from regard.tokenization.words import train_words

pytest.importorskip("gensim")
metrics = pytest.importorskip("sklearn.metrics")

MONEY, WATER, REST = ("money", "loan", "cash"), ("river", "shore", "flood"), ("red", "old", "new", "big", "late")


def sentences(topics, count: int = 60) -> list[str]:
    """Texts in which words of one topic stand around the word."""
    rng = random.Random(0)
    made: dict[str, None] = {}
    while len(made) < count:
        topic = topics[len(made) % len(topics)]
        words = [rng.choice(topic), rng.choice(REST), "bank", rng.choice(REST), rng.choice(topic), rng.choice(REST)]
        made.setdefault(" ".join(words))
    return list(made)


def planted(texts) -> tuple:
    """A recurrent encoder whose state tells what stood before: a topic has one direction, the other its opposite."""
    tokenizer = train_words(texts)
    config = regard.RegardRecurrentConfig(
        vocab_size=len(tokenizer), hidden_size=6, encoder_hidden_size=6, num_hidden_layers=1, rnn_type="gru"
    )
    model = regard.RegardRecurrentForConditionalGeneration(config)
    with torch.no_grad():
        tokens = model.get_encoder().tokens.weight
        tokens.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
        for topic, sign in ((MONEY, 1.0), (WATER, -1.0)):
            ids = [tokenizer.convert_tokens_to_ids(word) for word in topic]
            tokens[ids] += sign * 2
        for parameter in model.get_encoder().layers.parameters():
            parameter.copy_(torch.eye(*parameter.shape) * 0.5 if parameter.ndim == 2 else torch.zeros_like(parameter))
            if parameter.ndim == 2:
                # The candidate state reads the input; the gates keep about half of it.
                parameter.zero_()[-6:] = torch.eye(6)
    return model.train(), tokenizer


def few(texts, **options):
    model, tokenizer = planted(texts)
    return word_senses(model, tokenizer, texts, "bank", words=4, **options), model


def test_planted_uses_are_found_and_the_model_is_left_as_it_was():
    found, model = few(sentences((MONEY, WATER)))
    assert model.training
    truth = [any(word in example.text for word in MONEY) for example in found.occurrences]
    assert metrics.adjusted_rand_score(truth, found.clusters.labels) == 1
    assert sum(sense.occurrences for sense in found.senses) == len(found.occurrences) == found.contexts == 60
    for sense in found.senses:
        topic = MONEY if sense.examples[0].text.split()[0] in MONEY else WATER
        assert set(sense.companions[:3]) == set(topic)
        assert all(example.text[example.start : example.end] == "bank" for example in sense.examples)
    assert found.clusters.share > found.clusters.chance_share
    again, _ = few(sentences((MONEY, WATER)))
    assert again.static_neighbours == found.static_neighbours
    np.testing.assert_array_equal(again.clusters.axes, found.clusters.axes)
    assert dataclasses.replace(again, clusters=found.clusters) == found


def test_one_use_is_one_cluster_and_embeddings_without_positions_are_static():
    found, _ = few(sentences((MONEY, WATER)), layer=0)
    assert len(found.senses) == 1
    assert found.layers[0].share == found.layers[0].mean_share == found.position_share == 0
    assert found.layers[0].self_similarity == pytest.approx(1)
    assert found.layers[1].share > 0
    draw_senses(found).savefig(io.BytesIO())
    cloud = np.random.default_rng(1).normal(size=(80, 7)) * np.arange(1, 8)
    assert find_clusters(cloud).labels.max() == 0
    assert find_clusters(cloud, 3).labels.max() == 2


def test_the_variance_is_that_of_a_loop():
    rng = np.random.default_rng(0)
    words = [rng.normal(size=(9, 5)) * scale + rng.normal(size=5) for scale in (1, 2, 0.5)]
    found = variance_components(words)
    everything = np.concatenate(words)
    between = sum(9 * ((word.mean(0) - everything.mean(0)) ** 2).sum() for word in words)
    within = sum(((vector - word.mean(0)) ** 2).sum() for word in words for vector in word)
    assert between + within == pytest.approx(((everything - everything.mean(0)) ** 2).sum())
    assert found.within.mean() == pytest.approx(within / (27 - 3))
    # The mean square between words is expected to be n times the variance between, and that within.
    assert 9 * found.between + found.within.mean() == pytest.approx(between / 2)
    correlation = found.between / found.total
    assert found.shares.mean() == pytest.approx(1 - correlation)

    def cosine(one, other):
        return one @ other / np.linalg.norm(one) / np.linalg.norm(other)

    pairs = [cosine(words[0][i], words[0][j]) for i in range(9) for j in range(9) if i != j]
    assert self_similarity(words[0]) == pytest.approx(np.mean(pairs))
    others = [cosine(x, y) for i in range(3) for j in range(3) if i != j for x in words[i] for y in words[j]]
    assert anisotropy(words) == pytest.approx(np.mean(others))
    labels = np.arange(27) // 9
    assert share_between(everything, labels) == pytest.approx(between / (between + within))


@pytest.mark.parametrize(
    ("word", "text", "found"),
    [
        ("set", "Set reset (set), set-up set_x SET's offset set.", ["set", "set"]),
        ("банк", "Банк, банка; «банк»!", ["банк"]),
        ("银行", "我去银行。中国银行的人", ["银行", "银行"]),
        ("नदी", "नदी और नदीका, नदी।", ["नदी", "नदी"]),
        ("$", "a $ and $x$", ["$", "$", "$"]),
    ],
)
def test_whole_words_in_any_script(word, text, found):
    reader = WordReader(train_byte_level([text], vocab_size=290), word)
    there = [text[start:end] for each, start, end in reader.words(text) if each == reader.word]
    assert there == found


def test_spellings_are_the_tokenizers():
    for lowercase, count in ((True, 3), (False, 1)):
        reader = WordReader(train_wordpiece(["Set set SET"], vocab_size=60, lowercase=lowercase), "set")
        assert reader.read(["Set set SET", "Set set SET"])[0].words.count("set") == count
        assert len(reader.read(["a", "b", "a"])) == 2
    # One that puts white space around each of these signs.
    reader = WordReader(train_wordpiece(["银行"], vocab_size=60), "银行")
    assert reader.word == "银行"
    assert [word for word, _, _ in reader.words("中国银行")] == ["中", "国", "银行"]


@pytest.mark.parametrize(
    "name",
    [
        "BertModel",
        "GPT2LMHeadModel",
        "RegardBertForMaskedLM",
        "RegardDecoderForCausalLM",
        "RegardTransformerForConditionalGeneration",
        "RegardRecurrentForConditionalGeneration",
    ],
)
def test_vectors_are_the_means_of_the_pieces(make_model, name):
    model, tokenizer = make_model(name)
    text = "the river returns unreturnable hashes of the bank"
    start = text.index("unreturnable")
    long = Occurrence(f"{text} {text}", start, start + len("unreturnable"))
    vectors = contextual_vectors(model, tokenizer, [Occurrence(text, *dataclasses.astuple(long)[1:]), long], 55)
    encoded = tokenizer(text, return_offsets_mapping=True)
    places = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if a < long.end and b > start and a < b]
    network = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    with torch.no_grad():
        states = network(torch.tensor([encoded["input_ids"]]), output_hidden_states=True).hidden_states
    for layer, expected in zip(vectors.layers, states, strict=True):
        np.testing.assert_allclose(layer[0], expected[0, places].mean(0).numpy(), rtol=1e-4, atol=1e-5)
    assert vectors.lengths.max() <= 55


def test_examples_and_odd_text_are_drawn():
    found, _ = few(sentences((MONEY, WATER)))
    odd = Occurrence("a $x$ \\frac \u202e 中国 " * 9 + "bank" + " < & _^ 😀" * 9, 153, 157)
    odd = dataclasses.replace(odd, start=odd.text.index("bank"), end=odd.text.index("bank") + 4)
    assert "[bank]" in example_line(odd)
    assert len(example_line(Occurrence("bank " * 99, 250, 254))) <= 78
    wide = Occurrence("W" * 60 + " bank " + "W" * 60, 61, 65)
    senses = tuple(dataclasses.replace(sense, examples=(odd, wide, *sense.examples)) for sense in found.senses)
    figure = draw_senses(dataclasses.replace(found, senses=senses))
    figure.canvas.draw()
    edge = figure.bbox.x1
    for text in figure.axes[1].texts:
        assert text.get_window_extent().x1 <= edge
        assert not text.get_parse_math()


def test_the_lines_of_a_static_word_are_seen():
    found, _ = few(sentences((MONEY, WATER)))
    static = dataclasses.replace(found.layers[0], share=0.0, self_similarity=1.0)
    figure = draw_senses(dataclasses.replace(found, word="بنك", layers=(static,)))
    for axes in figure.axes[2:]:
        low, high = axes.get_ylim()
        assert low < 0
        assert high > 1
    # A word that is written from right to left does not turn the title.
    assert figure.get_suptitle().startswith(f"{len(found.occurrences)} contexts of ")


def test_what_cannot_be(monkeypatch):
    texts = sentences((MONEY, WATER))
    model, tokenizer = planted(texts)
    for options, message in (
        ({"word": "absent"}, r"^`word` \('absent'\) occurs in 0 of 60 distinct texts: it must occur in at least 10"),
        ({"word": "two words"}, r"^`word` \('two words'\) must be one word, without white space$"),
        ({"layer": 2}, r"^`layer` \(2\) must be at least -2 and less than 2$"),
        ({"senses": 31}, r"^`senses` \(31\) must be at least 1 and at most half of the 60 occurrences$"),
        ({"examples": 0}, r"^`examples` \(0\) must be at least 1$"),
        ({"seed": -1}, r"^`seed` \(-1\) must be at least 0 and less than 2\*\*32$"),
        ({"max_length": 1}, r"^`max_length` \(1\) is too small for 'bank', which has more tokens$"),
    ):
        with pytest.raises(ValueError, match=message):
            word_senses(model, tokenizer, texts, **{"word": "bank", "words": 4, **options})
    with pytest.raises(ValueError, match=r"^`word` \('x'\) occurs 1 times: word2vec needs 5$"):
        static_neighbours([["x", "y"]], "x")

    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "sklearn" else True)
    with pytest.raises(ValueError, match=r"^word senses need scikit-learn: pip install 'regard\[senses\]'$"):
        word_senses(model, tokenizer, texts, "bank")
