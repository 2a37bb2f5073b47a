"""Tiny models of every registered family, and a batch for each: what the tests of models run on.

A test that asks for `model_class` runs once for each registered class, one that asks for `head_class` once for each of
those that take labels. So a new family needs only an entry in `TINY`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import transformers

from regard.registration import FAMILIES

LENGTHS = (11, 7, 4)
PAD, UNK, CLS, SEP, MASK = range(5)


def bert_inputs(model_class: type) -> dict[str, torch.Tensor]:
    """Three rows of unequal lengths, with segment ids; for multiple choice four such choices a row."""
    name, choices = model_class.__name__, 4
    shape = (len(LENGTHS), choices, LENGTHS[0]) if name.endswith("MultipleChoice") else (len(LENGTHS), LENGTHS[0])
    real = torch.arange(LENGTHS[0]) < torch.tensor(LENGTHS).view(-1, *[1] * (len(shape) - 1))
    real = real.expand(shape)
    return {
        "input_ids": torch.randint(MASK + 1, 40, shape).masked_fill(~real, PAD),
        "attention_mask": real.long(),
        "token_type_ids": torch.randint(0, 3, shape).masked_fill(~real, 0),
    }


def bert_labels(model_class: type) -> dict[str, torch.Tensor]:
    """Labels on unequally many tokens of each row, or one for each row; none for a model without a head."""
    name = model_class.__name__

    def tokens(classes: int) -> torch.Tensor:
        labels = torch.full((len(LENGTHS), LENGTHS[0]), -100)
        for row, positions in enumerate(([1, 2, 5, 9, 10], [3, 6], [1])):
            labels[row, positions] = torch.randint(0, classes, (len(positions),))
        return labels

    if name == "RegardBertModel":
        return {}
    if name.endswith("PreTraining"):
        return {"labels": tokens(40), "next_sentence_label": torch.tensor([0, 1, 1])}
    if name.endswith("QuestionAnswering"):
        return {"start_positions": torch.tensor([2, 0, 1]), "end_positions": torch.tensor([9, 6, 1])}
    per_token = {"MaskedLM": 40, "TokenClassification": 5}
    for ending, classes in per_token.items():
        if name.endswith(ending):
            return {"labels": tokens(classes)}
    per_row = {"NextSentencePrediction": 2, "SequenceClassification": 5, "MultipleChoice": 4}
    classes = next(classes for ending, classes in per_row.items() if name.endswith(ending))
    return {"labels": torch.randint(0, classes, (len(LENGTHS),))}


def bert_fields(model_class: type) -> dict:
    return {
        "vocab_size": 40,
        "hidden_size": 15,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 22,
        "max_position_embeddings": 12,
        "type_vocab_size": 3,
        # Stock BERT answers questions with as many outputs as there are labels, and needs two.
        "num_labels": 2 if model_class.__name__.endswith("QuestionAnswering") else 5,
        "layer_norm_eps": 1e-3,
    }


@dataclass
class TinyFamily:
    """Each a function of the model class: configuration fields, a padded batch, its labels (none without a head)."""

    fields: Callable[[type], dict]
    inputs: Callable[[type], dict[str, torch.Tensor]]
    labels: Callable[[type], dict[str, torch.Tensor]]


TINY = {"regard_bert": TinyFamily(bert_fields, bert_inputs, bert_labels)}

CLASSES = {
    model_class: (config_class, auto_class)
    for config_class, models in FAMILIES.items()
    for auto_class, model_class in models.items()
}


def family_of(model_class: type) -> TinyFamily:
    return TINY[CLASSES[model_class][0].model_type]


def pytest_generate_tests(metafunc):
    heads = [model_class for model_class in CLASSES if family_of(model_class).labels(model_class)]
    for name, classes in (("model_class", list(CLASSES)), ("head_class", heads)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, classes, ids=lambda model_class: model_class.__name__)


@pytest.fixture
def auto_class(model_class) -> type:
    """The Auto class that gives `model_class`."""
    return getattr(transformers, CLASSES[model_class][1])


@pytest.fixture
def tiny_fields():
    """The configuration fields of a tiny model of a class."""
    return lambda model_class: family_of(model_class).fields(model_class)


@pytest.fixture
def randomize():
    """Moves every parameter away from its initial zero or one."""

    def move(model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        return model

    return move


@pytest.fixture
def make_model(tiny_fields, randomize):
    """A tiny model with random weights, in evaluation mode."""

    def make(model_class, kernel="sdpa", **fields):
        config_class = CLASSES[model_class][0]
        config = config_class(**(tiny_fields(model_class) | fields), attn_implementation=kernel)
        return randomize(model_class(config)).eval()

    return make


@pytest.fixture
def make_inputs():
    """A padded batch for a model of a class, with labels or without."""

    def make(model_class, labels=False):
        family = family_of(model_class)
        return family.inputs(model_class) | (family.labels(model_class) if labels else {})

    return make


@pytest.fixture
def loss_of():
    """A scalar that every parameter has a part in: the loss, or for a model without one a sum over its outputs."""

    def reduce(outputs):
        if outputs.get("loss") is not None:
            return outputs["loss"]
        return sum(value.float().square().mean() for value in outputs.values() if isinstance(value, torch.Tensor))

    return reduce
