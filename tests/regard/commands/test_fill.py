import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from regard.commands.fill import Guess, fill_masks
from regard.modeling.loading.load import model_path


def test_guesses_are_the_most_probable_tokens(run_folder):
    (guesses,) = fill_masks("the [MASK] of the river.", run_folder, top=4)
    expected = pipeline("fill-mask", model=str(run_folder / "model"))("the [MASK] of the river.", top_k=4)
    assert [guess.probability for guess in guesses] == pytest.approx([guess["score"] for guess in expected], rel=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(run_folder / "model")
    assert [guess.token for guess in guesses] == [tokenizer.decode([guess["token"]]) for guess in expected]


def test_several_masks(run_folder):
    text = "[MASK] stone near [MASK] door [MASK]"
    guesses = fill_masks(text, run_folder, top=2)
    assert [len(own) for own in guesses] == [2, 2, 2]
    model = AutoModelForMaskedLM.from_pretrained(run_folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run_folder / "model")
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        scores = model(**inputs).logits[0].softmax(-1)
    places = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero().flatten().tolist()
    for own, place in zip(guesses, places, strict=True):
        best = scores[place].topk(2)
        assert [guess.token for guess in own] == [tokenizer.decode([id_]) for id_ in best.indices.tolist()]
        assert [guess.probability for guess in own] == pytest.approx(best.values.tolist(), rel=1e-4)


def test_all_guesses_are_a_distribution(run_folder):
    size = AutoModelForMaskedLM.from_pretrained(run_folder / "model").config.vocab_size
    (guesses,) = fill_masks("a [MASK]", run_folder, top=size)
    probabilities = [guess.probability for guess in guesses]
    assert sum(probabilities) == pytest.approx(1, abs=1e-5)
    assert probabilities == sorted(probabilities, reverse=True)
    with pytest.raises(
        ValueError, match=rf"`top` \({size + 1}\) must be at least 1 and at most the vocabulary's {size}"
    ):
        fill_masks("a [MASK]", run_folder, top=size + 1)


def test_run_and_model_folders(run_folder):
    assert model_path(run_folder) == model_path(run_folder / "model") == str(run_folder / "model")
    text = "a [MASK] wall"
    assert fill_masks(text, run_folder) == fill_masks(text, str(run_folder / "model"))
    assert isinstance(fill_masks(text, run_folder)[0][0], Guess)
    assert model_path("org/name") == "org/name"


@pytest.mark.parametrize("text", ["no mask here", "", "[mask] MASK [MASK"])
def test_no_mask(run_folder, text):
    with pytest.raises(ValueError, match=r"has no \[MASK\]: put one where a word is to be guessed"):
        fill_masks(text, run_folder)


@pytest.mark.parametrize("top", [0, -1])
def test_no_guesses(run_folder, top):
    with pytest.raises(ValueError, match=rf"`top` \({top}\) must be at least 1"):
        fill_masks("a [MASK]", run_folder, top=top)


def test_a_text_longer_than_the_positions(run_folder):
    with pytest.raises(ValueError, match="33 > 32"):
        fill_masks("a " * 30 + "[MASK]", run_folder)


def test_a_folder_without_a_model(run_folder, tmp_path):
    (tmp_path / "settings.yaml").write_text("family: bert\n")
    with pytest.raises(ValueError, match=r"holds no model: the run may not have ended"):
        fill_masks("a [MASK]", tmp_path)


def test_no_such_model(tmp_path):
    with pytest.raises((ValueError, OSError)):
        fill_masks("a [MASK]", tmp_path / "none")


def test_a_model_that_is_nowhere_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"`model` \(runs/none\) is no folder here"):
        fill_masks("a [MASK]", "runs/none")
