"""The decoder-only model: no token sees a later one, padding changes nothing, and it is GPT-2 by another name."""

import itertools

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoTokenizer, BertTokenizer, GPT2Config, GPT2LMHeadModel, pipeline

from regard import RegardDecoderForCausalLM, RegardDecoderModel

every_kernel = pytest.mark.parametrize("kernel", ["eager", "sdpa"])
every_kind = pytest.mark.parametrize(
    ("norm", "positions"), list(itertools.product(["pre", "post"], ["learned", "sinusoidal"]))
)
# Sinusoids need an even width.
EVEN = {"hidden_size": 18}


def left_padded(ids: torch.Tensor, padding: int) -> dict[str, torch.Tensor]:
    return {
        "input_ids": F.pad(ids, (padding, 0)),
        "attention_mask": F.pad(torch.ones_like(ids), (padding, 0)),
    }


@every_kernel
@every_kind
def test_the_future_does_not_change_the_past(kernel, norm, positions, make_model):
    model = make_model(RegardDecoderForCausalLM, kernel, norm_position=norm, position_embedding_type=positions, **EVEN)
    ids = torch.randint(5, 39, (2, 9))
    before = model(ids).logits
    for place in range(9):
        other = ids.clone()
        other[:, place:] = torch.randint(5, 39, (2, 9 - place))
        other[:, place] = (ids[:, place] - 4) % 34 + 5
        after = model(other).logits
        torch.testing.assert_close(after[:, :place], before[:, :place], atol=1e-6, rtol=0)
        assert (after[:, place:] != before[:, place:]).any(dim=-1).all()


@every_kernel
def test_the_future_has_no_gradient(kernel, make_model):
    model = make_model(RegardDecoderModel, kernel)
    embedded = torch.randn(2, 9, 21, requires_grad=True)
    for place in range(9):
        early = model(inputs_embeds=embedded).last_hidden_state[:, place].square().sum()
        (gradient,) = torch.autograd.grad(early, embedded)
        assert (gradient[:, place + 1 :] == 0).all()
        assert (gradient[:, : place + 1] != 0).any(dim=-1).all()


@every_kernel
@every_kind
def test_padding_on_the_left_changes_nothing(kernel, norm, positions, make_model):
    model = make_model(RegardDecoderForCausalLM, kernel, norm_position=norm, position_embedding_type=positions, **EVEN)
    ids = torch.randint(5, 39, (1, 7))
    alone = model(ids).logits
    batch = {name: value.expand(2, -1).clone() for name, value in left_padded(ids, 4).items()}
    batch["input_ids"][1], batch["attention_mask"][1] = torch.randint(5, 39, (11,)), 1
    torch.testing.assert_close(model(**batch).logits[:1, 4:], alone, atol=1e-5, rtol=0)
    # What stands in the padding does not matter either.
    batch["input_ids"][0, :4] = 33
    torch.testing.assert_close(model(**batch).logits[:1, 4:], alone, atol=1e-5, rtol=0)
    # Positions can be given.
    given = (batch["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    assert model(**batch, position_ids=given).logits.equal(model(**batch).logits)
    others = torch.arange(11).expand(2, -1)
    assert not torch.allclose(model(**batch, position_ids=others).logits[:1, 4:], alone, atol=1e-3)


@every_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_with_padding_on_the_left_is_finite(kernel, dtype, make_model):
    """Rows of a causal mask that see nothing: the sum of two lowest numbers would be minus infinity."""
    model = make_model(RegardDecoderForCausalLM, kernel).to(dtype)
    batch = left_padded(torch.randint(5, 39, (2, 7)), 4)
    outputs = model(**batch, labels=batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100))
    assert outputs.logits.isfinite().all()
    outputs.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.slow
def test_flexible_attention_agrees_too(make_model):
    model = make_model(RegardDecoderForCausalLM, num_attention_heads=1, hidden_size=16)
    batch = left_padded(torch.randint(5, 39, (2, 7)), 4)
    expected = model(**batch).logits[:, 4:]
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits[:, 4:], expected, atol=1e-5, rtol=0)


def test_a_sequence_longer_than_the_positions(make_model):
    model = make_model(RegardDecoderForCausalLM)
    ids = torch.randint(5, 39, (2, 14))
    assert model(ids).logits.isfinite().all()
    message = r"has 15 tokens, 15 > 14 \(`max_position_embeddings`\): truncate it, .*truncation=True, max_length=14"
    for wrong in ({"input_ids": F.pad(ids, (1, 0), value=5)}, {"inputs_embeds": torch.randn(2, 15, 21)}):
        with pytest.raises(ValueError, match=message) as error:
            model(**wrong)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="15 > 14"):
        model(ids, position_ids=torch.arange(1, 15).unsqueeze(0))
    # With those in a cache.
    begun = model(ids[:, :12], use_cache=True)
    cache = begun["cache"] if "cache" in begun else begun["past_key_values"]
    with pytest.raises(ValueError, match="15 > 14"):
        model(ids[:, :3], cache=cache)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("input_ids", 39, r"`input_ids` contains the id 39, but `vocab_size` \(39\) allows 0 to 38"),
        ("input_ids", -1, r"`input_ids` contains the id -1, but"),
        ("labels", 39, "`labels` contains 39, but labels are 0 to 38, or -100 to ignore one"),
        (
            "position_ids",
            -1,
            r"`position_ids` contains the id -1, but `max_position_embeddings` \(14\) allows 0 to 13",
        ),
    ],
)
def test_ids_outside_their_vocabulary(name, wrong, message, make_model):
    inputs = {key: torch.randint(5, 14, (2, 7)) for key in ("input_ids", "labels", "position_ids")}
    model = make_model(RegardDecoderForCausalLM)
    assert model(**inputs).loss.isfinite()
    inputs[name][1, 3] = wrong
    with pytest.raises(ValueError, match=message):
        model(**inputs)


def test_either_ids_or_embeddings(make_model):
    model, ids = make_model(RegardDecoderForCausalLM), torch.randint(5, 39, (2, 7))
    embedded = model.get_input_embeddings()(ids)
    assert model(inputs_embeds=embedded).logits.equal(model(ids).logits)
    for both_or_neither in ({}, {"input_ids": ids, "inputs_embeds": embedded}):
        with pytest.raises(ValueError, match="either `input_ids` or `inputs_embeds`, and not both"):
            model(**both_or_neither)


def test_each_token_predicts_the_next(make_model):
    model, ids = make_model(RegardDecoderForCausalLM), torch.randint(5, 39, (3, 9))
    labels = ids.clone()
    labels[0, :4] = labels[2, 7:] = -100
    outputs = model(ids, labels=labels)
    each = [
        -outputs.logits[row, place].log_softmax(dim=-1)[labels[row, place + 1]]
        for row in range(3)
        for place in range(8)
        if labels[row, place + 1] != -100
    ]
    assert len(each) == 5 + 8 + 6
    torch.testing.assert_close(outputs.loss, torch.stack(each).mean())
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=40).loss, torch.stack(each).sum() / 40)
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, outputs.loss)


def test_only_the_positions_asked_for_are_scored(make_model):
    model, ids = make_model(RegardDecoderForCausalLM), torch.randint(5, 39, (3, 9))
    logits = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, logits[:, -2:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([1, 4, 5])).logits, logits[:, [1, 4, 5]])
    assert model(ids, logits_to_keep=0).logits.equal(logits)


# Where stock GPT-2, whose linear layers hold their weights the other way round, keeps what ours has.
GPT2_NAMES = {
    "decoder.embeddings.tokens": "transformer.wte",
    "decoder.embeddings.positions": "transformer.wpe",
    "decoder.stack.norm": "transformer.ln_f",
    "self_attention.query_key_value": "attn.c_attn",
    "self_attention.output": "attn.c_proj",
    "self_attention_slot.before": "ln_1",
    "feed_forward_slot.before": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
    "decoder.stack.blocks": "transformer.h",
}


@every_kernel
def test_it_is_stock_gpt2(kernel, make_model):
    ours = make_model(RegardDecoderForCausalLM, kernel, hidden_act="gelu_new")
    config = GPT2Config(
        vocab_size=39, n_positions=14, n_embd=21, n_layer=2, n_head=3, n_inner=26, layer_norm_epsilon=1e-3
    )
    stock = GPT2LMHeadModel(config).eval()
    weights = {}
    for name, value in ours.state_dict().items():
        for mine, theirs in GPT2_NAMES.items():
            name = name.replace(mine, theirs)
        is_linear = ".c_" in name and name.endswith("weight")
        weights[name] = value.T if is_linear else value
    stock.load_state_dict(weights)
    batch = left_padded(torch.randint(5, 39, (2, 7)), 4)
    positions = (batch["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    torch.testing.assert_close(
        ours(**batch).logits[:, 4:], stock(**batch, position_ids=positions).logits[:, 4:], atol=1e-5, rtol=0
    )
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert ours.generate(**batch, **options).equal(stock.generate(**batch, **options))


def test_the_settings_compute_different_things(make_model):
    ids = torch.randint(5, 39, (2, 7))
    outputs = []
    for fields in (
        {},
        {"norm_position": "post"},
        {"position_embedding_type": "sinusoidal"},
        {"hidden_act": "relu"},
        {"num_attention_heads": 2},
        {"layer_norm_eps": 1.0},
    ):
        torch.manual_seed(5)
        outputs.append(make_model(RegardDecoderModel, **(EVEN | fields))(ids).last_hidden_state)
    assert not any(torch.allclose(a, b, atol=1e-4) for a, b in itertools.combinations(outputs, 2))


WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat dog sat ran on a mat . in tree walk red".split()


def test_the_text_generation_pipeline(make_model, tmp_path):
    model = make_model(RegardDecoderForCausalLM, vocab_size=len(WORDS), eos_token_id=None)
    model.save_pretrained(tmp_path)
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)}, padding_side="left")
    tokenizer.save_pretrained(tmp_path)
    texts = ["the cat", "the dog sat on a mat", "red"]
    generate = pipeline("text-generation", model=str(tmp_path), batch_size=3)
    assert type(generate.model) is RegardDecoderForCausalLM
    written = generate(texts, max_new_tokens=4, do_sample=False, return_full_text=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text, (answer,) in zip(texts, written, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        for _ in range(4):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(dim=-1)], dim=1)
        expected = tokenizer.decode(ids[0, -4:], skip_special_tokens=True)
        assert answer["generated_text"].strip() == expected.strip()
