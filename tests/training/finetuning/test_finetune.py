"""Fine-tuning: each task is learnt and loads; runs resume, keep their best model, and refuse what won't do."""

import csv
import gc
import json
import random
import shutil
from importlib.util import find_spec

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoTokenizer, BertConfig, BertModel, Trainer, TrainingArguments, pipeline

import regard
from regard.tokenization.wordpiece import train_wordpiece
from regard.training.finetuning.finetune import TASKS, _FinetuneTrainer, finetune
from regard.training.finetuning.settings import FinetuneSettings
from regard.training.reading.typed_rows import Table

needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft, an optional package, is not installed")

TOPICS = {"water": "river stone fish", "house": "door garden wall", "music": "piano violin tune"}
FILLERS = "the a of under near beside quickly".split()
NAMES = "anna bert carla".split()
PLACES = "rome oslo lima".split()
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
    # Large enough to tell words apart without pretraining.
    "initializer_range": 0.2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap():
    """`Trainer` collects garbage again and again, which takes long when all that was imported is looked through."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def tokenizer():
    words = [*" ".join(TOPICS.values()).split(), *FILLERS, *NAMES, *PLACES, "who", "lives", "in", "where", "is"]
    return train_wordpiece([" ".join(words)] * 2, vocab_size=300, model_max_length=48)


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory):
    """A tiny BERT of ours, not pretrained."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = regard.RegardBertConfig(vocab_size=len(tokenizer), **SIZES)
    regard.RegardBertForPreTraining(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def stock(tokenizer, tmp_path_factory):
    """A tiny stock BERT."""
    folder = tmp_path_factory.mktemp("stock")
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(tokenizer), **SIZES)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def sentences(number, seed=0):
    """Fillers with words of some topics, and those topics."""
    rng = random.Random(seed)
    for _ in range(number):
        topics = rng.sample(list(TOPICS), rng.randint(1, 2))
        words = [rng.choice(TOPICS[topic].split()) for topic in topics] + rng.choices(FILLERS, k=rng.randint(1, 4))
        rng.shuffle(words)
        yield words, topics


def classification_rows(number=80):
    return [{"text": " ".join(w), "label": t[0]} for w, t in sentences(2 * number) if len(t) == 1][:number]


def regression_rows():
    worth = {"water": 1.5, "house": -1.0, "music": 0.0}
    return [{"text": " ".join(w), "label": sum(map(worth.get, t))} for w, t in sentences(120)]


def multi_label_rows():
    return [{"text": " ".join(w), "label": t} for w, t in sentences(80)]


def token_rows():
    rng = random.Random(1)
    tags = {**dict.fromkeys(NAMES, "B-PER"), **dict.fromkeys(PLACES, "B-LOC")}
    rows = []
    for _ in range(60):
        words = rng.choices([*FILLERS, *NAMES, *PLACES], k=rng.randint(3, 8))
        rows.append({"tokens": words, "tags": [tags.get(word, "O") for word in words]})
    return rows


def question_rows():
    rng = random.Random(2)
    rows = []
    for _ in range(70):
        name = rng.choice(NAMES)
        words = rng.choices(FILLERS, k=rng.randint(10, 70))
        place = rng.randrange(len(words))
        words.insert(place, name)
        answers = {"text": [name], "answer_start": [len(" ".join(words[:place])) + (place > 0)]}
        rows.append({"question": "who lives in rome", "context": " ".join(words), "answers": answers})
    return rows


def choice_rows():
    rng = random.Random(3)
    rows = []
    for words, _ in sentences(70):
        choices = rng.sample(NAMES, 1) + rng.sample(PLACES, 2)
        rng.shuffle(choices)
        right = next(place for place, choice in enumerate(choices) if choice in NAMES)
        rows.append({"text": " ".join(words), "choices": choices, "label": right})
    return rows


ROWS = {
    "classification": classification_rows,
    "regression": regression_rows,
    "multi-label": multi_label_rows,
    "tokens": token_rows,
    "question-answering": question_rows,
    "multiple-choice": choice_rows,
}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "rows.jsonl", classification_rows())


def run(task, folder, model, data, resume=False, **given):
    settings = {"epochs": 6, "batch_size": 8, "learning_rate": 5e-3, "patience": 0, "validation": "0.2"}
    settings |= {"stride": 6} if task == "question-answering" else {}
    settings |= {"model": model, "data": data, "log_with": "none", **given}
    return finetune(task, folder, settings, resume=resume)


def predictions_of(folder):
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


# Each task


@pytest.fixture(scope="module", params=list(TASKS))
def learnt(request, base, tmp_path_factory):
    """A run of each task: its name, its folder and its results."""
    folder = tmp_path_factory.mktemp("runs")
    data = write(folder / "rows.jsonl", ROWS[request.param]())
    return request.param, folder / "run", run(request.param, folder / "run", base, data, epochs=12)


def test_each_task_is_learnt(learnt):
    task, _, results = learnt
    metrics = results["metrics"]
    if task == "regression":
        assert metrics["mse"] < 0.1
        assert metrics["pearson"] > 0.9
    else:
        assert metrics[TASKS[task].best_by] > 0.9
    assert set(TASKS[task].measured) <= set(metrics)
    assert results["data"]["rows"] + results["data"]["held_out_rows"] == len(ROWS[task]())
    assert json.loads((learnt[1] / "results.json").read_text()) == results


def test_what_is_learnt_loads_by_its_auto_class(learnt):
    task, folder, results = learnt
    model = getattr(transformers, TASKS[task].auto_class).from_pretrained(folder / "model")
    assert type(model).__name__ == results["architecture"]
    assert type(model).__module__.startswith("regard")
    assert AutoTokenizer.from_pretrained(folder / "model")("the river")["input_ids"]
    assert {path.name for path in folder.iterdir()} >= {"settings.yaml", "results.json", "predictions.jsonl", "model"}
    assert (folder / "confusion_matrix.png").exists() == (task == "classification")


def test_predictions_stand_with_their_inputs(learnt):
    task, folder, results = learnt
    found, given = predictions_of(folder), ROWS[task]()
    assert len(found) == results["data"]["held_out_rows"]
    for row in found:
        assert {name: row[name] for name in given[0]} in given
        assert "prediction" in row
    if task == "tokens":
        assert all(len(row["prediction"]) == len(row["tokens"]) for row in found)
    if task == "classification":
        right = [row["prediction"] == row["label"] for row in found]
        assert sum(right) / len(right) == results["metrics"]["accuracy"]
    if task == "question-answering":
        # Long contexts were read in windows.
        assert results["data"]["windows"]["validation"] > len(found)
        assert all(row["context"][row["start"] : row["end"]] == row["prediction"] for row in found)


def test_a_pipeline_takes_what_is_learnt(learnt):
    task, folder, _ = learnt
    model = str(folder / "model")
    if task in ("classification", "multi-label", "regression"):
        call = pipeline("text-classification", model=model)
        found = call([row["text"] for row in predictions_of(folder)[:5]])
        for row, answer in zip(predictions_of(folder), found, strict=False):
            if task == "classification":
                assert answer["label"] == row["prediction"]
                assert answer["score"] == pytest.approx(row["probability"], abs=1e-4)
            elif task == "multi-label":
                assert answer["score"] == pytest.approx(max(row["probabilities"].values()), abs=1e-4)
            else:
                assert answer["score"] == pytest.approx(row["prediction"], abs=1e-4)
    elif task == "tokens":
        call = pipeline("token-classification", model=model)
        text = "the anna near oslo"
        assert [(each["entity"], text[each["start"] : each["end"]]) for each in call(text)] == [
            ("B-PER", "anna"),
            ("B-LOC", "oslo"),
        ]


def test_the_confusion_matrix_counts_each_row(base, tmp_path):
    data = write(tmp_path / "rows.jsonl", [*classification_rows(40), *[{"text": "who is", "label": "$odd, \n"}] * 6])
    run("classification", tmp_path / "run", base, data, epochs=1)
    with (tmp_path / "run" / "confusion_matrix.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header[1:] == [row[0] for row in rows] == ["$odd,", "house", "music", "water"]
    found = predictions_of(tmp_path / "run")
    for row in rows:
        for name, number in zip(header[1:], row[1:], strict=True):
            expected = [each for each in found if each["label"].strip() == row[0] and each["prediction"] == name]
            assert int(number) == len(expected)


# Training


def test_the_best_model_is_kept_and_training_stops(base, data, tmp_path):
    results = run(
        "classification", tmp_path / "run", base, data, epochs=30, patience=2, metric="loss", learning_rate=0.05
    )
    losses = [entry["loss"] for entry in results["history"]]
    assert len(losses) < 30
    best = losses.index(min(losses))
    assert best == len(losses) - 3
    assert results["best_step"] == results["history"][best]["step"]
    # Not the last: these are the figures of the model that is kept.
    assert results["metrics"]["loss"] == pytest.approx(min(losses), abs=1e-6)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    rows = predictions_of(tmp_path / "run")
    batch = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    labels = torch.tensor([model.config.label2id[row["label"]] for row in rows])
    with torch.no_grad():
        assert F.cross_entropy(model.eval()(**batch).logits, labels).item() == pytest.approx(min(losses), abs=1e-5)


@pytest.mark.parametrize("lora", [0, pytest.param(3, marks=needs_peft)])
def test_a_run_that_was_cut_off_goes_on_to_the_same_end(lora, base, data, tmp_path, monkeypatch):
    # With dropout, whose random state must come back too.
    config = json.loads((shutil.copytree(base, tmp_path / "base") / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "hidden_dropout_prob": 0.3}))
    settings = {"model": str(tmp_path / "base"), "data": data, "epochs": 9, "lora": lora, "metric": "loss"}
    settings |= {"patience": 2, "learning_rate": 0.1}
    whole = run("classification", tmp_path / "whole", **settings)
    # It stops early, and is cut off when one epoch was no better than the best: that is not forgotten.
    assert whole["epoch"] < 9
    save = Trainer._save_checkpoint

    def save_and_fail(trainer, *args):
        save(trainer, *args)
        if trainer.state.epoch == whole["epoch"] - 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_save_checkpoint", save_and_fail)
        with pytest.raises(KeyboardInterrupt):
            run("classification", tmp_path / "cut", **settings)
    # A checkpoint that was not written to its end is passed over.
    (tmp_path / "cut" / "checkpoints" / "checkpoint-999").mkdir()
    with pytest.raises(ValueError, match=r"holds another run: choose another folder, or `resume`"):
        run("classification", tmp_path / "cut", **settings)
    resumed = run("classification", tmp_path / "cut", resume=True, **settings)
    assert resumed["history"] == whole["history"]
    assert resumed["metrics"] == whole["metrics"]
    expected = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    found = load_file(tmp_path / "cut" / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # One that has ended is only read.
    assert run("classification", tmp_path / "cut", resume=True, **settings) == resumed


def closed(model):
    """A model whose forward takes no other arguments than it knows, as not every stock model's does."""
    forward = model.forward

    def known(input_ids, attention_mask=None, labels=None, start_positions=None, end_positions=None):
        given = {"labels": labels, "start_positions": start_positions, "end_positions": end_positions}
        labels = {name: value for name, value in given.items() if value is not None}
        return forward(input_ids, attention_mask, **labels)

    model.forward = known
    return model


@pytest.mark.parametrize("task", list(TASKS))
@pytest.mark.parametrize("kind", ["ours", "stock", "closed"])
def test_parts_of_a_batch_train_as_the_whole(task, kind, base, stock, tokenizer, tmp_path):
    """Also with a model that knows nothing of the other parts, and rows with unequal numbers of labels."""
    work = TASKS[task](FinetuneSettings(stride=6 if task == "question-answering" else None))
    # Questions of one window each, so that there are eight of these too.
    rows = [row for row in ROWS[task]() if len(row.get("context", "").split()) < 30][:8]
    table = Table(rows, [f"rows:{number}" for number in range(len(rows))], {})
    encoded, _ = work.prepare(tokenizer, 48, table, table)
    assert len(encoded) == 8
    auto_class = getattr(transformers, work.auto_class)
    outcomes = []
    for parts in (1, 4):
        torch.manual_seed(0)
        model = auto_class.from_pretrained(base if kind == "ours" else stock, **work.config_fields())
        model = closed(model) if kind == "closed" else model
        arguments = TrainingArguments(
            output_dir=tmp_path,
            per_device_train_batch_size=8 // parts,
            gradient_accumulation_steps=parts,
            max_steps=1,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        start = {name: weight.clone() for name, weight in model.named_parameters()}
        trainer = _FinetuneTrainer(model, arguments, train_dataset=encoded, data_collator=work.collator())
        trainer.train()
        updates = [weight.detach() - start[name] for name, weight in model.named_parameters()]
        assert max(update.abs().max() for update in updates) > 1e-3
        outcomes.append((updates, trainer.state.log_history[0]["loss"]))
    (whole, loss), (parted, parted_loss) = outcomes
    torch.testing.assert_close(parted, whole, atol=1e-6, rtol=0)
    assert parted_loss == pytest.approx(loss, abs=1e-4)


def test_a_stock_model_is_fine_tuned_as_it_is(stock, data, tmp_path):
    results = run("classification", tmp_path / "run", stock, data)
    assert results["architecture"] == "BertForSequenceClassification"
    assert results["metrics"]["accuracy"] > 0.9
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["model_type"] == "bert"


def test_a_model_with_other_labels_gets_a_new_layer(base, data, tmp_path):
    run("classification", tmp_path / "three", base, data, epochs=1)
    two = write(tmp_path / "two.jsonl", [row for row in classification_rows() if row["label"] != "music"])
    run("classification", tmp_path / "two", str(tmp_path / "three"), two, epochs=1)
    config = json.loads((tmp_path / "two" / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "house", "1": "water"}


@needs_peft
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_lora_trains_an_adapter_that_merges(kind, base, stock, data, tmp_path):
    from peft import PeftModel

    model = base if kind == "ours" else stock
    results = run("classification", tmp_path / "run", model, data, lora=4, learning_rate=2e-2, epochs=12)
    assert results["metrics"]["accuracy"] > 0.8
    adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    target = "query_key_value" if kind == "ours" else "query"
    assert any(target in name and "lora_A" in name for name in adapter)
    assert any("classifier" in name for name in adapter)
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model").eval()
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=3)
    with_adapter = PeftModel.from_pretrained(plain, tmp_path / "run" / "adapter").eval()
    batch = AutoTokenizer.from_pretrained(model)(["the river", "a piano tune"], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = with_adapter(**batch).logits
        torch.testing.assert_close(merged(**batch).logits, expected, atol=1e-4, rtol=0)
        assert (expected[0] - expected[1]).abs().max() > 0.1
    # The model beside it is as it was.
    before = transformers.AutoModel.from_pretrained(model).embeddings.state_dict()
    after = merged.bert.embeddings.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


@needs_peft
def test_lora_trains_what_the_checkpoint_lacks(stock, base, data, tmp_path):
    """Such as the pooler of a model that was pretrained without one, which would stay random."""
    folder = tmp_path / "no_pooler"
    regard.RegardBertForMaskedLM.from_pretrained(base).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    run("classification", tmp_path / "run", str(folder), data, epochs=1, lora=2, lora_targets=["up", "down"])
    adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert any("pooler.dense" in name for name in adapter)
    assert {name.split(".")[-3] for name in adapter if "lora_A" in name} == {"up", "down"}


# Mistakes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"label_column": "kind"}, r"has no column 'kind'; `label_column` can be 'text', 'label'"),
        ({"metric": "bleu"}, r"`metric` \('bleu'\) must be one of accuracy, f1, matthews_correlation, loss"),
        ({"max_length": 49}, r"`max_length` \(49\) must be at least 5 and at most 48"),
        ({"max_length": 3}, r"`max_length` \(3\) must be at least 5 and at most 48"),
        ({"batch_size": 9, "accumulation": 2}, r"`batch_size` \(9\) must be a multiple of 2"),
        (
            {"model": "no/such-model"},
            r"`model` \(no/such-model\) is no folder here, and could not be loaded from the Hub",
        ),
        ({"epoch": 3}, r"there is no setting `epoch`: did you mean `epochs`"),
        ({"warmup": 1.0}, r"`warmup` \(1\.0\) must be at least 0 and less than 1"),
        ({"precision": "fp8"}, r"`precision` \('fp8'\) must be one of no, bf16, fp16"),
        ({"learning_rate": 0.0}, r"`learning_rate` \(0\.0\) must be more than 0"),
        ({"lora_targets": "query"}, r"`lora_targets` \(query\) needs `lora`"),
        ({"log_with": "trackr"}, r"trackr is not supported, only .*tensorboard.* are supported"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(given, message, base, data, tmp_path):
    with pytest.raises(ValueError, match=message):
        run("classification", tmp_path / "run", **{"model": base, "data": data, **given})
    assert not (tmp_path / "run").exists()


def test_a_model_without_the_head_is_refused(tokenizer, data, tmp_path):
    config = regard.RegardDecoderConfig(vocab_size=len(tokenizer), hidden_size=16, num_attention_heads=2)
    regard.RegardDecoderForCausalLM(config).save_pretrained(tmp_path / "decoder")
    tokenizer.save_pretrained(tmp_path / "decoder")
    with pytest.raises(ValueError, match=r"is a 'regard_decoder', which AutoModelForSequenceClassification does not"):
        run("classification", tmp_path / "run", str(tmp_path / "decoder"), data)


def test_no_such_task(tmp_path):
    with pytest.raises(
        ValueError, match=r"`task` \('translate'\) must be one of classification, regression, multi-label"
    ):
        finetune("translate", tmp_path / "run", {})


def test_lora_without_peft_says_so(monkeypatch):
    monkeypatch.setattr("regard.training.finetuning.settings.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"`lora` \(8\) needs the package peft: pip install peft"):
        FinetuneSettings(lora=8)
