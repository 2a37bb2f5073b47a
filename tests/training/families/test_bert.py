import collections
import logging
import math
import random

import datasets
import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertTokenizer

from regard.modeling.bert_pretraining import RegardBertForMaskedLM, RegardBertForPreTraining
from regard.tokenization.wordpiece import train_wordpiece
from regard.training.examples.masking import IGNORED
from regard.training.families import bert, text_corpus
from regard.training.families.bert import BERT, BertObjective, BertSettings, fill_examples
from regard.training.families.text_corpus import load_document_split
from regard.training.loop.loop import Loop

SUBJECTS = [
    [("wide", "river"), ("cold", "stone"), ("deep", "water")],
    [("red", "house"), ("front", "door"), ("green", "garden")],
    [("grand", "piano"), ("small", "violin"), ("loud", "concert")],
]
TINY_MODEL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture
def make_objective(examples_of, corpus_of, texts, tokenizer):
    """A task on the session's texts, its last three documents held out."""

    def make(next_sentence: bool = True) -> BertObjective:
        counts = np.bincount(np.concatenate(corpus_of(texts[:-3])["ids"]), minlength=len(tokenizer))
        train, held_out = (examples_of(part, next_sentence=next_sentence) for part in (texts[:-3], texts[-3:]))
        return BertObjective(train, held_out, counts)

    return make


def make_model(tokenizer, next_sentence: bool = True, **fields) -> RegardBertForPreTraining | RegardBertForMaskedLM:
    model_class = RegardBertForPreTraining if next_sentence else RegardBertForMaskedLM
    settings = BertSettings(config={**TINY_MODEL, **fields}, dropout=0.0, max_length=32)
    return model_class(BERT.make_config(settings, tokenizer)).eval()


# The task


@pytest.mark.parametrize("next_sentence", [True, False])
def test_figures_against_a_count_by_hand(make_objective, texts, corpus_of, tokenizer, next_sentence):
    task, model = make_objective(next_sentence), make_model(tokenizer, next_sentence)
    held_out = task.held_out()
    examples = [held_out[index] for index in range(len(held_out))]
    sums: collections.Counter = collections.Counter()
    for start in range(0, len(examples), 4):
        batch = task.collate(examples[start : start + 4])
        with torch.no_grad():
            output = task.forward(model, batch)
        sums.update({name: float(value) for name, value in task.sums(output, batch).items()})
    metrics = task.metrics(sums)

    counts = collections.Counter(id_ for ids in corpus_of(texts[:-3])["ids"] for id_ in ids)
    for id_ in tokenizer.all_special_ids:
        counts.pop(id_, None)
    most_frequent, _ = counts.most_common(1)[0]
    smoothed = counts.total() + len(tokenizer)
    found = collections.defaultdict(list)
    for example in examples:
        ids, types = (torch.tensor(example[name]).unsqueeze(0) for name in ("input_ids", "token_type_ids"))
        with torch.no_grad():
            output = model(input_ids=ids, token_type_ids=types)
        scores = (output.prediction_logits if next_sentence else output.logits)[0].log_softmax(-1)
        for place in np.flatnonzero(example["labels"] != IGNORED):
            label = int(example["labels"][place])
            found["right"].append(int(scores[place].argmax()) == label)
            found["loss"].append(-float(scores[place, label]))
            found["most_frequent"].append(label == most_frequent)
            found["unigram"].append(-math.log((counts[label] + 1) / smoothed))
        if next_sentence:
            follows = example["next_sentence_label"]
            found["next"].append(int(output.seq_relationship_logits.argmax()) == follows)
            found["random"].append(follows)
    expected = {
        "masked_accuracy": np.mean(found["right"]),
        "masked_accuracy_baseline": np.mean(found["most_frequent"]),
        "masked_loss": np.mean(found["loss"]),
        "masked_loss_unigram": np.mean(found["unigram"]),
    }
    if next_sentence:
        share = np.mean(found["random"])
        expected |= {
            "next_sentence_accuracy": np.mean(found["next"]),
            "next_sentence_baseline": max(share, 1 - share),
        }
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert metrics["masked_accuracy_baseline"] > 0


def test_items_of_a_batch(make_objective):
    examples = [make_objective().held_out()[index] for index in range(5)]
    predicted = sum((example["labels"] != IGNORED).sum() for example in examples)
    task = make_objective()
    assert task.counts(task.collate(examples)) == {"num_items_in_batch": predicted, "num_sequences_in_batch": 5}
    task = make_objective(next_sentence=False)
    assert task.counts(task.collate(examples)) == {"num_items_in_batch": predicted}


@pytest.mark.parametrize(("label", "expected"), [(0, lambda loss: loss > 5), (1, lambda loss: loss < 0.01)])
def test_both_kinds_of_pairs_count_in_the_loss(make_objective, tokenizer, label, expected):
    task, model = make_objective(), make_model(tokenizer)
    with torch.no_grad():
        nn.init.zeros_(model.next_sentence_head.weight)
        model.next_sentence_head.bias.copy_(torch.tensor([-4.0, 4.0]))
    batch = task.collate([task.held_out()[index] for index in range(4)])
    batch["next_sentence_label"][:] = label
    loss = task.forward(model, batch, **{name: torch.tensor(n) for name, n in task.counts(batch).items()}).loss
    without = model(**{name: value for name, value in batch.items() if name != "next_sentence_label"}).loss
    assert expected((loss - without).item())


def test_an_epoch_is_planned_once(make_objective):
    task = make_objective()
    examples = task._train
    first, order = examples.plan(0), task.epoch(0).order
    assert examples.plan(0) is first
    assert not np.array_equal(examples.plan(1), first)
    task.epoch(1)
    np.testing.assert_array_equal(examples.plan(0)[task.epoch(0).order], first[order])


def test_the_held_out_examples_are_always_the_same(make_objective, corpus_of, texts):
    task = make_objective()
    first, second = task.held_out(), task.held_out()
    assert all(np.array_equal(first[index]["input_ids"], second[index]["input_ids"]) for index in range(len(first)))
    assert task._held_out.corpus["ids"] == corpus_of(texts[-3:])["ids"]
    assert task._train.corpus["ids"] == corpus_of(texts[:-3])["ids"]
    expected = task._held_out.epoch(0)
    assert all(np.array_equal(first[index]["input_ids"], expected[index]["input_ids"]) for index in range(len(first)))


# Learning


class Repeated:
    """Eight examples with their masks, over and over."""

    random_share = 0.5

    def __init__(self, epoch) -> None:
        self._examples = [epoch[index] for index in range(8)]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int):
        return self._examples[index]


def test_eight_rows_are_learned_by_heart(make_objective, pretrain, tmp_path, monkeypatch):
    settings = {"batch_size": 8, "learning_rate": 0.01, "dropout": 0.0, "evaluate_every": 0, "save_every": 0}
    whole = BertObjective.epoch
    monkeypatch.setattr(BertObjective, "epoch", lambda self, number: Repeated(whole(self, 0)))
    monkeypatch.setattr(BertObjective, "held_out", lambda self: self.epoch(0))
    metrics = pretrain(tmp_path / "run", steps=200, **settings)["metrics"]
    assert metrics["masked_loss"] < 0.1
    assert metrics["masked_accuracy"] == 1
    assert metrics["next_sentence_accuracy"] == 1


@pytest.fixture(scope="module")
def learned(pretrain, tmp_path_factory):
    """A run on documents that each say the same few things again and again."""
    folder = tmp_path_factory.mktemp("learned")
    rng = random.Random(0)
    (folder / "corpus").mkdir()
    for number in range(40):
        said = [
            f"the {adjective} {noun} stands beside the old {noun} yesterday."
            for adjective, noun in SUBJECTS[number % 3]
        ]
        (folder / "corpus" / f"{number}.txt").write_text(" ".join(rng.choices(said, k=8)))
    settings = {"data": [str(folder / "corpus")], "vocab_size": 200, "learning_rate": 0.005, "steps": 200}
    return folder / "run", pretrain(folder / "run", evaluate_every=0, save_every=0, **settings)


def test_the_model_beats_both_baselines(learned, history_of):
    folder, results = learned
    metrics = results["metrics"]
    assert metrics["masked_accuracy"] > 3 * metrics["masked_accuracy_baseline"]
    assert metrics["masked_loss"] < 0.5 * metrics["masked_loss_unigram"]
    losses = [values["loss"] for _, kind, values in history_of(folder) if kind == "train"]
    assert losses[-1] < losses[0] / 2


def test_brain_float_learns_the_same_to_its_precision(pretrain, tmp_path, weights_of):
    settings = {"steps": 20, "learning_rate": 0.005, "dropout": 0.0}
    full = pretrain(tmp_path / "full", **settings)["metrics"]
    torch_default = torch.get_default_dtype()
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    mixed = pretrain(tmp_path / "mixed", precision="bf16", **settings)["metrics"]
    assert mixed["masked_loss"] == pytest.approx(full["masked_loss"], rel=0.02)
    assert mixed != full
    # Weights are kept, and saved, in full.
    assert {tensor.dtype for tensor in weights_of(tmp_path / "mixed").values()} == {torch.float32}
    assert torch.get_default_dtype() == torch_default


def test_a_model_is_compiled_only_if_asked_for(pretrain, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: compiled.append((type(self).__name__, how)))
    pretrain(tmp_path / "plain", steps=1)
    assert compiled == []
    pretrain(tmp_path / "compiled", compile=True, steps=1)
    assert compiled == [("RegardBertForPreTraining", {"dynamic": True})]


@pytest.mark.slow
def test_compiled_it_learns_the_same(pretrain, tmp_path, monkeypatch):
    compiled, compile_in_place = [], nn.Module.compile

    def compile_quickly(self, **how):
        compiled.append(how)
        compile_in_place(self, backend="eager", **how)

    monkeypatch.setattr(nn.Module, "compile", compile_quickly)
    settings = {"steps": 3, "dropout": 0.0, "config": {"num_hidden_layers": 1}, "log_every": 1}
    plain = pretrain(tmp_path / "plain", **settings)["metrics"]
    assert not compiled
    fast = pretrain(tmp_path / "compiled", compile=True, **settings)["metrics"]
    assert compiled == [{"dynamic": True}]
    assert fast == pytest.approx(plain, rel=1e-4)


# Documents


def test_documents_are_held_out_by_their_share(corpus_folder):
    settings = BertSettings(data=[corpus_folder], validation="0.25")
    train, held_out = load_document_split(settings)
    assert (len(train), len(held_out)) == (9, 3)
    assert not set(train["text"]) & set(held_out["text"])
    assert len({*train["text"], *held_out["text"]}) == 12
    assert load_document_split(settings)[1]["text"] == held_out["text"]
    other = load_document_split(BertSettings(data=[corpus_folder], validation="0.25", seed=1))[1]
    assert set(other["text"]) != set(held_out["text"])


def test_two_documents_are_held_out_at_least(corpus_folder):
    train, held_out = load_document_split(BertSettings(data=[corpus_folder], validation="0.01"))
    assert (len(train), len(held_out)) == (10, 2)


def test_a_source_is_held_out(corpus_folder, tmp_path):
    (tmp_path / "more.txt").write_text("One.\n\nTwo.\n\nThree.", encoding="utf-8")
    settings = BertSettings(data=[corpus_folder], validation=str(tmp_path / "more.txt"), documents="blank-line")
    train, held_out = load_document_split(settings)
    assert len(train) == 12
    assert [text.strip() for text in held_out["text"]] == ["One.", "Two.", "Three."]


@pytest.mark.parametrize("share", ["0", "1", "1.5", "-0.1", "nan"])
def test_a_share_that_is_none(corpus_folder, share):
    with pytest.raises(ValueError, match=rf"`validation` \({share}\) must be a share between 0 and 1"):
        load_document_split(BertSettings(data=[corpus_folder], validation=share))


@pytest.mark.parametrize(("documents", "called"), [(1, "is 1 document"), (3, "are 3 documents")])
def test_too_few_documents_to_hold_some_out(corpus_folder, documents, called):
    message = rf"there {called} in .*, too few to hold out 2 and train on 2 or more: add documents, split"
    with pytest.raises(ValueError, match=message):
        load_document_split(BertSettings(data=[corpus_folder], max_documents=documents))


# Tokenizers


def documents_of(texts: list[str]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": texts})


def test_a_tokenizer_is_trained_as_asked(texts):
    settings = BertSettings(vocab_size=77, lowercase=False, config={"max_position_embeddings": 99}, max_length=9)
    tokenizer = BERT.make_processor(settings, documents_of([text.replace("a", "Á") for text in texts]))
    assert len(tokenizer) == 77
    assert tokenizer.model_max_length == 99
    assert "Á" in tokenizer.get_vocab()
    # Accents go with the letters' case in stock BERT, but not here.
    for strip_accents, expected in ((False, "á"), (True, "a")):
        settings = BertSettings(vocab_size=77, strip_accents=strip_accents)
        assert (
            expected
            in BERT.make_processor(settings, documents_of([text.replace("a", "Á") for text in texts])).get_vocab()
        )


def test_a_tokenizer_is_taken_as_it_is(tokenizer, texts, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    settings = BertSettings(
        tokenizer=str(tmp_path), vocab_size=5_000, config={"max_position_embeddings": 99}, max_length=9
    )
    taken = BERT.make_processor(settings, documents_of(texts))
    assert isinstance(taken, BertTokenizer)
    assert taken.get_vocab() == tokenizer.get_vocab()
    assert taken.model_max_length == 99  # the model's limit, not the tokenizer's


@pytest.mark.parametrize("name", ["cls", "sep", "mask", "pad"])
def test_a_tokenizer_without_a_special_token(byte_tokenizer, texts, tmp_path, name):
    byte_tokenizer.save_pretrained(tmp_path)
    taken = type(byte_tokenizer).from_pretrained(tmp_path)
    setattr(taken, f"{name}_token", None)
    taken.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"has no {name} token, which is needed"):
        BERT.make_processor(BertSettings(tokenizer=str(tmp_path)), documents_of(texts))


def test_a_byte_level_tokenizer_will_do(byte_tokenizer, pretrain, tmp_path, caplog):
    byte_tokenizer.save_pretrained(tmp_path / "tokenizer")
    settings = {"tokenizer": str(tmp_path / "tokenizer"), "whole_words": True, "steps": 3}
    results = pretrain(tmp_path / "run", **settings)
    assert results["data"]["unknown_share"] == 0
    assert results["filled"]


# Filled masks


def test_words_are_masked_for_show(learned):
    folder, results = learned
    texts = [path.read_text() for path in (folder.parent / "corpus").iterdir()]
    assert len(results["filled"]) == 5
    for example in results["filled"]:
        assert example["text"].count("[MASK]") == 1
        assert len(example["guesses"]) == len(set(example["guesses"])) == 3
        # The word stands where the mask is.
        assert any(example["text"].replace("[MASK]", example["word"]) in text for text in texts)


@pytest.fixture
def sure_model(texts):
    """A tokenizer with whole words, and a model that makes the same three guesses everywhere."""
    tokenizer = train_wordpiece(texts, vocab_size=400)
    model = make_model(tokenizer, max_position_embeddings=32)
    with torch.no_grad():
        model.masked_lm_head.decoder.bias[[7, 9, 8]] = torch.tensor([30.0, 20.0, 10.0])
    return tokenizer, model


def test_guesses_are_what_the_model_finds_most_likely(sure_model):
    tokenizer, model = sure_model
    documents = documents_of(["river stone water fish bank house door garden."])
    (example,) = fill_examples(model, tokenizer, documents, BertSettings(max_length=32))
    assert example["guesses"] == tokenizer.convert_ids_to_tokens([7, 9, 8])
    assert example["text"].replace("[MASK]", example["word"]) == documents["text"][0]


def test_only_whole_words_are_masked(sure_model):
    tokenizer, model = sure_model
    documents = documents_of(["Riverstone waterfish piano doorgarden the of wallroof."])
    for seed in range(20):
        (example,) = fill_examples(model, tokenizer, documents, BertSettings(max_length=32, seed=seed))
        assert (example["word"], example["text"].split()[2]) == ("piano", "[MASK]")


def test_sentences_fit_the_trained_length(sure_model):
    tokenizer, model = sure_model
    long, short = "river stone water fish bank house door garden wall roof.", "river stone water fish near a wall."
    settings = {length: BertSettings(max_length=length) for length in (11, 12, 13)}
    found = {
        length: fill_examples(model, tokenizer, documents_of([long, short]), own) for length, own in settings.items()
    }
    # With the stop and two special tokens they have 13 and 10.
    assert [len(examples) for examples in found.values()] == [1, 1, 2]
    assert found[12][0]["text"].replace("[MASK]", found[12][0]["word"]) == short
    assert (
        fill_examples(model, tokenizer, documents_of(["A wall.", "a of a of a of a of.", long * 3]), settings[13])
        == []
    )


# What goes wrong


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"batch_size": 500}, "fewer than one batch"),
        ({"config": {**TINY_MODEL, "vocab_size": 20}}, "`vocab_size` of at least"),
        ({"config": {"hidden_size": 30, "num_attention_heads": 4}}, r"`hidden_size` \(30\) must be a multiple of"),
        ({"config": {"hiden_size": 30}}, "has no field `hiden_size`: did you mean `hidden_size`"),
        ({"max_length": 33}, r"`max_length` \(33\) is more than `max_position_embeddings` \(32\)"),
        ({"max_length": 4}, r"`max_length` \(4\) must be at least 5"),
        ({"accumulation": 5}, r"`batch_size` \(12\) must be a multiple of 5"),
        ({"max_documents": 1}, "too few to hold out"),
        ({"language": "English"}, r"`language` \('English'\) must be an ISO 639 code"),
        ({"vocab_size": 10}, r"`vocab_size` \(10\) must be at least"),
        ({"log_with": ["nonsense"]}, "nonsense"),
    ],
)
def test_nothing_is_written_for_a_run_that_cannot_be(pretrain, tmp_path, given, complaint):
    with pytest.raises(ValueError, match=complaint):
        pretrain(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_wrong_sizes_are_refused_before_the_data_is_read(pretrain, tmp_path, monkeypatch):
    monkeypatch.setattr(text_corpus, "load_documents", lambda *args, **options: pytest.fail("the data is read"))
    monkeypatch.setattr(Loop, "__init__", lambda *args: pytest.fail("it trains"))
    with pytest.raises(ValueError, match="must be a multiple of"):
        pretrain(tmp_path / "run", config={"hidden_size": 30, "num_attention_heads": 4})


def test_the_default_length_of_a_run(pretrain, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(bert.BERT, "default_steps", 3)
    with caplog.at_level(logging.INFO, logger="regard"):
        assert pretrain(tmp_path / "run")["step"] == 3
    assert any("held out: 3 documents" in message for message in caplog.messages)
