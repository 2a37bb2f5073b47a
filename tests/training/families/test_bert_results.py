"""What a run leaves behind, and that transformers takes it as it is."""

import json
from importlib.metadata import version

import pytest
import torch
import transformers
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer, BertTokenizer, pipeline

import regard
from regard.training.examples import tokenized as corpus
from regard.training.examples.bert import BertExamples
from regard.training.examples.masking import Masking
from regard.training.examples.tokenized import tokenize_documents
from regard.training.families.bert import BertObjective, BertSettings
from regard.training.families.text_corpus import load_document_split
from regard.training.reading import documents as sources
from regard.training.reading.documents import load_documents


@pytest.fixture(scope="module")
def run(pretrain, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "run"
    return folder, pretrain(folder, steps=5, learning_rate=0.01)


@pytest.fixture(scope="module")
def masked_only(pretrain, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "run"
    return folder, pretrain(folder, steps=3, next_sentence=False)


def test_the_folder(run):
    folder, _ = run
    names = {path.name for path in folder.iterdir()}
    assert names == {"settings.yaml", "origin.json", "tokenizer", "history.jsonl", "results.json", "model"}
    files = {path.name for path in (folder / "model").iterdir()}
    assert files == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_results(run, corpus_folder):
    folder, results = run
    assert json.loads((folder / "results.json").read_text()) == results
    assert (results["family"], results["architecture"]) == ("bert", "RegardBertForPreTraining")
    assert (results["step"], results["processes"], results["device"]) == (5, 1, "cpu")
    assert results["seconds"] > 0
    assert results["versions"]["torch"] == version("torch")
    data, documents = results["data"], load_documents(corpus_folder)
    assert (data["documents"], data["held_out_documents"]) == (9, 3)
    train, _ = load_document_split(BertSettings(data=[corpus_folder], validation="0.25"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = [id_ for text in train["text"] for id_ in tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert data["tokens"] == len(ids)
    assert data["unknown_share"] == ids.count(tokenizer.unk_token_id) / len(ids)
    assert 0.3 < data["random_pairs_share"] < 0.7
    assert len(documents) == 12


def test_the_share_of_unknown_tokens(pretrain, tmp_path):
    (tmp_path / "corpus.txt").write_text("\n\n".join(["A house. A door 中. A wall."] * 8), encoding="utf-8")
    vocabulary = {word: id_ for id_, word in enumerate("[PAD] [UNK] [CLS] [SEP] [MASK] a house door wall .".split())}
    BertTokenizer(vocab=vocabulary).save_pretrained(tmp_path / "tokenizer")
    settings = {
        "data": [str(tmp_path / "corpus.txt")],
        "documents": "blank-line",
        "tokenizer": str(tmp_path / "tokenizer"),
    }
    results = pretrain(tmp_path / "run", steps=1, batch_size=2, **settings)
    assert results["data"]["unknown_share"] == pytest.approx(1 / 10)


def test_the_next_run_reads_the_tokenised_corpus(run, pretrain, tmp_path, monkeypatch):
    _, results = run
    monkeypatch.setattr(corpus, "split_sentences", lambda *args: pytest.fail("a text is tokenised again"))
    monkeypatch.setattr(sources, "_read_file", lambda *args: pytest.fail("a file is read again"))
    again = pretrain(tmp_path / "run", steps=5, learning_rate=0.01)
    assert (again["data"], again["metrics"]) == (results["data"], results["metrics"])


def evaluate_saved(folder, settings: dict, corpus_folder: str, model_class: type) -> dict[str, float]:
    """The figures of a saved model, from the saved files and the held-out documents alone."""
    model = model_class.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    masking = Masking.from_tokenizer(tokenizer)
    options = {"max_length": 32, "next_sentence": settings["next_sentence"]}
    train, held_out = (
        BertExamples(tokenize_documents(part, tokenizer), tokenizer, masking, **options)
        for part in load_document_split(BertSettings(data=[corpus_folder], validation="0.25"))
    )
    counts = torch.bincount(
        torch.tensor([id_ for ids in train.corpus["ids"] for id_ in ids]), minlength=len(tokenizer)
    )
    task = BertObjective(train, held_out, counts.numpy())
    epoch = task.held_out()
    batch = task.collate([epoch[index] for index in range(len(epoch))])
    with torch.no_grad():
        sums = task.sums(task.forward(model, batch), batch)
    return task.metrics({name: float(value) for name, value in sums.items()})


def test_the_saved_model_has_the_figures_of_the_trained_one(run, masked_only, corpus_folder):
    for (folder, results), auto_class in ((run, AutoModelForPreTraining), (masked_only, AutoModelForMaskedLM)):
        found = evaluate_saved(folder, results["settings"], corpus_folder, auto_class)
        assert found == pytest.approx(results["metrics"], rel=1e-5)


def test_the_line_that_loads_the_model(run, masked_only, caplog):
    for folder, results in (run, masked_only):
        model, info = AutoModelForMaskedLM.from_pretrained(folder / "model", output_loading_info=True)
        assert isinstance(model, regard.RegardBertForMaskedLM)
        assert not info["missing_keys"]
        heads = 2 * 33 + 32 * 33 if results["settings"]["next_sentence"] else 0  # next sentence, and the pooler
        assert model.num_parameters() == results["parameters"] - heads


def test_the_tokenizer_is_a_stock_one(run, texts):
    folder, _ = run
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert type(tokenizer) is BertTokenizer
    assert json.loads((folder / "model" / "tokenizer_config.json").read_text())["tokenizer_class"] == "BertTokenizer"
    assert tokenizer.model_max_length == 32  # the model's positions
    assert tokenizer(texts[0], "A pair.", truncation=True)["token_type_ids"][-1] == 1
    started_with = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert tokenizer.get_vocab() == started_with.get_vocab()
    assert [tokenizer(text)["input_ids"] for text in texts] == [started_with(text)["input_ids"] for text in texts]


def test_pipeline(run):
    folder, _ = run
    text = "the river [MASK] the stone."
    guesses = pipeline("fill-mask", model=str(folder / "model"))(text, top_k=3)
    model = AutoModelForMaskedLM.from_pretrained(folder / "model").eval()
    inputs = AutoTokenizer.from_pretrained(folder / "model")(text, return_tensors="pt")
    with torch.no_grad():
        scores = model(**inputs).logits[0, inputs["input_ids"][0] == 4].softmax(-1)
    assert [guess["token"] for guess in guesses] == scores.topk(3).indices[0].tolist()
    assert [guess["score"] for guess in guesses] == pytest.approx(scores.topk(3).values[0].tolist(), rel=1e-4)


@pytest.mark.parametrize("stock_class", ["BertForMaskedLM", "BertForPreTraining"])
def test_a_stock_model_by_rewriting_the_configuration(run, tmp_path, stock_class):
    folder, _ = run
    for path in (folder / "model").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "bert", "architectures": [stock_class]}))
    stock, info = getattr(transformers, stock_class).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    ours = getattr(regard, f"Regard{stock_class}").from_pretrained(folder / "model").eval()
    inputs = AutoTokenizer.from_pretrained(tmp_path)("the river [MASK]", "the stone", return_tensors="pt")
    with torch.no_grad():
        expected, found = stock.eval()(**inputs), ours(**inputs)
    for name in expected:
        assert torch.allclose(found[name], expected[name], atol=1e-5)
