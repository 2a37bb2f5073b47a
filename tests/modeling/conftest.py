"""Tiny models of every registered family, and a batch for each: what the tests of models run on.

A test that asks for `model_class` runs once for each registered class, one that asks for `head_class` once for each of
those that take labels, and one that asks for `kernel` too runs once for each kernel that the class has. So a new
family needs only an entry in `TINY`. A module that is about one family names it in `MODEL_TYPES`.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import transformers

from regard.modeling.losses import shift_right
from tests.support.families import FAMILIES

LENGTHS = (11, 7, 4)
TARGET_LENGTHS = (6, 9, 3)
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


def padded_ids(lengths: tuple[int, ...], vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids, padded on the right, and their mask."""
    real = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    return torch.randint(MASK + 1, vocab_size, real.shape).masked_fill(~real, PAD), real.long()


def decoder_fields(model_class: type) -> dict:
    return {
        "vocab_size": 39,
        "hidden_size": 21,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 26,
        "max_position_embeddings": 14,
        "layer_norm_eps": 1e-3,
    }


def decoder_inputs(model_class: type) -> dict[str, torch.Tensor]:
    ids, mask = padded_ids(LENGTHS, 39)
    return {"input_ids": ids, "attention_mask": mask}


def decoder_labels(model_class: type) -> dict[str, torch.Tensor]:
    ids, mask = padded_ids(LENGTHS, 39)
    return {"labels": ids.masked_fill(mask == 0, -100)} if model_class.can_generate() else {}


def transformer_fields(model_class: type) -> dict:
    return {
        "vocab_size": 41,
        "hidden_size": 18,
        "num_hidden_layers": 2,
        "num_decoder_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 23,
        "max_position_embeddings": 13,
        "layer_norm_eps": 1e-3,
    }


def recurrent_fields(model_class: type) -> dict:
    return {"vocab_size": 43, "hidden_size": 16, "encoder_hidden_size": 5, "num_hidden_layers": 2}


def seq2seq_batch(vocab_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Source and target rows of unequal lengths, and the labels of the target."""
    ids, mask = padded_ids(LENGTHS, vocab_size)
    targets, target_mask = padded_ids(TARGET_LENGTHS, vocab_size)
    labels = targets.masked_fill(target_mask == 0, -100)
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": shift_right(labels, UNK, PAD),
        "decoder_attention_mask": target_mask,
    }
    return inputs, labels


def seq2seq_family(fields: Callable[[type], dict]) -> "TinyFamily":
    def labels(model_class: type) -> dict[str, torch.Tensor]:
        return {"labels": seq2seq_batch(vocab_size)[1]} if model_class.can_generate() else {}

    vocab_size = fields(object)["vocab_size"]
    return TinyFamily(fields, lambda model_class: seq2seq_batch(vocab_size)[0], labels)


def captioner_fields(model_class: type) -> dict:
    # Without batch normalisation, which makes of parts of a batch something else than of the whole.
    backbone = {
        "model_type": "pvt_v2",
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "hidden_sizes": [6, 10],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "sr_ratios": [2, 1],
        "qkv_bias": False,
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "out_features": ["stage2"],
        "initializer_range": 0.3,
    }
    return {
        "backbone_config": backbone,
        "vocab_size": 37,
        "hidden_size": 14,
        "num_hidden_layers": 2,
    }


def captioner_inputs(model_class: type) -> dict[str, torch.Tensor]:
    inputs, _ = seq2seq_batch(37)
    target = {name: value for name, value in inputs.items() if name.startswith("decoder_")}
    return {"pixel_values": torch.randn(3, 3, 40, 24), **target}


def captioner_labels(model_class: type) -> dict[str, torch.Tensor]:
    return {"labels": seq2seq_batch(37)[1]}


@dataclass
class TinyFamily:
    """Each a function of the model class: configuration fields, a padded batch, its labels (none without a head)."""

    fields: Callable[[type], dict]
    inputs: Callable[[type], dict[str, torch.Tensor]]
    labels: Callable[[type], dict[str, torch.Tensor]]


TINY = {
    "regard_bert": TinyFamily(bert_fields, bert_inputs, bert_labels),
    "regard_decoder": TinyFamily(decoder_fields, decoder_inputs, decoder_labels),
    "regard_transformer": seq2seq_family(transformer_fields),
    "regard_recurrent": seq2seq_family(recurrent_fields),
    "regard_captioner": TinyFamily(captioner_fields, captioner_inputs, captioner_labels),
}

CLASSES = {
    model_class: (config_class, auto_class)
    for config_class, models in FAMILIES.items()
    for auto_class, model_class in models.items()
}


def family_of(model_class: type) -> TinyFamily:
    return TINY[CLASSES[model_class][0].model_type]


def kernels_of(model_class: type) -> list[str]:
    return ["eager", "sdpa"] if model_class._supports_sdpa else ["eager"]


def pytest_generate_tests(metafunc):
    model_types = getattr(metafunc.module, "MODEL_TYPES", TINY)
    classes = [model_class for model_class, (config, _) in CLASSES.items() if config.model_type in model_types]
    heads = [model_class for model_class in classes if family_of(model_class).labels(model_class)]
    for name, chosen in (("model_class", classes), ("head_class", heads)):
        if name not in metafunc.fixturenames:
            continue
        marks = [mark for mark in metafunc.definition.iter_markers("parametrize") if mark.args[0] == "kernel"]
        if "kernel" in metafunc.fixturenames and not marks:
            pairs = [(model_class, kernel) for model_class in chosen for kernel in kernels_of(model_class)]
            metafunc.parametrize((name, "kernel"), pairs, ids=lambda value: getattr(value, "__name__", value))
        else:
            metafunc.parametrize(name, chosen, ids=lambda model_class: model_class.__name__)


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

    def make(model_class, kernel="default", dropout=None, **fields):
        config_class = CLASSES[model_class][0]
        names = [field.name for field in dataclasses.fields(config_class) if field.name.endswith("_dropout_prob")]
        dropouts = {} if dropout is None else dict.fromkeys(names, dropout)
        kernel = kernels_of(model_class)[-1] if kernel == "default" else kernel
        config = config_class(**(tiny_fields(model_class) | dropouts | fields), attn_implementation=kernel)
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
