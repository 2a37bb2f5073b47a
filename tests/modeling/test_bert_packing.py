"""BERT on packed batches: the same losses, gradients and outputs as on padded ones, for a part of the work."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import DataCollatorWithFlattening

from regard import (
    RegardBertForMaskedLM,
    RegardBertForNextSentencePrediction,
    RegardBertForPreTraining,
    RegardBertForSequenceClassification,
    RegardBertForTokenClassification,
    RegardBertModel,
)
from regard.modeling.cpu import fused_cross_entropy as vocabulary
from regard.modeling.cpu import padding
from regard.training.examples.bert import BertCollator

LENGTHS = (11, 7, 4)
PRETRAINED = {"masked": RegardBertForMaskedLM, "pretraining": RegardBertForPreTraining}
pretrained = pytest.mark.parametrize("our_class", PRETRAINED.values(), ids=PRETRAINED)
every_kernel = pytest.mark.parametrize("kernel", ["eager", "sdpa"])


def packed_from(padded: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | int]:
    """What the collator of pretraining makes of the rows of a padded batch."""
    examples = []
    for row, mask in enumerate(padded["attention_mask"].bool()):
        names = ("input_ids", "token_type_ids", "labels")
        example = {name: padded[name][row][mask].numpy().astype(np.int64) for name in names}
        if "next_sentence_label" in padded:
            example["next_sentence_label"] = int(padded["next_sentence_label"][row])
        examples.append(example)
    return BertCollator(next_sentence="next_sentence_label" in padded)(examples)


def loss_and_gradients(model, batch) -> list[torch.Tensor]:
    outputs = model(**batch)
    return [outputs.loss.detach(), *torch.autograd.grad(outputs.loss, list(model.parameters()))]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@pytest.fixture
def padded(make_inputs):
    """A padded batch with labels: the rows of `conftest`, and whatever is to be predicted in them."""

    def make(our_class, rows: list[list[int]] | None = None) -> dict[str, torch.Tensor]:
        inputs = make_inputs(our_class, labels=True)
        if rows is not None:
            inputs["labels"].fill_(-100)
            for row, places in enumerate(rows):
                inputs["labels"][row, places] = torch.randint(0, 40, (len(places),))
        return inputs

    return make


@pytest.fixture
def in_training(make_model):
    """A model in training, without dropout."""
    return lambda our_class, kernel="sdpa", **fields: make_model(our_class, kernel, dropout=0.0, **fields).train()


PREDICTED = {
    "unequally many": None,
    "none in a row": [[2, 3], [], [1]],
    "first and last tokens": [[0, 10], [0, 3, 6], [0]],
    "every token": [list(range(length)) for length in LENGTHS],
}


@pretrained
@every_kernel
@pytest.mark.parametrize("predicted", PREDICTED)
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "not tied"])
def test_packed_padded_and_plain_are_one_loss(our_class, kernel, predicted, tie, in_training, padded):
    model = in_training(our_class, kernel, tie_word_embeddings=tie)
    batch = padded(our_class, PREDICTED[predicted])
    plain = loss_and_gradients(model, batch)
    assert_same(loss_and_gradients(model, batch | {"predicted_only": True}), plain)
    packed = packed_from(batch)
    assert "attention_mask" not in packed
    assert_same(loss_and_gradients(model, packed), plain)
    # The positions may be given, looked for, or not used.
    places = packed.pop("predicted_positions")
    assert_same(loss_and_gradients(model, packed | {"predicted_only": True}), plain)
    assert_same(loss_and_gradients(model, packed), plain)
    shuffled = places[torch.randperm(len(places))]
    assert_same(loss_and_gradients(model, packed | {"predicted_positions": shuffled}), plain)


@pretrained
@pytest.mark.parametrize("lengths", [(5, 5, 5), (1, 1, 1), (1, 8, 8)], ids=str)
def test_rows_of_any_lengths(our_class, lengths, in_training, padded):
    model, batch = in_training(our_class), padded(our_class, [[0], [0], [0]])
    longest = max(lengths)
    batch = {name: value[:, :longest] if value.dim() == 2 else value for name, value in batch.items()}
    real = torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)
    batch |= {"attention_mask": real.long(), "input_ids": torch.randint(5, 40, real.shape)}
    plain = loss_and_gradients(model, batch)
    assert_same(loss_and_gradients(model, batch | {"predicted_only": True}), plain)
    assert_same(loss_and_gradients(model, packed_from(batch)), plain)


@pretrained
def test_no_padding(our_class, in_training, padded):
    model, batch = in_training(our_class), padded(our_class)
    del batch["attention_mask"]
    assert_same(*(loss_and_gradients(model, batch | {"predicted_only": only}) for only in (True, False)))


def test_padding_on_the_left(in_training, make_model, padded):
    """Tokens keep their positions; and what is pooled is a sequence's first token, where plain it is padding."""
    model, batch = in_training(RegardBertForMaskedLM), padded(RegardBertForMaskedLM)
    flipped = {name: value.flip(1) for name, value in batch.items()}
    assert_same(*(loss_and_gradients(model, flipped | {"predicted_only": only}) for only in (True, False)))
    pairs, pooled = make_model(RegardBertForPreTraining), []
    for row, length in enumerate(LENGTHS):
        ids, segments = (flipped[name][row : row + 1, -length:] for name in ("input_ids", "token_type_ids"))
        alone = pairs(ids, token_type_ids=segments, position_ids=torch.arange(LENGTHS[0])[None, -length:])
        pooled.append(alone.seq_relationship_logits)
    outputs = pairs(**flipped, predicted_only=True)
    torch.testing.assert_close(outputs.seq_relationship_logits, torch.cat(pooled), atol=1e-5, rtol=1e-5)


@pretrained
@every_kernel
def test_outputs_in_evaluation_are_the_same(our_class, kernel, make_model, padded):
    model, batch = make_model(our_class, kernel), padded(our_class)
    plain, chosen = model(**batch), batch["labels"] != -100
    packed = packed_from(batch)
    for outputs in (model(**batch, predicted_only=True), model(**packed)):
        torch.testing.assert_close(outputs.loss, plain.loss)
        torch.testing.assert_close(outputs[1], plain[1][chosen], atol=1e-5, rtol=1e-5)
        if our_class is RegardBertForPreTraining:
            torch.testing.assert_close(outputs.seq_relationship_logits, plain.seq_relationship_logits)
    # In the order in which they are asked for.
    backwards = model(**packed | {"predicted_positions": packed["predicted_positions"].flip(0)})
    torch.testing.assert_close(backwards[1], plain[1][chosen].flip(0), atol=1e-5, rtol=1e-5)
    del packed["predicted_positions"]
    whole = model(**packed)
    torch.testing.assert_close(whole[1][0], plain[1][batch["attention_mask"].bool()], atol=1e-5, rtol=1e-5)


def test_the_last_layer_computes_nothing_else(make_model, padded, monkeypatch):
    monkeypatch.setattr(padding, "TOKEN_MULTIPLE", 1)
    model, batch = make_model(RegardBertForPreTraining), padded(RegardBertForPreTraining)
    sizes = {}
    for number, block in enumerate(model.bert.encoder.blocks):
        for name in ("self_attention.output", "feed_forward"):
            block.get_submodule(name).register_forward_hook(
                lambda module, args, output, key=(number, name): sizes.setdefault(key, []).append(output.shape[1])
            )
    predicted = int((batch["labels"] != -100).sum())
    model(**packed_from(batch))
    model(**batch, predicted_only=True)
    last = predicted + len(LENGTHS)
    assert sizes == {
        (0, "self_attention.output"): [sum(LENGTHS)] * 2,
        (0, "feed_forward"): [sum(LENGTHS)] * 2,
        (1, "self_attention.output"): [last] * 2,
        (1, "feed_forward"): [last] * 2,
    }


@pretrained
def test_in_training_no_score_is_kept(our_class, in_training, padded):
    model, batch, kept = in_training(our_class), padded(our_class), []
    predicted = int((batch["labels"] != -100).sum())
    for given in (packed_from(batch), batch | {"predicted_only": True}):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.shape) or each, lambda each: each):
            outputs = model(**given)
        assert outputs.loss.requires_grad
        assert not {"logits", "prediction_logits"} & outputs.keys()
        assert (40, 15) in kept
        assert not {(predicted, 40), (-(-predicted // 32) * 32, 40)} & set(kept)


@pytest.mark.parametrize("tokens", [1, 7, 64])
@pretrained
def test_rows_that_are_filled_up_change_nothing(our_class, tokens, in_training, padded, monkeypatch):
    model, batch = in_training(our_class), packed_from(padded(our_class))
    rows = []
    model.bert.encoder.blocks[0].feed_forward.register_forward_hook(
        lambda module, args, output: rows.append(output.shape[1])
    )

    def run(each: int):
        monkeypatch.setattr(padding, "TOKEN_MULTIPLE", each)
        monkeypatch.setattr(vocabulary, "POSITION_MULTIPLE", each)
        loss = model(**batch).loss
        named = dict(model.named_parameters())
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        encoded = model.bert(**{name: batch[name] for name in ("input_ids", "token_type_ids", "cu_seq_lens_q")})
        return loss, dict(zip(named, gradients, strict=True)), encoded.last_hidden_state, encoded.pooler_output

    expected, found = run(1), run(tokens)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert rows == [sum(LENGTHS)] * 2 + [-(-sum(LENGTHS) // tokens) * tokens] * 2
    if our_class is RegardBertForPreTraining:
        # Those that are shown are the tokens' alone.
        shown = model(**batch, output_hidden_states=True).hidden_states
        assert {len(states[0]) for states in shown[:-1]} == {sum(LENGTHS)}


@pretrained
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_nothing_to_predict(our_class, kind, in_training, padded):
    """The loss of masked tokens is zero with gradients, not NaN; that of next sentences is as it was."""
    model, batch = in_training(our_class), padded(our_class, [[], [], []])
    given = packed_from(batch) if kind == "packed" else batch | {"predicted_only": True}
    for counts in ({}, {"num_items_in_batch": torch.tensor(0)}):
        loss, *gradients = loss_and_gradients(model, given | counts)
        assert all(gradient.isfinite().all() for gradient in gradients)
        if our_class is RegardBertForMaskedLM or counts:
            assert loss == 0
            assert all((gradient == 0).all() for gradient in gradients)
        else:
            logits = model(**batch).seq_relationship_logits
            torch.testing.assert_close(loss, F.cross_entropy(logits, batch["next_sentence_label"]))
            assert any((gradient != 0).any() for gradient in gradients)


COUNTS = {
    "both": {"num_items_in_batch": 13, "num_sequences_in_batch": 5},
    "as `Trainer`": {"num_items_in_batch": 13},
    "tensors": {"num_items_in_batch": torch.tensor(13), "num_sequences_in_batch": torch.tensor(5)},
}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pretrained
def test_as_part_of_a_larger_batch(our_class, counts, in_training, padded):
    model, batch = in_training(our_class), padded(our_class)
    if our_class is RegardBertForMaskedLM:
        counts = {"num_items_in_batch": counts["num_items_in_batch"]}
    plain = loss_and_gradients(model, batch | counts)
    assert not torch.isclose(plain[0], model(**batch).loss.detach())
    assert_same(loss_and_gradients(model, batch | counts | {"predicted_only": True}), plain)
    assert_same(loss_and_gradients(model, packed_from(batch) | counts), plain)


@pretrained
def test_embeddings_instead_of_ids(our_class, in_training, padded):
    model, batch = in_training(our_class), padded(our_class)
    packed, mask = packed_from(batch), batch["attention_mask"].bool()
    embeddings = torch.randn(3, LENGTHS[0], 15)
    del batch["input_ids"], packed["input_ids"]
    results = []
    for given, values in (
        (batch, embeddings),
        (batch | {"predicted_only": True}, embeddings),
        (packed, embeddings[mask].unsqueeze(0)),
    ):
        values = values.clone().requires_grad_()
        loss = model(**given, inputs_embeds=values).loss
        (gradient,) = torch.autograd.grad(loss, values)
        results.append((loss.detach(), gradient if gradient.shape[0] == 1 else gradient[mask].unsqueeze(0)))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=2e-6, rtol=1e-5)


@pretrained
@pytest.mark.parametrize("rows", [1, 3])
def test_positions_that_are_given(our_class, rows, in_training, padded):
    model, batch = in_training(our_class), padded(our_class)
    counted = loss_and_gradients(model, batch)
    positions = torch.stack([torch.randperm(12)[: LENGTHS[0]] for _ in range(rows)])
    plain = loss_and_gradients(model, batch | {"position_ids": positions})
    assert not torch.isclose(plain[0], counted[0])
    assert_same(loss_and_gradients(model, batch | {"position_ids": positions, "predicted_only": True}), plain)
    packed_positions = positions.expand(3, -1)[batch["attention_mask"].bool()].unsqueeze(0)
    assert_same(loss_and_gradients(model, packed_from(batch) | {"position_ids": packed_positions}), plain)


@pretrained
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(our_class, reentrant, make_model, padded):
    """With dropout, whose masks must come again."""
    model, batch = make_model(our_class, dropout=0.3).train(), packed_from(padded(our_class))
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(5)
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert_same(*results)
    torch.manual_seed(6)
    assert not torch.isclose(model(**batch).loss, results[0][0])


@pretrained
def test_half_precision_is_close(our_class, in_training, padded):
    model, batch = in_training(our_class), padded(our_class)
    exact = model(**batch).loss
    for given in (packed_from(batch), batch | {"predicted_only": True}):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**given).loss
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, exact, atol=0.02, rtol=0.02)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert all(gradient.isfinite().all() for gradient in gradients)


@pretrained
def test_a_layer_with_more_to_it_scores_as_it_does(our_class, in_training, padded):
    """Hooks on the output layer are run, and adapters are not passed by."""
    model, batch = in_training(our_class, tie_word_embeddings=False), padded(our_class)
    decoder = model.get_output_embeddings()
    handle = decoder.register_forward_hook(lambda module, args, output: 2 * output)
    doubled = loss_and_gradients(model, batch)
    assert_same(loss_and_gradients(model, packed_from(batch)), doubled)
    handle.remove()
    assert not torch.isclose(doubled[0], loss_and_gradients(model, batch)[0])
    if find_spec("peft") is None:
        return
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=6, target_modules=["decoder", "query_key_value"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    results = []
    for given in (batch, batch | {"predicted_only": True}, packed_from(batch)):
        adapted.zero_grad()
        loss = adapted(**given).loss
        loss.backward()
        trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        assert len(trained) == 2 * 3
        results.append([loss.detach(), *(parameter.grad for parameter in trained)])
    for result in results[1:]:
        assert_same(result, results[0])


# The encoder, and classes on it, on what `transformers` packs


@pytest.fixture
def texts() -> list[list[int]]:
    return [torch.randint(5, 40, (length,)).tolist() for length in (4, 9, 9, 1, 12)]


@pytest.fixture
def flattened(texts):
    """What transformers makes of them; it adds labels of its own."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": text} for text in texts])
    del batch["labels"]
    return batch


@every_kernel
def test_the_encoder_on_what_transformers_packs(kernel, texts, flattened, make_model):
    model = make_model(RegardBertModel, kernel)
    expected = [model(torch.tensor([text])) for text in texts]
    outputs = model(**flattened, output_hidden_states=True)
    states = torch.cat([each.last_hidden_state for each in expected], dim=1)
    pooled = torch.cat([each.pooler_output for each in expected])
    torch.testing.assert_close(outputs.last_hidden_state, states, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs.pooler_output, pooled, atol=1e-5, rtol=1e-5)
    assert [each.shape for each in outputs.hidden_states] == [(1, 35, 15)] * 3
    # Where each sequence ends says all the rest.
    ends = {"cu_seq_lens_q": flattened["cu_seq_lens_q"]}
    alone = model(flattened["input_ids"], **ends)
    torch.testing.assert_close(alone.last_hidden_state, states, atol=1e-5, rtol=1e-5)
    # Positions in any order.
    places = torch.tensor([33, 0, 5, 13, 13])
    some = model(flattened["input_ids"], output_positions=places, **ends)
    torch.testing.assert_close(some.last_hidden_state, states[:, places], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(some.pooler_output, pooled, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("our_class", [RegardBertForSequenceClassification, RegardBertForNextSentencePrediction])
def test_one_row_of_classes_for_each_packed_sequence(our_class, texts, flattened, make_model):
    model, labels = make_model(our_class), torch.tensor([0, 1, 1, 0, 1])
    expected = torch.cat([model(torch.tensor([text])).logits for text in texts])
    outputs = model(**flattened, labels=labels)
    assert len(outputs.logits) == len(texts)
    torch.testing.assert_close(outputs.logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs.loss, F.cross_entropy(expected, labels))


def test_classes_of_packed_tokens(texts, flattened, make_model):
    model = make_model(RegardBertForTokenClassification)
    expected = torch.cat([model(torch.tensor([text])).logits for text in texts], dim=1)
    torch.testing.assert_close(model(**flattened).logits, expected, atol=1e-5, rtol=1e-5)


# What is refused


@pretrained
def test_what_packing_can_not_do(our_class, make_model, padded):
    model, batch = make_model(our_class).train(), padded(our_class)
    packed, only = packed_from(batch), {"predicted_only": True}
    without = {name: value for name, value in packed.items() if name != "predicted_positions"}
    square = torch.ones(3, 1, LENGTHS[0], LENGTHS[0], dtype=torch.bool)
    blank = batch["attention_mask"].clone()
    blank[1] = 0
    unlabelled = {name: value for name, value in batch.items() if name != "labels"}
    refused = [
        (batch | only | {"attention_mask": square}, r"`attention_mask` of shape \(3, 1, 11, 11\) cannot be packed"),
        (batch | only | {"attention_mask": blank}, "row 1 is nothing but padding"),
        (unlabelled | only, "`predicted_only` needs `labels`"),
        (packed | {"labels": None}, "needs `labels`"),
        (batch | {"predicted_positions": torch.tensor([1])}, "`predicted_positions` needs a packed batch"),
        (batch | {"cu_seq_lens_q": torch.tensor([0, 11])}, r"must be a single row, got 3"),
        (packed | {"attention_mask": torch.ones_like(packed["input_ids"])}, "do not pass an `attention_mask`"),
        (without | {"attention_mask": torch.ones_like(packed["input_ids"])}, "do not pass an `attention_mask`"),
        (packed | {"output_attentions": True}, "returns no attention weights"),
        (batch | only | {"output_attentions": True}, "`predicted_only`.* returns no attention weights"),
    ]
    for given, message in refused:
        with pytest.raises(ValueError, match=message):
            model(**given)


def test_the_encoder_needs_to_know_where_sequences_end(make_model):
    with pytest.raises(ValueError, match="`output_positions` needs a packed batch, with `cu_seq_lens_q`"):
        make_model(RegardBertModel)(torch.ones(1, 7, dtype=torch.long), output_positions=torch.tensor([2]))


@pretrained
def test_lengths_are_those_of_sequences(our_class, make_model):
    """The row may be longer than the positions, a sequence may not."""
    model = make_model(our_class).train()
    ids, message = torch.full((1, 25), 7), r"has 13 tokens, 13 > 12 \(`max_position_embeddings`\)"
    given = {"input_ids": ids, "labels": ids, "predicted_positions": torch.tensor([3, 20])}
    assert model(**given, cu_seq_lens_q=torch.tensor([0, 12, 13, 25])).loss.isfinite()
    with pytest.raises(ValueError, match=message):
        model(**given, cu_seq_lens_q=torch.tensor([0, 12, 25]))
    with pytest.raises(ValueError, match=message):
        model(ids[:, :13], labels=ids[:, :13], predicted_only=True)


@pretrained
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_labels_that_are_no_class(our_class, training, kind, make_model, padded):
    model, batch = make_model(our_class).train(training), padded(our_class)
    for wrong in (40, -1):
        batch["labels"][1, 3] = wrong
        given = packed_from(batch) if kind == "packed" else batch | {"predicted_only": True}
        with pytest.raises(ValueError, match=f"`labels` contains {wrong}, but labels are 0 to 39, or -100"):
            model(**given)
