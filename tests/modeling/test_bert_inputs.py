"""What BERT refuses, each before an index error and with the way out; and what it warns of."""

import logging

import pytest
import torch

from regard import (
    RegardBertConfig,
    RegardBertForMaskedLM,
    RegardBertForMultipleChoice,
    RegardBertForNextSentencePrediction,
    RegardBertForPreTraining,
    RegardBertForQuestionAnswering,
    RegardBertForSequenceClassification,
    RegardBertForTokenClassification,
    RegardBertModel,
)
from tests.support.families import FAMILIES

every_bert = pytest.mark.parametrize("bert_class", FAMILIES[RegardBertConfig].values(), ids=lambda c: c.__name__)
SEP = 3


def lengthened(inputs, length: int) -> dict[str, torch.Tensor]:
    return {name: torch.ones(*value.shape[:-1], length, dtype=torch.long) for name, value in inputs.items()}


@every_bert
def test_a_sequence_longer_than_the_positions(bert_class, make_model, make_inputs):
    model = make_model(bert_class)
    inputs = lengthened(make_inputs(bert_class), 12)
    assert model(**inputs)[0].isfinite().all()
    message = r"has 13 tokens, 13 > 12 \(`max_position_embeddings`\): truncate it, .*truncation=True, max_length=12"
    longer = lengthened(inputs, 13)
    with pytest.raises(ValueError, match=message):
        model(**longer)
    longer["inputs_embeds"] = torch.randn(*longer.pop("input_ids").shape, 15)
    with pytest.raises(ValueError, match=message):
        model(**longer)


@every_bert
@pytest.mark.parametrize(
    ("argument", "wrong", "right", "message"),
    [
        ("input_ids", 40, 39, r"`input_ids` contains the id 40, but `vocab_size` \(40\) allows 0 to 39"),
        ("input_ids", -1, 0, r"`input_ids` contains the id -1, but `vocab_size` \(40\) allows 0 to 39"),
        ("token_type_ids", 3, 2, r"`token_type_ids` contains the id 3, but `type_vocab_size` \(3\) allows 0 to 2"),
        ("token_type_ids", -7, 0, r"`token_type_ids` contains the id -7, but `type_vocab_size` \(3\) allows 0 to 2"),
        ("position_ids", 12, 11, r"13 > 12 \(`max_position_embeddings`\)"),
        (
            "position_ids",
            -1,
            0,
            r"`position_ids` contains the id -1, but `max_position_embeddings` \(12\) allows 0 to 11",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else value.split()[0],
)
def test_ids_outside_their_vocabulary(bert_class, argument, wrong, right, message, make_model, make_inputs):
    model, inputs = make_model(bert_class), make_inputs(bert_class)
    inputs["position_ids"] = torch.arange(11).expand(inputs["input_ids"].shape).clone()
    inputs[argument].view(-1)[13] = right
    assert model(**inputs)[0].isfinite().all()
    inputs[argument].view(-1)[13] = wrong
    with pytest.raises(ValueError, match=message):
        model(**inputs)


@every_bert
def test_positions_that_start_again_may_be_in_a_longer_row(bert_class, make_model, make_inputs):
    """Several texts in one row, each within the limit."""
    inputs = lengthened(make_inputs(bert_class), 20)
    positions = torch.arange(20).remainder(12).expand(inputs["input_ids"].shape)
    assert make_model(bert_class)(**inputs, position_ids=positions)[0].isfinite().all()


LABELS = [
    (RegardBertForMaskedLM, "labels", 40),
    (RegardBertForPreTraining, "labels", 40),
    (RegardBertForPreTraining, "next_sentence_label", 2),
    (RegardBertForNextSentencePrediction, "labels", 2),
    (RegardBertForSequenceClassification, "labels", 5),
    (RegardBertForTokenClassification, "labels", 5),
    (RegardBertForMultipleChoice, "labels", 4),
]


@pytest.mark.parametrize(("bert_class", "argument", "classes"), LABELS)
def test_labels_that_are_no_class(bert_class, argument, classes, make_model, make_inputs):
    model, inputs = make_model(bert_class), make_inputs(bert_class, labels=True)
    inputs[argument].view(-1)[1] = classes - 1
    assert model(**inputs).loss.isfinite()
    for wrong in (classes, -1):
        inputs[argument].view(-1)[1] = wrong
        with pytest.raises(
            ValueError, match=f"`{argument}` contains {wrong}, but labels are 0 to {classes - 1}, or -100"
        ):
            model(**inputs)


def test_an_answer_before_the_sequence(make_model, make_inputs):
    """Beyond its end an answer is not counted: long texts are cut."""
    model = make_model(RegardBertForQuestionAnswering)
    inputs = make_inputs(RegardBertForQuestionAnswering, labels=True)
    loss = model(**inputs).loss
    columns = {name: inputs[name][:, None] for name in ("start_positions", "end_positions")}
    torch.testing.assert_close(model(**(inputs | columns)).loss, loss)
    # The second row's answer lies beyond: as if that row had none.
    beyond = inputs | {name: torch.where(torch.arange(3) == 1, 11, inputs[name]) for name in columns}
    others = {name: value[[0, 2]] for name, value in inputs.items()}
    torch.testing.assert_close(model(**beyond).loss, model(**others).loss)
    for name in columns:
        with pytest.raises(ValueError, match=f"`{name}` contains -1, but labels are 0 to 10"):
            model(**(inputs | {name: torch.tensor([-1, 2, 2])}))


@every_bert
def test_either_ids_or_embeddings(bert_class, make_model, make_inputs):
    model, inputs = make_model(bert_class), make_inputs(bert_class)
    ids = inputs.pop("input_ids")
    embedded = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(**inputs, inputs_embeds=embedded)[0], model(**inputs, input_ids=ids)[0])
    for both_or_neither in ({}, {"input_ids": ids, "inputs_embeds": embedded}):
        with pytest.raises(ValueError, match="either `input_ids` or `inputs_embeds`, and not both"):
            model(**inputs, **both_or_neither)


@every_bert
def test_what_is_left_out_is_taken_as_described(bert_class, make_model, make_inputs):
    model, inputs = make_model(bert_class), make_inputs(bert_class)
    ids = inputs["input_ids"]
    explicit = {
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
        "position_ids": torch.arange(11).expand(ids.shape),
    }
    implied = model(input_ids=ids)[0]
    torch.testing.assert_close(implied, model(input_ids=ids, **explicit)[0], atol=1e-6, rtol=0)
    for name, other in (
        ("attention_mask", inputs["attention_mask"]),
        ("token_type_ids", torch.ones_like(ids)),
        ("position_ids", torch.arange(11).flip(0).expand(ids.shape)),
    ):
        assert not torch.allclose(implied, model(input_ids=ids, **(explicit | {name: other}))[0]), name


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_left_padding_with_positions_changes_nothing(kernel, make_model):
    model = make_model(RegardBertModel, kernel)
    ids = torch.randint(5, 40, (1, 7))
    alone = model(ids).last_hidden_state
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    mask = (padded != 0).long()
    output = model(padded, attention_mask=mask, position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0))
    torch.testing.assert_close(output.last_hidden_state[:, 4:], alone, atol=1e-5, rtol=0)
    counted = model(padded, attention_mask=mask).last_hidden_state[:, 4:]
    assert not torch.allclose(counted, alone, atol=1e-3)


@pytest.fixture
def warnings_of(caplog):
    """The texts that a call logs, as if none had been logged before."""

    def collect(call) -> list[str]:
        logging.Logger.warning_once.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            call()
        return [record.getMessage() for record in caplog.records]

    return collect


def test_a_pair_without_segment_ids_is_warned_of(make_model, warnings_of):
    model = make_model(RegardBertModel, sep_token_id=SEP)
    pair = torch.tensor([[2, 7, SEP, 0, 0, 0], [2, 7, SEP, 8, 9, SEP]])
    single = torch.tensor([[2, 7, SEP, 0, 0], [2, 7, 9, 9, SEP]])
    (message,) = warnings_of(lambda: model(pair))
    assert "two separators" in message
    assert "`token_type_ids`" in message
    segments = torch.tensor([[0] * 6, [0, 0, 0, 1, 1, 1]])
    assert warnings_of(lambda: model(pair, token_type_ids=segments)) == []
    assert warnings_of(lambda: model(single)) == []
    assert warnings_of(lambda: model(inputs_embeds=torch.randn(2, 5, 15))) == []
    assert warnings_of(lambda: make_model(RegardBertModel)(pair)) == []


def test_the_warning_of_pairs_comes_once(make_model, warnings_of):
    model = make_model(RegardBertForMaskedLM, sep_token_id=SEP)
    pair = torch.tensor([[2, 7, SEP, 8, 9, SEP]])
    assert len(warnings_of(lambda: [model(pair) for _ in range(3)])) == 1
