"""A plain `Trainer` on every head of our BERT, and what a fine-tuning run writes and refuses beside the training."""

import json
import logging
import os
import signal
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers
from matplotlib.figure import Figure
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    RobertaConfig,
    RobertaModel,
    Trainer,
    TrainingArguments,
)

import regard
from regard.tokenization.wordpiece import train_wordpiece
from regard.training.finetuning.finetune import _FinetuneTrainer, finetune
from regard.training.finetuning.results import _save_confusion
from tests.support.thorough import slow_except

WORDS = "river stone fish door garden wall piano violin tune the a of under near".split()
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece([" ".join(WORDS)] * 2, vocab_size=200, model_max_length=48)


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory):
    """A tiny BERT of ours, not pretrained, with dropout."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    regard.RegardBertForPreTraining(regard.RegardBertConfig(vocab_size=len(tokenizer), **SIZES)).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


def texts_and_labels(number=40):
    for place in range(number):
        topic = place % 3
        yield " ".join([WORDS[3 * topic + place % 2], *WORDS[9 : 10 + place % 5]]), topic


@pytest.fixture
def data(tmp_path):
    rows = [{"text": text, "label": f"topic {label}"} for text, label in texts_and_labels()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "rows.jsonl")


def run(folder, base, data, resume=False, **given):
    settings = {"model": base, "data": data, "epochs": 1, "batch_size": 8, "validation": "0.2", "log_with": "none"}
    return finetune("classification", folder, {**settings, **given}, resume=resume)


# Trainer


def encode(head, tokenizer):
    """The rows of a head, its collator, and what its model is loaded with."""
    rows = []
    for text, label in texts_and_labels():
        if head == "MultipleChoice":
            pair = tokenizer([text, text], ["the fish", "a door"])
            rows.append({**pair, "labels": label % 2})
        elif head == "QuestionAnswering":
            rows.append({**tokenizer("the a", text), "start_positions": 4, "end_positions": 4 + label % 2})
        elif head == "NextSentencePrediction":
            rows.append({**tokenizer(text, "a wall"), "labels": label % 2})
        elif head == "TokenClassification":
            row = tokenizer(text)
            rows.append({**row, "labels": [-100, *(place % 3 for place in row["input_ids"][1:-1]), -100]})
        else:
            rows.append({**tokenizer(text)} | ({"labels": label} if head == "SequenceClassification" else {}))
    collators = {
        "MultipleChoice": DataCollatorForMultipleChoice(tokenizer),
        "TokenClassification": DataCollatorForTokenClassification(tokenizer),
        "MaskedLM": DataCollatorForLanguageModeling(tokenizer),
    }
    options = {"num_labels": 3} if head in ("SequenceClassification", "TokenClassification") else {}
    return datasets.Dataset.from_list(rows), collators.get(head, DataCollatorWithPadding(tokenizer)), options


def spread_of(outcome):
    scores = outcome.predictions[0] if isinstance(outcome.predictions, tuple) else outcome.predictions
    return {"spread": float(np.std(scores))}


@pytest.mark.parametrize(
    "head",
    slow_except(
        ["TokenClassification", "MultipleChoice"],
        [
            "SequenceClassification",
            "TokenClassification",
            "QuestionAnswering",
            "MultipleChoice",
            "NextSentencePrediction",
            "MaskedLM",
        ],
    ),
)
def test_trainer_resumes_each_head_and_keeps_the_best(head, base, tokenizer, tmp_path):
    """With padded batches, metrics of the user's own, accumulation and dropout."""
    rows, collator, options = encode(head, tokenizer)
    arguments = TrainingArguments(
        output_dir=tmp_path,
        num_train_epochs=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="spread",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    outcomes = []
    for resumed in (False, True):
        torch.manual_seed(0)
        model = getattr(transformers, f"AutoModelFor{head}").from_pretrained(base, **options)
        parts = {"train_dataset": rows, "eval_dataset": rows, "data_collator": collator}
        trainer = Trainer(model, arguments, processing_class=tokenizer, compute_metrics=spread_of, **parts)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5") if resumed else None)
        figures = [entry for entry in trainer.state.log_history if "eval_spread" in entry]
        measured = [(entry["step"], entry["eval_loss"], entry["eval_spread"]) for entry in figures]
        outcomes.append((measured, model.state_dict()))
    (whole, weights), (again, resumed_weights) = outcomes
    assert [step for step, *_ in whole] == [5, 10, 15]
    assert whole == again
    assert all(torch.equal(resumed_weights[name], weight) for name, weight in weights.items())
    best, *_ = max(whole, key=lambda entry: entry[-1])
    kept = getattr(transformers, f"AutoModelFor{head}").from_pretrained(tmp_path / f"checkpoint-{best}").state_dict()
    assert all(torch.equal(kept[name], weight) for name, weight in weights.items())


# What is written


def test_predictions_tell_the_row_that_they_are_of(base, data, tmp_path):
    results = run(tmp_path / "run", base, data)
    lines = Path(data).read_text().splitlines()
    found = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    assert len(found) == results["data"]["held_out_rows"] == 8
    for row in found:
        name, _, number = row["source"].rpartition(":")
        assert name == data
        assert json.loads(lines[int(number) - 1]).items() <= row.items()
    held_out = [row["label"] for row in found]
    # There are 14, 13 and 13 rows of the classes.
    assert results["metrics"]["accuracy_baseline"] == held_out.count("topic 0") / 8


def test_what_is_trained_on_and_kept_is_told(base, data, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "regard.training"):
        results = run(tmp_path / "run", base, data, epochs=9, patience=1, metric="loss", learning_rate=1.0)
    assert "32 rows to train on, 8 held out." in caplog.messages
    labels = results["data"]["labels"]
    told = ", ".join(f"{name!r} {number}" for name, number in labels.items())
    assert f"3 labels to learn: {told}." in caplog.messages
    losses = [entry["loss"] for entry in results["history"]]
    assert len(losses) < 9
    best = losses.index(min(losses))
    (line,) = (message for message in caplog.messages if "The best model" in message)
    assert line.startswith(f"Training stopped after epoch {len(losses)}: the last 1 were no better (`patience`)")
    assert line.endswith(f"The best model is that of epoch {best + 1}: loss {losses[best]:.4g}.")


def test_a_training_that_diverges_is_told(base, data, tmp_path, caplog):
    results = run(tmp_path / "run", base, data, learning_rate=1e30, epochs=2)
    assert np.isnan(results["metrics"]["loss"])
    assert any("the training has diverged; try a lower `learning_rate`" in message for message in caplog.messages)


@pytest.mark.parametrize("number", [2, 20])
def test_names_of_classes_can_be_told_apart_in_the_picture(number, tmp_path, monkeypatch):
    """None is cut off, however long they are, and only their middle is left out."""
    names = [f"{'a long name of a class that begins like all others '}{place} €$x$" for place in range(number)]
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: (figures.append(figure), save(figure, path)))
    _save_confusion(tmp_path, names, np.arange(number**2).reshape(number, number))
    (figure,) = figures
    labels = [*figure.axes[0].get_xticklabels(), *figure.axes[0].get_yticklabels()]
    shown = [label.get_text() for label in labels]
    assert len(set(shown)) == number
    assert all(text.startswith("a long name") and text.endswith(r" €\$x\$") for text in shown)
    for label in [*labels, figure.axes[0].xaxis.label, figure.axes[0].yaxis.label]:
        box = label.get_window_extent()
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.width
        assert box.y1 <= figure.bbox.height
    # Nor do they lie over each other.
    boxes = [label.get_window_extent() for label in labels[:number]]
    assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))


@pytest.mark.filterwarnings("error")
def test_characters_that_the_font_lacks_are_told_once(tmp_path, caplog):
    _save_confusion(tmp_path, ["类别", "a"], np.eye(2, dtype=int))
    assert caplog.messages == [
        "confusion_matrix.png shows boxes where matplotlib's font lacks characters of the labels; "
        "confusion_matrix.csv has them."
    ]
    assert "类别" in (tmp_path / "confusion_matrix.csv").read_text(encoding="utf-8")


def test_an_earlier_model_is_not_deleted_before_the_new_one_has_its_name(base, data, tmp_path, monkeypatch):
    """As when the disk fails at that moment."""
    folder = tmp_path / "run"
    run(folder, base, data)
    weights = (folder / "model" / "model.safetensors").read_bytes()
    # The run has to write its model again.
    (folder / "results.json").unlink()
    replace = os.replace

    def fail(source, target):
        if Path(target) == folder / "model":
            raise OSError(28, os.strerror(28))
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(OSError, match=r"^the trained model could not be written to .*run: No space left on devi"):
            run(folder, base, data, resume=True)
    assert (folder / "old-model" / "model.safetensors").read_bytes() == weights
    run(folder, base, data, resume=True)
    assert (folder / "model" / "model.safetensors").read_bytes() == weights
    assert not [path.name for path in folder.iterdir() if path.name.startswith(("old-", "partial-"))]


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [1, 3, 4, 7])
def test_a_signal_saves_a_checkpoint_and_ends_the_run(step, number, base, data, tmp_path, monkeypatch, caplog):
    """In the middle of an epoch of four steps, or at its end, after which the run goes on to the same end."""
    settings = {"epochs": 3, "patience": 2, "metric": "loss", "learning_rate": 1e-2}
    whole = run(tmp_path / "whole", base, data, **settings)
    work = _FinetuneTrainer.training_step

    def step_and_signal(trainer, *args):
        if trainer.state.global_step == step - 1:
            signal.raise_signal(number)
        return work(trainer, *args)

    # What starts the tests in the background may have it ignored.
    before = signal.signal(number, signal.default_int_handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(_FinetuneTrainer, "training_step", step_and_signal)
            with pytest.raises(SystemExit) as raised:
                run(tmp_path / "cut", base, data, **settings)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert raised.value.code == 128 + number
    assert f"Stopped by {signal.Signals(number).name} after step {step}, whose checkpoint is saved" in caplog.text
    assert (tmp_path / "cut" / "checkpoints" / f"checkpoint-{step}" / "trainer_state.json").exists()
    assert not (tmp_path / "cut" / "results.json").exists()
    resumed = run(tmp_path / "cut", base, data, resume=True, **settings)
    assert resumed["history"] == whole["history"]
    assert resumed["metrics"] == whole["metrics"]
    found, expected = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("cut", "whole"))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


# Mistakes


def refusal(folder, *args, **given):
    """The one line that a run is refused with, before it has written anything."""
    with pytest.raises(ValueError, match=r"^`") as raised:
        run(folder, *args, **given)
    assert not folder.exists()
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_more_tokens_than_the_model_has_vectors_for(kind, base, data, tokenizer, tmp_path):
    folder = tmp_path / "model"
    if kind == "ours":
        regard.RegardBertModel.from_pretrained(base).save_pretrained(folder)
    else:
        BertModel(BertConfig(vocab_size=len(tokenizer), **SIZES)).save_pretrained(folder)
    longer = AutoTokenizer.from_pretrained(base)
    longer.add_tokens(["novel", "newer"])
    longer.save_pretrained(folder)
    last = len(tokenizer) + 1
    assert f"a tokenizer with ids up to {last}, but vectors for {last - 1} tokens: call its " in refusal(
        tmp_path / "run", str(folder), data
    )
    # More vectors than tokens are none too few.
    model = transformers.AutoModel.from_pretrained(folder)
    model.resize_token_embeddings(last + 7)
    model.save_pretrained(folder)
    assert run(tmp_path / "run", str(folder), data)["step"]


def test_positions_that_begin_after_the_padding(data, tokenizer, tmp_path):
    """As RoBERTa's do: of 48 there are 47, as [PAD] is number 0 here."""
    RobertaModel(RobertaConfig(vocab_size=len(tokenizer), pad_token_id=0, **SIZES)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    told = refusal(tmp_path / "run", str(tmp_path / "model"), data)
    assert told == f"`max_length` (48) must be at most 47, the positions of {tmp_path / 'model'}"
    assert run(tmp_path / "run", str(tmp_path / "model"), data, max_length=47)["step"]


def test_a_tracker_that_is_not_installed(base, data, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: False)
    assert refusal(tmp_path / "run", base, data, log_with="wandb").startswith(
        "`log_with` (wandb): WandbCallback requir"
    )


def test_lora_targets_that_are_not_there(base, data, tmp_path):
    pytest.importorskip("peft")
    told = refusal(tmp_path / "run", base, data, lora=2, lora_targets=["up", "query"])
    assert told.startswith("`lora_targets` ('query') is no module of the model, which has ")
    assert {"down", "output", "query_key_value", "up"} <= set(told.partition("which has ")[2].split(", "))
