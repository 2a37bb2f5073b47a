"""Training the encoder-decoders on pairs: the task, tiny runs, and every setting."""

import json
import logging

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast

from regard.configuration.recurrent import ALIGNMENT_NAMES, RNN_TYPES
from regard.tokenization.characters import train_characters
from regard.training.examples.masking import IGNORED
from regard.training.examples.seq2seq import PairCollator, PairExamples, tokenize_pairs
from regard.training.families import seq2seq
from regard.training.families.seq2seq import RECURRENT, TRANSFORMER, PairSettings
from regard.training.families.seq2seq_objective import Seq2SeqObjective, target_sums
from regard.training.generation.generate import generate_texts
from regard.training.loop.launch import make_accelerator
from regard.training.loop.loop import Loop
from regard.training.loop.objective import evaluate
from regard.training.run.settings import TrainingSettings

FAMILIES = {"transformer": TRANSFORMER, "recurrent": RECURRENT}
PAIRS = [
    (word * (1 + number % 3), word[::-1]) for number, word in enumerate("ab cde fg hijk ac bde fgh ijk a".split())
]
SMALL = {"hidden_size": 24}
SMALL_TRANSFORMER = {**SMALL, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}


def small_settings(family: str, **given) -> PairSettings:
    config = SMALL_TRANSFORMER if family == "transformer" else SMALL
    settings_class = FAMILIES[family].settings_class
    return settings_class(**{"config": config, "max_length": 20, "dropout": 0.0, "log_with": ["none"], **given})


@pytest.fixture(scope="module")
def pairs() -> Dataset:
    return Dataset.from_dict({"source": [pair[0] for pair in PAIRS], "target": [pair[1] for pair in PAIRS]})


@pytest.fixture(scope="module")
def characters() -> PreTrainedTokenizerFast:
    return train_characters(text for pair in PAIRS for text in pair)


@pytest.fixture(scope="module")
def make_objective(pairs, characters):
    def make() -> Seq2SeqObjective:
        examples = PairExamples(tokenize_pairs(pairs, characters, 20), 4)
        return Seq2SeqObjective(examples, examples, PairCollator(characters.pad_token_id))

    return make


@pytest.fixture(scope="module", params=["transformer 0", "transformer 10", "recurrent 0", "recurrent 25"])
def model(request, characters, make_objective):
    """A model of either family, as it is made or trained for some steps."""
    family, steps = request.param.split()
    torch.manual_seed(1)
    model = FAMILIES[family].make_model(small_settings(family), characters)
    optimizer, task = torch.optim.Adam(model.parameters(), 0.01), make_objective()
    batch = task.collate([task.held_out()[index] for index in range(len(PAIRS))])
    for _ in range(int(steps)):
        task.forward(model, batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


# The task


def test_figures_against_a_count_by_hand(model, make_objective, tmp_path):
    task = make_objective()
    metrics = evaluate(task, model, small_settings("recurrent", batch_size=4), accelerator(tmp_path))
    losses, right, whole = [], [], []
    examples = task.held_out()
    for index in range(len(examples)):
        ids, labels = (torch.tensor(examples[index][name]).unsqueeze(0).long() for name in ("input_ids", "labels"))
        begun = torch.cat([torch.tensor([[model.config.decoder_start_token_id]]), labels[:, :-1]], dim=1)
        with torch.no_grad():
            scores = model(input_ids=ids, decoder_input_ids=begun).logits[0].log_softmax(-1)
        losses += [-float(row[label]) for row, label in zip(scores, labels[0], strict=True)]
        right += (scores.argmax(-1) == labels[0]).tolist()
        whole.append(bool((scores.argmax(-1) == labels[0]).all()))
    expected = {
        "loss": np.mean(losses),
        "perplexity": np.exp(np.mean(losses)),
        "token_accuracy": np.mean(right),
        "exact_match": np.mean(whole),
    }
    assert metrics == pytest.approx(expected, rel=1e-5)


def accelerator(folder):
    return make_accelerator(TrainingSettings(log_with=["none"]), folder)


def test_exact_match_is_that_of_greedy_generation(model, make_objective, pairs, characters, request):
    task = make_objective()
    examples = task.held_out()
    batch = task.collate([examples[index] for index in range(len(examples))])
    with torch.no_grad():
        output = task.forward(model, batch)
    forced = ((output.logits.argmax(-1) == batch["labels"]) | (batch["labels"] == IGNORED)).all(dim=1)
    generated = generate_texts(model, characters, [batch], max_new_tokens=20)
    references = [pairs[row]["target"] for row in examples.order.tolist()]
    assert forced.tolist() == [one == other for one, other in zip(generated, references, strict=True)]
    assert task.metrics(task.sums(output, batch))["exact_match"] == forced.float().mean()
    if not request.node.name.endswith(" 0]"):
        # Some are right and some are not, or the test would show little.
        assert 0 < forced.float().mean() < 1


@pytest.mark.parametrize("batch_size", [1, 2, 9, 50])
def test_figures_do_not_depend_on_the_batches(model, make_objective, tmp_path, batch_size):
    results = [
        evaluate(make_objective(), model, small_settings("recurrent", batch_size=size), accelerator(tmp_path))
        for size in (4, batch_size)
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-5)


class Share:
    """An accelerator that says it is one of several processes, and keeps what they would add up."""

    def __init__(self, accelerator, index: int, number: int, kept: list) -> None:
        self._accelerator, self.process_index, self.num_processes, self._kept = accelerator, index, number, kept

    def reduce(self, value):
        self._kept.append(float(value))
        return value

    def __getattr__(self, name: str):
        return getattr(self._accelerator, name)


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_add_up(model, make_objective, tmp_path, processes):
    task, settings = make_objective(), small_settings("recurrent", batch_size=4)
    whole = accelerator(tmp_path)
    kept = [[] for _ in range(processes)]
    for index, own in enumerate(kept):
        try:
            evaluate(task, model, settings, Share(whole, index, processes, own))
        except ZeroDivisionError:
            # There are three batches for four processes: the last has nothing of its own.
            assert index == 3
    names = list(target_sums(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long)))
    totals = dict(zip(names, map(sum, zip(*kept, strict=True)), strict=True))
    assert totals["targets"] == len(PAIRS)
    assert task.metrics(totals) == pytest.approx(evaluate(task, model, settings, whole), rel=1e-5)


def test_padding_does_not_count():
    logits = torch.randn(3, 5, 7)
    labels = logits.argmax(-1)
    labels[0, 3:] = labels[1, 1:] = IGNORED
    labels[2, 4] = (labels[2, 4] + 1) % 7
    sums = {name: float(value) for name, value in target_sums(logits, labels).items()}
    losses = [-logits[place].log_softmax(-1)[labels[place]] for place in map(tuple, (labels != IGNORED).nonzero())]
    assert sums == pytest.approx(
        {"predicted": 9, "loss": float(sum(losses)), "right": 8, "targets": 3, "targets_right": 2}, rel=1e-5
    )


def test_sums_lie_where_the_labels_do():
    # Processes on devices can't add up what is on none of them.
    sums = target_sums(torch.zeros(2, 3, 4, device="meta"), torch.zeros(2, 3, dtype=torch.long, device="meta"))
    assert {value.device.type for value in sums.values()} == {"meta"}


@pytest.mark.parametrize("family", FAMILIES)
def test_smoothing_is_in_the_loss_but_not_in_the_figures(family, make_objective, characters):
    task = make_objective()
    batch = task.collate([task.held_out()[index] for index in range(5)])
    outputs = {}
    for smoothing in (0.0, 0.3):
        torch.manual_seed(0)
        model = FAMILIES[family].make_model(small_settings(family, label_smoothing=smoothing), characters).eval()
        with torch.no_grad():
            outputs[smoothing] = task.forward(model, batch)
    plain, smoothed = outputs.values()
    assert torch.equal(plain.logits, smoothed.logits)
    assert float(plain.loss) != float(smoothed.loss)
    assert task.metrics(task.sums(smoothed, batch)) == task.metrics(task.sums(plain, batch))
    targets = batch["labels"].flatten()
    for smoothing, output in outputs.items():
        expected = nn.functional.cross_entropy(output.logits.flatten(0, 1), targets, label_smoothing=smoothing)
        assert float(output.loss) == pytest.approx(float(expected), rel=1e-5)


def test_items_of_a_batch(make_objective):
    task = make_objective()
    examples = [task.held_out()[index] for index in range(5)]
    batch, targets = task.collate(examples), sum(len(example["labels"]) for example in examples)
    assert task.counts(batch) == {"num_items_in_batch": targets}
    assert task.tokens(batch) == targets + sum(len(example["input_ids"]) for example in examples)


def test_figures_are_of_the_pairs_that_targets_are_generated_for(train_pairs, write_pairs, tmp_path, monkeypatch):
    """If not all are evaluated on, teacher forcing and generation take the same ones, not the longest or others."""
    own = write_pairs("own", [("a" * length, "b" * (1 + length % 4)) for length in (5, 9, 2, 8, 3, 12, 4, 7, 1, 6)])
    forced = []
    whole = Seq2SeqObjective.sums

    def watched(self, output, batch):
        forced.extend((batch["labels"] != IGNORED).sum(dim=1).tolist())
        return whole(self, output, batch)

    monkeypatch.setattr(Seq2SeqObjective, "sums", watched)
    given = {"data": [own], "validation": own, "batch_size": 2, "evaluation_batches": 2, "max_length": 20}
    results = train_pairs("recurrent", tmp_path / "run", steps=1, evaluate_every=0, **given)
    assert forced == [len(shown["target"]) + 1 for shown in results["generated"]]
    assert len(forced) == 4


# Runs


@pytest.fixture(scope="module", params=FAMILIES)
def run(request, train_pairs, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "run"
    return request.param, folder, train_pairs(request.param, folder)


def test_what_a_run_tells(run):
    family, folder, results = run
    assert results["family"] == family
    assert results["architecture"] == f"Regard{family.capitalize()}ForConditionalGeneration"
    assert (results["step"], results["epoch"], results["processes"]) == (3, 0, 1)
    assert results["data"].keys() == {"pairs", "tokens", "held_out_pairs"}
    assert (results["data"]["pairs"], results["data"]["held_out_pairs"]) == (60, 2_000)
    assert results["metrics"].keys() == {"loss", "perplexity", "token_accuracy", "exact_match", "chrf", "bleu"}
    for name in ("by_target_words", "by_source_length"):
        assert sum(group["number"] for group in results[name]) == 8
        keys = [group["key"] for group in results[name]]
        assert keys == sorted(set(keys))
    assert {group["key"] for group in results["by_target_words"]} <= {1, 2}
    assert {group["key"] % seq2seq.LENGTH_STEP for group in results["by_source_length"]} == {0}
    assert len(results["generated"]) == 5
    assert all(shown.keys() == {"source", "target", "prediction"} for shown in results["generated"])
    assert results == json.loads((folder / "results.json").read_text())


def test_the_model_is_loaded_and_generates_as_shown(run):
    family, folder, results = run
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert type(model) is FAMILIES[family].model_class
    assert model.num_parameters() == results["parameters"]
    assert model.generation_config.max_new_tokens == results["settings"]["max_length"] == 90
    assert tokenizer.model_max_length == 90
    for shown in results["generated"]:
        generated = model.generate(**tokenizer(shown["source"], return_tensors="pt"))
        assert tokenizer.batch_decode(generated, skip_special_tokens=True) == [shown["prediction"]]


def test_a_run_can_be_repeated_to_the_bit(run, train_pairs, tmp_path, weights_of):
    family, folder, results = run
    again = train_pairs(family, tmp_path / "again")
    assert again | {"seconds": results["seconds"]} == results
    weights, expected = weights_of(tmp_path / "again"), weights_of(folder)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


class Killed(BaseException):
    """What no code catches."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_that_is_killed_ends_as_one_that_is_not(family, train_pairs, tmp_path, weights_of, history_of):
    # Three steps an epoch: it is killed at the end of the second, and goes on from within it.
    settings = {"max_pairs": 26, "steps": 9, "save_every": 4, "evaluate_every": 3, "log_every": 1, "dropout": 0.2}
    expected = train_pairs(family, tmp_path / "straight", **settings)
    whole = Loop._step

    def until(self, *args):
        result = whole(self, *args)
        if self.progress.step == 6:
            raise Killed
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_step", until)
        with pytest.raises(Killed):
            train_pairs(family, tmp_path / "run", **settings)
    results = train_pairs(family, tmp_path / "run", resume=True, **settings)
    for name in ("metrics", "generated", "tokens", "epoch", "by_target_words"):
        assert results[name] == expected[name]
    weights, expected_weights = weights_of(tmp_path / "run"), weights_of(tmp_path / "straight")
    assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
    assert history_of(tmp_path / "run") == history_of(tmp_path / "straight")


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("transformer", {}),
        ("recurrent", {}),
        ("recurrent", {"alignment": "bilinear", "rnn_type": "lstm"}),
        ("recurrent", {"alignment": "none"}),
    ],
)
def test_eight_pairs_are_learned_by_heart(family, given, train_pairs, write_pairs, tmp_path):
    words = "ab cde fg hij bc a ef gh".split()
    eight = write_pairs("eight", [(f"{word} no. {number}", word[::-1]) for number, word in enumerate(words)])
    own = {"dropout": 0.0, "learning_rate": 0.01, "steps": 95, "evaluate_every": 0, "save_every": 0, "max_length": 20}
    results = train_pairs(family, tmp_path / "run", data=[eight], validation=eight, **own, **given)
    assert results["metrics"]["exact_match"] == results["metrics"]["token_accuracy"] == 1
    assert results["metrics"]["chrf"] == pytest.approx(100)
    assert all(shown["prediction"] == shown["target"] for shown in results["generated"])


@pytest.mark.parametrize("alignment", ALIGNMENT_NAMES)
@pytest.mark.parametrize("rnn_type", RNN_TYPES)
def test_alignments_and_layers_are_those_asked_for(alignment, rnn_type, train_pairs, tmp_path):
    train_pairs("recurrent", tmp_path / "run", steps=1, alignment=alignment, rnn_type=rnn_type)
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert (config["alignment"], config["rnn_type"]) == (alignment, rnn_type)


def test_pieces_and_own_columns(train_pairs, tmp_path):
    lines = ["en,fr", *(f"the river {number},la rivière {number}" for number in range(40))]
    (tmp_path / "own.csv").write_text("\n".join(lines), encoding="utf-8")
    own = {"data": [str(tmp_path / "own.csv")], "source_column": "en", "target_column": "fr", "validation": "0.2"}
    results = train_pairs("transformer", tmp_path / "run", units="pieces", vocab_size=290, **own)
    assert (results["data"]["pairs"], results["data"]["held_out_pairs"]) == (32, 8)
    assert {shown["target"].split()[0] for shown in results["generated"]} == {"la"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert len(tokenizer) <= 290
    assert len(tokenizer.tokenize("rivière")) < len("rivière")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokenizer_is_taken_as_it_is(family, train_pairs, tmp_path, byte_tokenizer):
    """Stock tokenizers may tell segments, pad on the left, and have no token to begin with."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer.backend_tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        padding_side="left",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    results = train_pairs(family, tmp_path / "run", tokenizer=str(tmp_path / "tokenizer"), beams=2)
    taken = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert taken.get_vocab() == tokenizer.get_vocab()
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
    assert config["decoder_start_token_id"] == config["pad_token_id"] == tokenizer.pad_token_id
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert len(results["generated"]) == 5


def test_generation_is_shown_what_training_is(monkeypatch):
    """Names of special tokens are text in both, and nothing but long sources is cut."""
    sources = ["</s> a", "b", "<pad>ab<s>", "ab" * 15]
    pairs = Dataset.from_dict({"source": sources, "target": ["a"] * 4})
    characters = train_characters(sources)
    shown = []

    def watched(model, tokenizer, batches, **options):
        shown.extend(dict(batch) for batch in batches)
        return ["a"] * 4

    monkeypatch.setattr(seq2seq, "generate_texts", watched)
    RECURRENT.sample_outputs(small_settings("recurrent", batch_size=2, max_length=20), None, characters, pairs)
    assert [batch.keys() for batch in shown] == [{"input_ids", "attention_mask"}] * 2
    rows = [
        ids[mask.bool()].tolist()
        for batch in shown
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    longest, *others = sorted(rows, key=len, reverse=True)
    tokenised = tokenize_pairs(pairs, characters, 20)["source"]
    assert others == sorted(tokenised, key=len, reverse=True)
    assert longest == [*characters("ab" * 9 + "a")["input_ids"]]


def test_long_pairs_are_told_of_and_still_count(train_pairs, write_pairs, tmp_path, caplog):
    own = write_pairs("own", [("ab" * number, "ab") for number in range(1, 31)])
    with caplog.at_level(logging.INFO, logger="regard"):
        results = train_pairs("transformer", tmp_path / "run", data=[own], validation=own, max_length=41, steps=1)
    assert results["data"]["pairs"] == results["data"]["held_out_pairs"] == 20
    assert caplog.messages.count("10 of 30 pairs are longer than `max_length` (41) and left out.") == 2
    assert any(message.startswith("20 pairs with ") for message in caplog.messages)
