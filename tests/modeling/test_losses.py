"""Losses: parts add up to the whole, alone and in `Trainer`; only what has a label counts."""

import gc

import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from regard import RegardBertForMaskedLM, RegardBertForPreTraining, RegardBertForSequenceClassification

predicts_tokens = pytest.mark.parametrize("our_class", [RegardBertForMaskedLM, RegardBertForPreTraining])


def gradients(model, loss) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [each for each in model.parameters() if each.requires_grad]))


@pytest.fixture
def eight_rows(head_class, make_inputs):
    """Rows whose numbers of labels differ; where tokens have labels, one row has none."""
    batches = [make_inputs(head_class, labels=True) for _ in range(3)]
    rows = {name: torch.cat([batch[name] for batch in batches])[:8] for name in batches[0]}
    if "labels" in rows and rows["labels"].dim() == 2:
        rows["labels"][7] = -100
        assert len((rows["labels"] != -100).sum(dim=1).unique()) == 4
    return rows


@pytest.fixture
def frozen_heap():
    """`Trainer` collects garbage again and again, which takes long when all that was imported is looked through."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def no_dropout(make_model, head_class):
    # A backbone normalises over the batch, of which a part is not the whole.
    frozen = {"freeze_backbone": True} if head_class.config_class.knows("freeze_backbone") else {}
    return make_model(head_class, dropout=0.0, **frozen)


def expected_loss(model, rows):
    """The loss of the whole batch, as the class describes it."""
    if not isinstance(model, RegardBertForPreTraining):
        return model(**rows).loss
    outputs = model(**{name: value for name, value in rows.items() if name not in ("labels", "next_sentence_label")})
    counts = (rows["labels"] != -100).sum(dim=1)
    masked = F.cross_entropy(outputs.prediction_logits.flatten(0, 1), rows["labels"].flatten())
    each = F.cross_entropy(outputs.seq_relationship_logits, rows["next_sentence_label"], reduction="none")
    return masked + (each * counts).sum() / counts.sum()


@pytest.mark.usefixtures("frozen_heap")
def test_trainer_accumulates_to_the_same_update(head_class, make_model, eight_rows, tmp_path):
    """One step of 8 rows, and 8 accumulated steps of one row: the same update, the same logged loss."""
    dataset = [{name: value[row] for name, value in eight_rows.items()} for row in range(8)]
    model = no_dropout(make_model, head_class)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    loss = expected_loss(model.train(), eight_rows)
    expected = [-0.1 * gradient for gradient in gradients(model, loss)]
    assert max(update.abs().max() for update in expected) > 1e-3
    for batch_size, steps in ((8, 1), (1, 8)):
        model.load_state_dict(start, strict=False)
        arguments = TrainingArguments(
            output_dir=tmp_path,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=steps,
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
        trainer = Trainer(model, arguments, train_dataset=dataset, eval_dataset=dataset)
        trainer.train()
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        updates = [parameter.detach() - start[name] for name, parameter in trained]
        torch.testing.assert_close(updates, expected, atol=1e-6, rtol=0)
        logged = trainer.state.log_history[0]["loss"]
        assert abs(logged - loss.item()) < 1e-4

    evaluated = trainer.evaluate()["eval_loss"]
    model.eval()
    assert abs(evaluated - expected_loss(model, eight_rows).item()) < 1e-4


@pytest.mark.parametrize("as_tensor", [True, False], ids=["tensor", "int"])
def test_parts_of_a_batch_add_up_to_the_whole(head_class, as_tensor, make_model, eight_rows):
    model = no_dropout(make_model, head_class)
    if "labels" not in eight_rows:
        # Two labels a row, of which `Trainer` counts neither: it averages the parts itself.
        assert model(**eight_rows, num_items_in_batch=99).loss == model(**eight_rows).loss
        return
    # The first token of a text is not predicted.
    first = 1 if head_class.__name__.endswith("CausalLM") else 0
    items = (eight_rows["labels"][..., first:] != -100).sum()
    counts = {"num_items_in_batch": items if as_tensor else int(items)}
    if "next_sentence_label" in eight_rows:
        counts["num_sequences_in_batch"] = torch.tensor(8) if as_tensor else 8
    whole = model(**eight_rows).loss
    parts = []
    for part in (slice(0, 1), slice(1, 3), slice(3, 7), slice(7, 8)):
        rows = {name: value[part] for name, value in eight_rows.items()}
        parts.append(model(**rows, **counts).loss)
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(gradients(model, sum(parts)), gradients(model, whole), atol=1e-6, rtol=1e-5)


def test_with_nothing_to_predict_the_loss_is_zero(head_class, make_model, make_inputs):
    """Zero with gradients of zero, not NaN."""
    model, inputs = make_model(head_class), make_inputs(head_class, labels=True)
    for name in inputs.keys() & {"labels", "next_sentence_label"}:
        inputs[name].fill_(-100)
    for name in inputs.keys() & {"start_positions", "end_positions"}:
        inputs[name].fill_(99)
    loss = model(**inputs).loss
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients(model, loss))
    assert model(**inputs, num_items_in_batch=torch.tensor(0)).loss == 0


def test_losses_are_summed_in_float32(head_class, make_model, make_inputs):
    model, inputs = make_model(head_class).to(torch.bfloat16), make_inputs(head_class, labels=True)
    assert model(**inputs).loss.dtype == torch.float32


@predicts_tokens
@pytest.mark.parametrize("items", [None, 13])
def test_scoring_only_what_is_predicted_changes_nothing(our_class, items, make_model, make_inputs):
    model, inputs = make_model(our_class), make_inputs(our_class, labels=True)
    scored = []
    model.masked_lm_head.register_forward_hook(lambda module, args, output: scored.append(args[0].shape))
    full, sparse = (model(**inputs, num_items_in_batch=items, predicted_only=only) for only in (False, True))
    chosen = inputs["labels"] != -100
    assert scored == [(3, 11, 15), (int(chosen.sum()), 15)]
    torch.testing.assert_close(sparse[1], full[1][chosen])
    torch.testing.assert_close(sparse.loss, full.loss)
    torch.testing.assert_close(gradients(model, sparse.loss), gradients(model, full.loss), atol=1e-6, rtol=1e-5)


@predicts_tokens
def test_scoring_only_what_is_predicted_when_that_is_nothing(our_class, make_model, make_inputs):
    model, inputs = make_model(our_class), make_inputs(our_class)
    outputs = model(**inputs, labels=torch.full((3, 11), -100), predicted_only=True)
    assert outputs[1].shape == (0, 40)
    assert outputs.loss == 0
    gradient = torch.autograd.grad(outputs.loss, list(model.parameters()), allow_unused=True)
    assert all(each is None or (each == 0).all() for each in gradient)


@predicts_tokens
def test_scoring_only_what_is_predicted_needs_labels(our_class, make_model, make_inputs):
    with pytest.raises(ValueError, match="`predicted_only` needs `labels`"):
        make_model(our_class)(**make_inputs(our_class), predicted_only=True)


def test_each_loss_of_pretraining_can_stand_alone(make_model, make_inputs):
    model = make_model(RegardBertForPreTraining)
    inputs = make_inputs(RegardBertForPreTraining, labels=True)
    labels, following = inputs.pop("labels"), inputs.pop("next_sentence_label")
    assert model(**inputs).loss is None
    outputs = model(**inputs, labels=labels, next_sentence_label=following)
    masked = F.cross_entropy(outputs.prediction_logits.flatten(0, 1), labels.flatten())
    next_sentence = F.cross_entropy(outputs.seq_relationship_logits, following)
    torch.testing.assert_close(model(**inputs, labels=labels).loss, masked)
    torch.testing.assert_close(model(**inputs, next_sentence_label=following).loss, next_sentence)
    torch.testing.assert_close(outputs.loss, masked + next_sentence)
    # Class 0 is a class, not padding.
    assert model(**inputs, next_sentence_label=torch.zeros(3, dtype=torch.long)).loss > 0


PROBLEMS = {
    "classes": (None, 5, lambda: torch.tensor([4, 0, 3]), F.cross_entropy),
    "classes, said": ("single_label_classification", 5, lambda: torch.tensor([4, 0, 3]), F.cross_entropy),
    "several labels": (None, 5, lambda: torch.rand(3, 5).round(), F.binary_cross_entropy_with_logits),
    "several labels, whole numbers": (
        "multi_label_classification",
        5,
        lambda: torch.randint(0, 2, (3, 5)),
        lambda logits, labels, reduction: F.binary_cross_entropy_with_logits(
            logits, labels.float(), reduction=reduction
        ),
    ),
    "one number": (
        None,
        1,
        lambda: torch.randn(3),
        lambda logits, labels, reduction: F.mse_loss(logits[:, 0], labels, reduction=reduction),
    ),
    "one number in a column": (None, 1, lambda: torch.randn(3, 1), F.mse_loss),
    "one whole number": (
        None,
        1,
        lambda: torch.tensor([7, -2, 0]),
        lambda logits, labels, reduction: F.mse_loss(logits[:, 0], labels.float(), reduction=reduction),
    ),
    "several numbers": ("regression", 5, lambda: torch.randn(3, 5), F.mse_loss),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_sequence_classification_solves_each_problem(problem, make_model, make_inputs):
    problem_type, outputs, make_labels, loss_function = PROBLEMS[problem]
    model = make_model(RegardBertForSequenceClassification, num_labels=outputs, problem_type=problem_type)
    inputs, labels = make_inputs(RegardBertForSequenceClassification), make_labels()
    logits = model(**inputs).logits
    assert logits.shape == (3, outputs)
    torch.testing.assert_close(model(**inputs, labels=labels).loss, loss_function(logits, labels, reduction="mean"))
    # As a part of a greater batch.
    expected = loss_function(logits, labels, reduction="sum") / 7
    torch.testing.assert_close(model(**inputs, labels=labels, num_items_in_batch=7).loss, expected)
    assert model.config.problem_type == problem_type
