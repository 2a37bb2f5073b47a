"""Vectors of texts: those of each text alone, in their order, whatever else is encoded with it."""

import pytest
import torch
from transformers import AutoTokenizer

import regard
from regard.tokenization.wordpiece import train_wordpiece

TEXTS = ["a red cat sat", "the dog", "", "a cat and a dog and a red hat " * 9, "dog", "the dog", "naïve 😀 中国"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece(TEXTS * 4, vocab_size=60, model_max_length=24)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = regard.RegardBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=24,
        initializer_range=0.5,
    )
    return regard.RegardBertForPreTraining(config)


def pooled(model, tokenizer, text, pooling):
    with torch.no_grad():
        outputs = model.eval().bert(**tokenizer(text, truncation=True, max_length=24, return_tensors="pt"))
    hidden_states = outputs.last_hidden_state[0]
    return {"mean": hidden_states.mean(0), "first": hidden_states[0], "pooler": outputs.pooler_output[0]}[pooling]


@pytest.mark.parametrize("batch_tokens", [1, 30, 4096])
@pytest.mark.parametrize("pooling", ["mean", "first", "pooler"])
def test_each_text_has_the_vector_that_it_has_alone(model, tokenizer, pooling, batch_tokens):
    vectors = regard.encode_texts(model, tokenizer, TEXTS, pooling=pooling, batch_tokens=batch_tokens)
    expected = torch.stack([pooled(model, tokenizer, text, pooling) for text in TEXTS])
    assert not expected[0].allclose(expected[1], atol=1e-2)
    torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-5)


def test_long_texts_are_cut_where_asked(model, tokenizer):
    whole, cut = (regard.encode_texts(model, tokenizer, TEXTS[3:4], max_length=length) for length in (None, 5))
    ids = tokenizer(TEXTS[3], truncation=True, max_length=5)["input_ids"]
    assert len(ids) == 5
    with torch.no_grad():
        expected = model.bert(torch.tensor([ids])).last_hidden_state[0].mean(0)
    torch.testing.assert_close(cut[0], expected, atol=1e-5, rtol=1e-5)
    assert not whole.allclose(cut, atol=1e-3)


def test_the_model_keeps_its_mode(model, tokenizer):
    model.train()
    model.bert.pooler.eval()
    before = [module.training for module in model.modules()]
    regard.encode_texts(model, tokenizer, TEXTS[:2])
    assert [module.training for module in model.modules()] == before
    model.eval()


def test_no_texts(model, tokenizer):
    assert regard.encode_texts(model, tokenizer, []).shape == (0, 24)


def test_the_model_is_evaluated_without_gradients(model, tokenizer):
    model.train()
    first, second = (regard.encode_texts(model, tokenizer, TEXTS) for _ in range(2))
    assert first.equal(second)
    assert not first.requires_grad


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"pooling": "max"}, r"`pooling` \('max'\) must be one of mean, first, pooler"),
        ({"max_length": 2}, r"`max_length` \(2\) must be more than 2 and at most 24"),
        ({"max_length": 25}, r"`max_length` \(25\) must be more than 2 and at most 24"),
        ({"batch_tokens": 0}, r"`batch_tokens` \(0\) must be at least 1"),
        ({"texts": "a text"}, "`texts` is a single text"),
        ({"texts": ["a", None]}, "`texts` holds a NoneType at place 1"),
    ],
)
def test_what_is_refused(model, tokenizer, change, complaint):
    with pytest.raises(ValueError, match=complaint):
        regard.encode_texts(model, tokenizer, **{"texts": TEXTS, **change})


def test_models_that_do_not_serve(model, tokenizer):
    without_pooler = regard.RegardBertForMaskedLM(model.config)
    with pytest.raises(ValueError, match="a RegardBertForMaskedLM has none: take 'mean' or 'first'"):
        regard.encode_texts(without_pooler, tokenizer, TEXTS, pooling="pooler")
    assert regard.encode_texts(without_pooler, tokenizer, TEXTS).shape == (len(TEXTS), 24)
    decoder = regard.RegardDecoderModel(regard.RegardDecoderConfig(vocab_size=9, hidden_size=8, num_attention_heads=2))
    with pytest.raises(ValueError, match="`model` is a RegardDecoderModel: it must be a BERT"):
        regard.encode_texts(decoder, tokenizer, TEXTS)


def test_the_tokenizer_of_a_folder(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = regard.RegardBertModel.from_pretrained(tmp_path)
    vectors = regard.encode_texts(loaded, AutoTokenizer.from_pretrained(tmp_path), TEXTS)
    torch.testing.assert_close(vectors, regard.encode_texts(model, tokenizer, TEXTS))
