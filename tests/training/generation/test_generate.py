"""Texts that a model generates, and figures of them."""

from types import SimpleNamespace

import pytest
import torch
from sacrebleu import corpus_bleu, corpus_chrf
from transformers import PreTrainedTokenizerFast

from regard.configuration.recurrent import RegardRecurrentConfig
from regard.modeling.recurrent import RegardRecurrentForConditionalGeneration
from regard.tokenization.characters import train_characters
from regard.training.families.tokenizers import load_tokenizer, special_ids
from regard.training.generation.generate import exact_match_by, generate_texts, text_figures


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_characters(["stone water fish"])


@pytest.fixture
def model(tokenizer):
    config = RegardRecurrentConfig(hidden_size=24, initializer_range=1.0, **special_ids(tokenizer))
    return RegardRecurrentForConditionalGeneration(config).eval()


def batches_of(tokenizer, texts: list[str], size: int) -> list[dict]:
    parts = [texts[start : start + size] for start in range(0, len(texts), size)]
    return [dict(tokenizer(part, return_tensors="pt", padding=True)) for part in parts]


def test_a_text_for_each_row_whatever_the_batches(model, tokenizer):
    texts = ["stone", "wat", "fish stone fish", "a", "ww"]
    options = {"max_new_tokens": 9}
    together, apart = (
        generate_texts(model, tokenizer, batches_of(tokenizer, texts, size), **options) for size in (3, 1)
    )
    assert together == apart
    assert len(set(together)) > 1
    for text, (row,) in zip(apart, (batch["input_ids"] for batch in batches_of(tokenizer, texts, 1)), strict=True):
        generated = model.generate(row.unsqueeze(0), **options)[0]
        assert text == tokenizer.decode(generated, skip_special_tokens=True)
    assert generate_texts(model, tokenizer, []) == []


def test_labels_are_not_shown_to_the_model(tokenizer):
    seen = []

    def generate(**given):
        seen.append(given)
        return torch.tensor([[1, 5, 6, 2, 0]])

    stub = SimpleNamespace(generate=generate, device=torch.device("cpu"))
    batch = {"input_ids": torch.tensor([[5]]), "labels": torch.tensor([[6]]), "attention_mask": torch.tensor([[1]])}
    (text,) = generate_texts(stub, tokenizer, [batch], num_beams=3)
    assert text == "".join(tokenizer.convert_ids_to_tokens([5, 6]))
    (given,) = seen
    assert given.keys() == {"input_ids", "attention_mask", "num_beams"}
    assert "labels" in batch


def test_options_reach_generation(model, tokenizer):
    batches = batches_of(tokenizer, ["stone", "water fish"], 2)
    shorter, longer = (generate_texts(model, tokenizer, batches, max_new_tokens=number) for number in (4, 7))
    assert (max(map(len, shorter)), max(map(len, longer))) == (4, 7)
    assert all(long.startswith(short) for long, short in zip(longer, shorter, strict=True))


def test_figures_of_texts():
    predictions, references = ["one two three four five", "six", "seven"], ["one two three four six", "six", "eight"]
    assert text_figures(predictions, references) == {
        "exact_match": 1 / 3,
        "chrf": corpus_chrf(predictions, [references]).score,
        "bleu": corpus_bleu(predictions, [references], force=True).score,
    }
    assert text_figures(references, references) == pytest.approx({"exact_match": 1, "chrf": 100, "bleu": 100})


def test_exact_match_of_each_key():
    predictions, references = ["a", "b", "c", "d", "e", "f"], ["a", "x", "c", "x", "x", "f"]
    assert exact_match_by([20, 0, 20, 0, 3, 20], predictions, references) == [
        {"key": 0, "number": 2, "exact_match": 0.0},
        {"key": 3, "number": 1, "exact_match": 0.0},
        {"key": 20, "number": 3, "exact_match": 1.0},
    ]
    with pytest.raises(ValueError, match="shorter"):
        exact_match_by([1, 2], ["a"], ["a"])


# Tokenizers that the user names


@pytest.fixture
def saved(byte_tokenizer, tmp_path):
    """Saves a tokenizer with some special tokens, and names it."""

    def save(**special) -> str:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer.backend_tokenizer, **special)
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        return str(tmp_path / "tokenizer")

    return save


def test_a_tokenizer_is_loaded_with_the_models_limit(saved, byte_tokenizer):
    loaded = load_tokenizer(saved(pad_token="<pad>", eos_token="</s>"), 37, ("pad", "eos"))
    assert loaded.model_max_length == 37
    assert loaded.get_vocab() == byte_tokenizer.get_vocab()


@pytest.mark.parametrize(("special", "missing"), [({"pad_token": "<pad>"}, "eos"), ({"eos_token": "</s>"}, "pad")])
def test_a_tokenizer_without_a_special_token(saved, special, missing):
    with pytest.raises(ValueError, match=rf"`tokenizer` \(.*\) has no {missing} token, which is needed"):
        load_tokenizer(saved(**special), 37, ("pad", "eos"))


def test_a_tokenizer_of_another_library(monkeypatch):
    from regard.training.families import tokenizers

    monkeypatch.setattr(tokenizers.AutoTokenizer, "from_pretrained", lambda *args, **options: object())
    with pytest.raises(ValueError, match=r"`tokenizer` \(slow\) must have a tokenizer of the `tokenizers` library"):
        load_tokenizer("slow", 37, ())


def test_what_a_model_takes_from_its_tokenizer(saved, tokenizer):
    assert special_ids(None) == {}
    assert special_ids(tokenizer) == {
        "vocab_size": len(tokenizer),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    without = load_tokenizer(saved(pad_token="<pad>", eos_token="</s>"), 37, ())
    ids = special_ids(without)
    assert (ids["bos_token_id"], ids["decoder_start_token_id"]) == (None, without.pad_token_id)
    assert ids["eos_token_id"] == without.convert_tokens_to_ids("</s>")
