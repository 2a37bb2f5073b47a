import contextlib
import io
import json
import logging

import pytest
from huggingface_hub import ModelCard

import regard
from regard.train import bert_summary, train_bert


@pytest.fixture
def results(run_folder) -> dict:
    return json.loads((run_folder / "results.json").read_text())


def test_the_face_of_the_package():
    assert regard.train_bert is train_bert
    assert "train_bert" in regard.__all__


def test_a_card_lies_beside_the_model(run_folder, results, corpus_folder):
    card = ModelCard.load(run_folder / "model" / "README.md")
    figures = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert figures["accuracy"] == pytest.approx(results["metrics"]["masked_accuracy"], abs=1e-4)
    assert corpus_folder not in card.content
    assert str(run_folder) not in card.content


def test_nothing_shared_names_a_local_path(run_folder, corpus_folder):
    for path in (run_folder / "model").iterdir():
        content = path.read_bytes()
        assert str(run_folder.parent).encode() not in content
        assert corpus_folder.encode() not in content


def test_the_result_is_that_of_the_run(tmp_path, tiny, caplog):
    with caplog.at_level(logging.INFO, logger="regard"):
        results = train_bert(tmp_path / "run", tiny)
    assert results == json.loads((tmp_path / "run" / "results.json").read_text())
    assert bert_summary(results, tmp_path / "run" / "model") in caplog.messages


def test_an_edited_card_is_kept(tmp_path, tiny):
    results = train_bert(tmp_path / "run", tiny)
    card = tmp_path / "run" / "model" / "README.md"
    card.write_text("Edited by hand.")
    assert train_bert(tmp_path / "run", tiny, resume=True) == results
    assert card.read_text() == "Edited by hand."
    # It is written for a run that was killed before it could be.
    card.unlink()
    train_bert(tmp_path / "run", tiny, resume=True)
    assert "# BERT" in card.read_text()


def test_the_summary(results, tmp_path):
    metrics = {
        "masked_accuracy": 0.41236,
        "masked_accuracy_baseline": 0.0789,
        "masked_loss": 3.14159,
        "masked_loss_unigram": 6.5,
        "next_sentence_accuracy": 0.876,
        "next_sentence_baseline": 0.512,
    }
    filled = [{"text": "The [MASK] sat.", "word": "cat", "guesses": ["dog", "cow", "##s"]}]
    results = {**results, "metrics": metrics, "filled": filled, "step": 1_234, "tokens": 5_678_901, "seconds": 3_210.4}
    lines = bert_summary(results, tmp_path).splitlines()
    assert "Trained for 1,234 steps, 5,678,901 tokens, in 3,210 seconds." in lines
    figures = [[word for word in line.split() if "." in word] for line in lines if "7.9%" in line or "6.500" in line]
    assert figures == [["41.2%", "7.9%"], ["3.142", "6.500"]]
    (next_sentences,) = (line for line in lines if "next sentences" in line)
    assert [word for word in next_sentences.split() if "%" in word] == ["87.6%", "51.2%"]
    assert lines[lines.index("  The [MASK] sat.") + 1] == "    dog, cow, ##s  (was: cat)"
    del metrics["next_sentence_accuracy"], metrics["next_sentence_baseline"]
    shorter = bert_summary({**results, "filled": []}, tmp_path)
    assert "next sentences" not in shorter
    assert "[MASK]" not in shorter


def test_the_last_line_loads_the_model(run_folder, results):
    line = bert_summary(results, run_folder / "model").splitlines()[-1]
    found: dict = {}
    with contextlib.redirect_stderr(io.StringIO()):
        exec(line.strip(), found)
    assert isinstance(found["model"], regard.RegardBertForMaskedLM)


def test_the_last_line_is_python_whatever_the_folder_is_called(results, tmp_path):
    line = bert_summary(results, tmp_path / 'it\'s "here"\\').splitlines()[-1]
    compile(line.strip(), "line", "exec")
