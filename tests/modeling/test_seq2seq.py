"""The encoder-decoders: what both families promise, and the Transformer next to torch's own."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from regard import (
    RegardRecurrentForConditionalGeneration,
    RegardTransformerForConditionalGeneration,
    RegardTransformerModel,
)

TRANSFORMER = RegardTransformerForConditionalGeneration
RECURRENT = RegardRecurrentForConditionalGeneration
both = pytest.mark.parametrize("our_class", [TRANSFORMER, RECURRENT], ids=lambda our_class: our_class.__name__)
every_kernel = pytest.mark.parametrize("kernel", ["eager", "sdpa"])


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(5, 40, shape)


@both
def test_the_future_does_not_change_the_past(our_class, make_model):
    model, source, target = make_model(our_class), ids(2, 5), ids(2, 8)
    before = model(source, decoder_input_ids=target).logits
    for place in range(8):
        other = target.clone()
        other[:, place:] = (target[:, place:] - 4) % 35 + 5
        after = model(source, decoder_input_ids=other).logits
        torch.testing.assert_close(after[:, :place], before[:, :place], atol=1e-6, rtol=0)
        assert (after[:, place:] != before[:, place:]).any(dim=-1).all()
    # The source may look ahead.
    other = torch.cat([source[:, :-1], (source[:, -1:] - 4) % 35 + 5], dim=1)
    assert (model(other, decoder_input_ids=target).logits != before).any(dim=-1).all()


@both
def test_the_future_has_no_gradient(our_class, make_model):
    model = make_model(our_class)
    embedded = torch.randn(2, 8, model.config.hidden_size, requires_grad=True)
    memory = torch.randn(2, 5, model.config.hidden_size, requires_grad=True)
    for place in range(8):
        logits = model(inputs_embeds=memory, decoder_inputs_embeds=embedded).logits
        gradient, of_source = torch.autograd.grad(logits[:, place].square().sum(), (embedded, memory))
        assert (gradient[:, place + 1 :] == 0).all()
        assert (gradient[:, : place + 1] != 0).any(dim=-1).all()
        assert (of_source != 0).any(dim=-1).all()


@both
@pytest.mark.parametrize("sides", [(0, 4), (4, 0), (1, 3)], ids=["right", "left", "both"])
def test_padding_of_the_source_changes_nothing(our_class, sides, make_model):
    model, target = make_model(our_class), ids(2, 6)
    one, other = ids(1, 5), ids(1, 9)
    batch = torch.cat([F.pad(one, sides), other])
    mask = torch.cat([F.pad(torch.ones_like(one), sides), torch.ones_like(other)])
    together = model(batch, mask, target).logits
    for row, alone in enumerate((one, other)):
        expected = model(alone, decoder_input_ids=target[row : row + 1]).logits
        torch.testing.assert_close(together[row : row + 1], expected, atol=1e-5, rtol=0)
    # What stands in the padding does not matter either, and has no gradient.
    filled = batch.masked_fill(mask == 0, 33)
    torch.testing.assert_close(model(filled, mask, target).logits, together, atol=1e-6, rtol=0)
    embedded = model.get_encoder().get_input_embeddings()(filled).detach().requires_grad_()
    outputs = model(inputs_embeds=embedded, attention_mask=mask, decoder_input_ids=target)
    (gradient,) = torch.autograd.grad(outputs.logits.square().sum(), embedded)
    assert (gradient[mask == 0] == 0).all()
    assert (gradient[mask == 1] != 0).any(dim=-1).all()


@both
def test_a_source_without_tokens_is_an_error(our_class, make_model):
    model, target = make_model(our_class), ids(2, 3)
    empty, padding = ids(2, 0), torch.tensor([[1, 1], [0, 0]])
    cases = (
        ({"input_ids": empty}, "^the source is empty: it must have at least one token$"),
        (
            {"input_ids": ids(2, 2), "attention_mask": padding},
            "^row 1 of the source is nothing but padding: it",
        ),
    )
    for source, message in cases:
        for call in (
            lambda source=source: model(**source, decoder_input_ids=target),
            lambda source=source: model.generate(**source, max_new_tokens=2),
            lambda source=source: model.get_encoder()(**source),
        ):
            with pytest.raises(ValueError, match=message) as error:
                call()
            assert "\n" not in str(error.value)


def test_more_tokens_than_positions(make_model):
    model = make_model(TRANSFORMER)
    assert model(ids(2, 13), decoder_input_ids=ids(2, 13)).logits.isfinite().all()
    message = r"has 14 tokens, 14 > 13 \(`max_position_embeddings`\): truncate it"
    with pytest.raises(ValueError, match=message):
        model(ids(2, 14), decoder_input_ids=ids(2, 5))
    with pytest.raises(ValueError, match=message):
        model(ids(2, 5), decoder_input_ids=ids(2, 14))
    with pytest.raises(ValueError, match=message):
        model.generate(ids(2, 14), max_new_tokens=2)


def test_a_recurrent_model_has_no_last_position(make_model):
    assert make_model(RECURRENT)(ids(1, 99), decoder_input_ids=ids(1, 77)).logits.shape == (1, 77, 43)


@both
@pytest.mark.parametrize("wrong", [-1, 99])
def test_ids_outside_the_vocabulary(our_class, wrong, make_model):
    model = make_model(our_class)
    names = {"input_ids": ids(2, 5), "decoder_input_ids": ids(2, 4), "labels": ids(2, 4)}
    assert model(**names).loss.isfinite()
    for name, values in names.items():
        values = values.clone()
        values[1, 2] = wrong
        with pytest.raises(ValueError, match=f"`{name}` contains (the id )?{wrong}, but"):
            model(**(names | {name: values}))


@both
def test_either_ids_or_embeddings(our_class, make_model):
    model, source, target = make_model(our_class), ids(2, 5), ids(2, 4)
    expected = model(source, decoder_input_ids=target).logits
    embedded = {
        "inputs_embeds": model.get_encoder().get_input_embeddings()(source),
        "decoder_inputs_embeds": model.get_decoder().get_input_embeddings()(target),
    }
    assert model(**embedded).logits.equal(expected)
    for missing in ({}, {"input_ids": source, **embedded}):
        with pytest.raises(ValueError, match="either `input_ids` or `inputs_embeds`, and not both"):
            model(**missing)
    for missing in ({"input_ids": source}, {"input_ids": source, "decoder_input_ids": target, **embedded}):
        missing.pop("inputs_embeds", None)
        with pytest.raises(ValueError, match="either `decoder_input_ids` or `decoder_inputs_embeds`, and not both"):
            model(**missing)


@both
def test_what_the_encoder_gave_can_be_given(our_class, make_model):
    model, source, target = make_model(our_class), ids(2, 5), ids(2, 4)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    expected = model(source, mask, target).logits
    encoded = model.get_encoder()(source, mask)
    for given in (encoded, encoded.to_tuple()):
        assert model(encoder_outputs=given, attention_mask=mask, decoder_input_ids=target).logits.equal(expected)
    assert not torch.allclose(model(encoder_outputs=encoded, decoder_input_ids=target).logits, expected, atol=1e-4)


@both
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_padding_need_not_be_scored(our_class, smoothing, make_model):
    model = make_model(our_class, dropout=0.0, label_smoothing=smoothing)
    source, labels = ids(3, 5), ids(3, 6)
    labels[0, 2:], labels[2, 5:] = -100, -100

    def run(**options):
        outputs = model(source, labels=labels, **options)
        named = dict(model.named_parameters())
        return outputs, dict(zip(named, torch.autograd.grad(outputs.loss, list(named.values())), strict=True))

    whole, expected = run()
    chosen, gradients = run(predicted_only=True)
    torch.testing.assert_close(chosen.logits, whole.logits[labels != -100])
    torch.testing.assert_close([chosen.loss, gradients], [whole.loss, expected], atol=1e-6, rtol=1e-4)
    part, _ = run(predicted_only=True, num_items_in_batch=40)
    torch.testing.assert_close(part.loss, whole.loss * 13 / 40)
    model.train()
    trained, gradients = run(predicted_only=True)
    # A smoothed loss needs all scores.
    assert (trained.logits is None) == (smoothing == 0)
    torch.testing.assert_close([trained.loss, gradients], [whole.loss, expected], atol=1e-6, rtol=1e-4)

    labels[:] = -100
    nothing, gradients = run(predicted_only=True)
    assert nothing.loss == 0
    assert all((each == 0).all() for each in gradients.values())
    with pytest.raises(ValueError, match="`predicted_only` needs `labels`"):
        model(source, decoder_input_ids=ids(3, 6), predicted_only=True)


@both
def test_labels_are_shifted_once(our_class, make_model):
    model, source = make_model(our_class, decoder_start_token_id=4), ids(1, 5)
    labels = torch.tensor([[7, 8, 2, -100]])
    shifted = torch.tensor([[4, 7, 8, 2]])
    assert model.prepare_decoder_input_ids_from_labels(labels).equal(shifted)
    outputs = model(source, labels=labels)
    assert outputs.logits.equal(model(source, decoder_input_ids=shifted).logits)
    # The end token counts; what is ignored does not.
    each = -outputs.logits[0, :3].log_softmax(dim=-1)[range(3), [7, 8, 2]]
    torch.testing.assert_close(outputs.loss, each.mean())
    torch.testing.assert_close(model(source, labels=labels, num_items_in_batch=11).loss, each.sum() / 11)
    assert model.prepare_decoder_input_ids_from_labels(torch.tensor([[7, -100, -100]])).tolist() == [[4, 7, 0]]
    without = make_model(our_class, pad_token_id=None)
    with pytest.raises(ValueError, match="`labels` contains -100, which needs a `pad_token_id`"):
        without(source, labels=torch.tensor([[7, -100, -100]]))


@both
def test_label_smoothing_spreads_over_the_vocabulary(our_class, make_model):
    """(1 - s) of the loss, and s of its mean over all words."""
    model, source, labels = make_model(our_class, label_smoothing=0.3), ids(2, 5), ids(2, 4)
    labels[0, 2:] = -100
    outputs = model(source, labels=labels)
    log_probabilities = outputs.logits.log_softmax(dim=-1)[labels != -100]
    hard = -log_probabilities[range(6), labels[labels != -100]]
    expected = (0.7 * hard + 0.3 * -log_probabilities.mean(dim=-1)).mean()
    torch.testing.assert_close(outputs.loss, expected)
    model.config.label_smoothing = 0.0
    torch.testing.assert_close(model(source, labels=labels).loss, hard.mean())


@every_kernel
def test_without_positions_the_order_of_the_source_does_not_matter(kernel, make_model):
    """The encoder permutes its states with the tokens, and the decoder sees no difference."""
    model = make_model(TRANSFORMER, kernel)
    encoder, source, target = model.get_encoder(), ids(2, 7), ids(2, 4)
    order = torch.randperm(7)
    assert not torch.allclose(encoder(source[:, order])[0], encoder(source)[0][:, order], atol=1e-3)
    encoder.embeddings.positions.table.zero_()
    torch.testing.assert_close(encoder(source[:, order])[0], encoder(source)[0][:, order], atol=1e-5, rtol=0)
    logits = [model(tokens, decoder_input_ids=target).logits for tokens in (source, source[:, order])]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=0)


def torch_layers(model, kind: type, blocks, norm_position: str) -> nn.ModuleList:
    """torch's own layers with the weights of our blocks."""
    config = model.config
    layers = nn.ModuleList()
    for block in blocks:
        layer = kind(
            config.hidden_size,
            config.num_attention_heads,
            config.intermediate_size,
            batch_first=True,
            norm_first=norm_position == "pre",
            layer_norm_eps=config.layer_norm_eps,
        )
        attention = [(layer.self_attn, block.self_attention.query_key_value, block.self_attention.output)]
        slots = [block.self_attention_slot, block.feed_forward_slot]
        pairs = [(layer.linear1, block.feed_forward.up), (layer.linear2, block.feed_forward.down)]
        if kind is nn.TransformerDecoderLayer:
            slots.insert(1, block.cross_attention_slot)
            joint = nn.Linear(config.hidden_size, 3 * config.hidden_size)
            cross = block.cross_attention
            joint.weight = nn.Parameter(torch.cat([cross.query.weight, cross.key_value.weight]))
            joint.bias = nn.Parameter(torch.cat([cross.query.bias, cross.key_value.bias]))
            attention.append((layer.multihead_attn, joint, cross.output))
        for theirs, joint, output in attention:
            theirs.in_proj_weight, theirs.in_proj_bias = joint.weight, joint.bias
            pairs.append((theirs.out_proj, output))
        for number, slot in enumerate(slots, 1):
            pairs.append((getattr(layer, f"norm{number}"), slot.before if norm_position == "pre" else slot.after))
        for theirs, mine in pairs:
            theirs.load_state_dict(mine.state_dict())
        layers.append(layer.eval())
    return layers


@every_kernel
@pytest.mark.parametrize(
    ("norm", "scaled", "positions"),
    [("post", True, "sinusoidal"), ("pre", False, "sinusoidal"), ("pre", True, "learned")],
)
def test_it_is_the_transformer_of_torch(kernel, norm, scaled, positions, make_model):
    fields = {"norm_position": norm, "scale_embedding": scaled, "position_embedding_type": positions}
    model = make_model(RegardTransformerModel, kernel, **fields)
    source, target = ids(2, 7), ids(2, 5)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])

    def embed(part, tokens: torch.Tensor) -> torch.Tensor:
        embeddings = part.embeddings
        table = embeddings.positions.weight if positions == "learned" else embeddings.positions.table
        return embeddings.tokens(tokens) * (18**0.5 if scaled else 1.0) + table[: tokens.shape[1]]

    memory = embed(model.encoder, source)
    for layer in torch_layers(model, nn.TransformerEncoderLayer, model.encoder.stack.blocks, norm):
        memory = layer(memory, src_key_padding_mask=mask == 0)
    memory = model.encoder.stack.norm(memory)
    hidden = embed(model.decoder, target)
    future = torch.ones(5, 5).triu(1).bool()
    for layer in torch_layers(model, nn.TransformerDecoderLayer, model.decoder.stack.blocks, norm):
        hidden = layer(hidden, memory, tgt_mask=future, memory_key_padding_mask=mask == 0)
    hidden = model.decoder.stack.norm(hidden)
    outputs = model(source, mask, target)
    torch.testing.assert_close(outputs.encoder_last_hidden_state[mask == 1], memory[mask == 1], atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs.last_hidden_state, hidden, atol=1e-5, rtol=0)


def test_the_settings_compute_different_things(make_model):
    source, target, outputs = ids(2, 7), ids(2, 5), []
    for fields in (
        {},
        {"norm_position": "pre"},
        {"position_embedding_type": "learned"},
        {"scale_embedding": False},
        {"hidden_act": "gelu"},
        {"num_decoder_layers": 2},
        {"tie_word_embeddings": False},
    ):
        torch.manual_seed(5)
        outputs.append(make_model(TRANSFORMER, **fields)(source, decoder_input_ids=target).logits)
    assert not any(torch.allclose(a, b, atol=1e-4) for a, b in itertools.combinations(outputs, 2))


# Five symbols after the special tokens.
COPYING = {"vocab_size": 10, "hidden_size": 32, "num_hidden_layers": 1, "hidden_dropout_prob": 0.0}
LEARNERS = {
    TRANSFORMER: {
        "num_decoder_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "attention_probs_dropout_prob": 0.0,
        "norm_position": "pre",
    },
    RECURRENT: {"encoder_hidden_size": 16},
}


@both
def test_it_learns_to_copy(our_class):
    config = our_class.config_class(**COPYING, **LEARNERS[our_class], initializer_range=0.1)
    model = our_class(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(5, 10, (32, 4)), torch.full((32, 1), config.eos_token_id)

    model.train()
    for _ in range(150):
        words, end = batch()
        optimizer.zero_grad()
        model(torch.cat([words, end], dim=1), labels=torch.cat([words, end], dim=1)).loss.backward()
        optimizer.step()
    model.eval()
    words, end = batch()
    written = model.generate(torch.cat([words, end], dim=1), max_new_tokens=5, do_sample=False)
    assert (written[:, 1:5] == words).float().mean() > 0.95
    assert (written[:, 5] == config.eos_token_id).float().mean() > 0.95


@both
def test_the_trainer_predicts_with_generate(our_class, make_model, tmp_path):
    model = make_model(our_class)
    lengths = (3, 5, 2, 4, 1)
    rows = [{"input_ids": ids(length).tolist(), "labels": [*ids(length + 1).tolist(), 2]} for length in lengths]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz0123456789"]
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(vocabulary)})
    arguments = Seq2SeqTrainingArguments(
        output_dir=tmp_path,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_steps=2,
        predict_with_generate=True,
        generation_max_length=6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    seen = []

    def compute_metrics(prediction) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {"rows": len(prediction.predictions)}

    trainer = Seq2SeqTrainer(
        model,
        arguments,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_rows"] == 5
    assert metrics["eval_loss"] > 0
    model.eval()
    for row, written in zip(rows, seen[0], strict=True):
        expected = model.generate(torch.tensor([row["input_ids"]]), max_length=6)[0].tolist()
        assert [token for token in written.tolist() if token >= 0][: len(expected)] == expected
