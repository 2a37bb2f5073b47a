"""Export of checkpoints to stock architectures of transformers, which load without this package and custom code.

| model type | becomes | where |
|---|---|---|
| `regard_bert` | `bert` | always; each head becomes the stock one of its name |
| `regard_decoder` | `gpt2` | `norm_position` is "pre" |
| `regard_decoder` | `opt` | `norm_position` is "post" |
| `regard_transformer` | `marian` | `norm_position` is "post", positions are sinusoidal |
| `regard_transformer` | `pegasus` | `norm_position` is "pre", positions are sinusoidal, embeddings are tied |
| `regard_transformer` | `blenderbot` | `norm_position` is "pre", positions are learned, embeddings are tied |

All but `bert` and `gpt2` have a fixed epsilon in their norms, 1e-5. A model that no stock architecture can compute is
refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from ..families.family import resolve
from ..families.registry import FAMILIES, family_of_type
from ..modeling.loading.load import load_model, load_part
from ..modeling.positions import SinusoidalPositions
from ..tokenization.generative import save_tokenizer

logger = logging.getLogger("regard.sharing")

_OTHERWISE = "`regard push --bundle` shares the model with its code instead"

Weights = dict[str, Tensor]


class Stock(NamedTuple):
    """A stock architecture, and how a model of ours becomes one.

    Attributes:
        model_type: its name.
        classes: our model classes and its own for them.
        fields: the fields of its configuration, and the fields of ours that hold their values.
        names: parts of tensor names, ours and its own, which are replaced in this order. If it has several tensors for
            one of ours, ours is cut into as many along the first dimension.
        needs: fields of our configuration for which it can compute a single value, and that value.
        settings: further fields of its configuration.
        adapt: changes the tensors, under its names, that it holds in another form; None if there are no such tensors.
    """

    model_type: str
    classes: dict[str, str]
    fields: dict[str, str]
    names: dict[str, str | tuple[str, ...]]
    needs: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    adapt: Callable[[Weights], Weights] | None = None


def _transpose_linear(weights: Weights) -> Weights:
    """Transposes weights of linear layers: GPT-2's are convolutions, whose weights have the input first."""
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return {name: tensor.T if name.endswith(linear) else tensor for name, tensor in weights.items()}


def _offset_positions(weights: Weights) -> Weights:
    """Moves the positions to the third row of the table, where OPT's begin; the first two are for padding."""
    return {
        name: torch.nn.functional.pad(tensor, (0, 0, 2, 0)) if name.endswith("embed_positions.weight") else tensor
        for name, tensor in weights.items()
    }


# Fields of the same name in all the stock configurations.
_COMMON_FIELDS = {
    name: name for name in ("vocab_size", "use_cache", "pad_token_id", "eos_token_id", "tie_word_embeddings")
}
_GPT2 = Stock(
    "gpt2",
    classes={"RegardDecoderModel": "GPT2Model", "RegardDecoderForCausalLM": "GPT2LMHeadModel"},
    fields={
        **_COMMON_FIELDS,
        "bos_token_id": "bos_token_id",
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
        "activation_function": "hidden_act",
        "embd_pdrop": "hidden_dropout_prob",
        "resid_pdrop": "hidden_dropout_prob",
        "attn_pdrop": "attention_probs_dropout_prob",
        "initializer_range": "initializer_range",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    names={
        "decoder.": "transformer.",
        "embeddings.tokens": "wte",
        "embeddings.positions": "wpe",
        "stack.blocks": "h",
        "stack.norm": "ln_f",
        "self_attention_slot.before": "ln_1",
        "self_attention.query_key_value": "attn.c_attn",
        "self_attention.output": "attn.c_proj",
        "feed_forward_slot.before": "ln_2",
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.down": "mlp.c_proj",
    },
    adapt=_transpose_linear,
)

# Fields and names of BART, which the other architectures share.
_BART_FIELDS = {
    **_COMMON_FIELDS,
    "max_position_embeddings": "max_position_embeddings",
    "activation_function": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "init_std": "initializer_range",
}
_BART_NAMES: dict[str, str | tuple[str, ...]] = {
    "embeddings.tokens": "embed_tokens",
    "embeddings.positions": "embed_positions",
    "stack.blocks": "layers",
    "stack.norm": "layer_norm",
    **{
        f"{ours}_slot.{place}": stock
        for ours, stock in (
            ("self_attention", "self_attn_layer_norm"),
            ("cross_attention", "encoder_attn_layer_norm"),
            ("feed_forward", "final_layer_norm"),
        )
        for place in ("before", "after")
    },
    "self_attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.output": "self_attn.out_proj",
    "cross_attention.query": "encoder_attn.q_proj",
    "cross_attention.key_value": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross_attention.output": "encoder_attn.out_proj",
    "feed_forward.up": "fc1",
    "feed_forward.down": "fc2",
}
_OPT = Stock(
    "opt",
    classes={"RegardDecoderModel": "OPTModel", "RegardDecoderForCausalLM": "OPTForCausalLM"},
    fields={
        **_BART_FIELDS,
        "bos_token_id": "bos_token_id",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "ffn_dim": "intermediate_size",
    },
    names={
        "decoder.": "model.",
        "embeddings.": "decoder.embeddings.",
        "stack.": "decoder.stack.",
        **_BART_NAMES,
    },
    needs={"layer_norm_eps": 1e-5},
    settings={"do_layer_norm_before": False},
    adapt=_offset_positions,
)
_SEQ2SEQ_FIELDS = {
    **_BART_FIELDS,
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "decoder_layers": "num_decoder_layers",
    "encoder_attention_heads": "num_attention_heads",
    "decoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
    "decoder_ffn_dim": "intermediate_size",
    "scale_embedding": "scale_embedding",
    "decoder_start_token_id": "decoder_start_token_id",
    # No stock loss reads it. It is kept for further training: `Trainer` has a `label_smoothing_factor` to set to it.
    "label_smoothing": "label_smoothing",
}


def _seq2seq_classes(model: str, head: str) -> dict[str, str]:
    return {"RegardTransformerModel": model, "RegardTransformerForConditionalGeneration": head}


# By default their configurations end each text at the longest length, as their published models do.
_FREE_END = {"forced_eos_token_id": None}
_MARIAN = Stock(
    "marian",
    classes=_seq2seq_classes("MarianModel", "MarianMTModel"),
    fields={
        **_SEQ2SEQ_FIELDS,
        "bos_token_id": "bos_token_id",
        "share_encoder_decoder_embeddings": "tie_word_embeddings",
    },
    names=_BART_NAMES,
    needs={"layer_norm_eps": 1e-5},
    settings=_FREE_END,
)
_PEGASUS = Stock(
    "pegasus",
    classes=_seq2seq_classes("PegasusModel", "PegasusForConditionalGeneration"),
    fields=_SEQ2SEQ_FIELDS,
    names=_BART_NAMES,
    # Before version 5, transformers shared the embeddings of its source and target whatever the configuration said.
    needs={"layer_norm_eps": 1e-5, "tie_word_embeddings": True},
    settings=_FREE_END,
)
_BLENDERBOT = _PEGASUS._replace(
    model_type="blenderbot",
    classes=_seq2seq_classes("BlenderbotModel", "BlenderbotForConditionalGeneration"),
    fields={**_SEQ2SEQ_FIELDS, "bos_token_id": "bos_token_id"},
    # By default it never repeats parts of its source.
    settings={**_FREE_END, "encoder_no_repeat_ngram_size": 0},
)

# A stock architecture by the `norm_position` and `position_embedding_type` that it has.
Layouts = dict[tuple[str, str], Stock]

# The tables of positions of GPT-2 and OPT can hold sinusoids as well. Marian's can hold nothing else, since each load
# computes it anew.
_DECODER_LAYOUTS: Layouts = {
    ("pre", "learned"): _GPT2,
    ("pre", "sinusoidal"): _GPT2,
    ("post", "learned"): _OPT,
    ("post", "sinusoidal"): _OPT,
}
_TRANSFORMER_LAYOUTS: Layouts = {
    ("post", "sinusoidal"): _MARIAN,
    ("pre", "sinusoidal"): _PEGASUS,
    ("pre", "learned"): _BLENDERBOT,
}
_BERT_CLASSES = {
    f"RegardBert{head}": f"Bert{head}"
    for head in """Model ForPreTraining ForMaskedLM ForNextSentencePrediction ForSequenceClassification
    ForTokenClassification ForQuestionAnswering ForMultipleChoice""".split()
}


def _class_name(config: PreTrainedConfig, allowed: dict[str, str]) -> str:
    """Returns the name of a checkpoint's class."""
    named = config.architectures or []
    if len(named) != 1 or named[0] not in allowed:
        raise ValueError(f"`architectures` ({named}) of the configuration must name one of {', '.join(allowed)}")
    return named[0]


def _our_class(config: PreTrainedConfig, name: str) -> type[PreTrainedModel]:
    """Returns the class of a name among the model classes of a configuration's family."""
    models = FAMILIES[config.model_type.removeprefix("regard_")].models
    return next(model_class for model_class in map(resolve, models.values()) if model_class.__name__ == name)


def _load(model_class: type[PreTrainedModel], model: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Loads a checkpoint in its own precision."""
    loaded: PreTrainedModel = load_model(model_class, model, f"`model` ({str(model)!r})", dtype="auto", **kwargs)
    return loaded


def bert_to_stock(model: str | Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Loads a BERT in its stock class, which reads the weights as they are: on disk they have stock names."""
    stock_class = getattr(transformers, _BERT_CLASSES[_class_name(config, _BERT_CLASSES)])
    # `auto_map` names the code of a bundle.
    fields = {name: value for name, value in config.to_dict().items() if name not in ("model_type", "auto_map")}
    return _load(stock_class, model, config=AutoConfig.for_model("bert", **fields))


def _choose_stock(config: PreTrainedConfig, by_layout: Layouts) -> Stock:
    """Returns the architecture that computes what a configuration says."""
    layout = (config.norm_position, config.position_embedding_type)
    if layout not in by_layout:
        allowed = ", or ".join(f"{norm!r} and {positions!r}" for norm, positions in by_layout)
        raise ValueError(
            f"`norm_position` and `position_embedding_type` ({layout[0]!r} and {layout[1]!r}) must be {allowed}, "
            f"for others have no stock architecture: {_OTHERWISE}"
        )
    stock = by_layout[layout]
    for name, value in stock.needs.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"`{name}` ({getattr(config, name)}) must be {value}, since {stock.model_type}, the stock "
                f"architecture that computes the rest, knows nothing else: {_OTHERWISE}"
            )
    return stock


def _rename(weights: Weights, names: dict[str, str | tuple[str, ...]]) -> Weights:
    """Replaces parts of tensor names, and cuts a tensor that becomes several, as `Stock.names` describes."""
    for ours, stock in names.items():
        targets = (stock,) if isinstance(stock, str) else stock
        renamed: Weights = {}
        for name, tensor in weights.items():
            if ours in name:
                chunks = tensor.chunk(len(targets))
                renamed |= {name.replace(ours, target): chunk for target, chunk in zip(targets, chunks, strict=True)}
            else:
                renamed[name] = tensor
        weights = renamed
    return weights


def decoder_to_stock(model: str | Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Loads a decoder-only model as a GPT-2 or an OPT."""
    return _to_stock(model, config, _DECODER_LAYOUTS)


def transformer_to_stock(model: str | Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Loads an encoder-decoder Transformer as a Marian, a Pegasus or a Blenderbot."""
    return _to_stock(model, config, _TRANSFORMER_LAYOUTS)


def _to_stock(model: str | Path, config: PreTrainedConfig, layouts: Layouts) -> PreTrainedModel:
    stock = _choose_stock(config, layouts)
    class_name = _class_name(config, stock.classes)
    ours = _load(_our_class(config, class_name), model)
    sinusoids = {
        f"{name}.weight": module.table
        for name, module in ours.named_modules()
        if isinstance(module, SinusoidalPositions)
    }
    weights = _rename(ours.state_dict() | sinusoids, stock.names)
    if stock.adapt is not None:
        weights = stock.adapt(weights)
    fields = {field: getattr(config, name) for field, name in stock.fields.items()}
    stock_config = AutoConfig.for_model(stock.model_type, **fields, **stock.settings)
    exported = getattr(transformers, stock.classes[class_name])(stock_config).to(ours.dtype)
    missing, unexpected = exported.load_state_dict(weights, strict=False)
    # The first is a bias of zeros, which our models don't have; the second another name of tied embeddings.
    may_miss = ("final_logits_bias", "shared.weight") if config.tie_word_embeddings else ("final_logits_bias",)
    assert not unexpected
    assert all(name.endswith(may_miss) for name in missing)
    if ours.can_generate():
        exported.generation_config = ours.generation_config
    return exported


def export_model(model: str | Path, output: str | Path) -> Path:
    """Writes a checkpoint, with its tokenizer, as one that stock transformers loads: see the table of this module.

    The exported model computes what the model did, up to rounding; on the CPUs tried, to the bit if the width of a
    head is a power of four, since it then does not matter when scores are scaled. So greedy generation gives the same
    tokens.

    Three things differ. Padding on the left moves the positions of all but `bert` and `opt`, unless `gpt2` is given
    `position_ids`, as `generate` does. The loss of an encoder-decoder has no label smoothing. In training, `opt` has
    no dropout after the embeddings.

    Args:
        model: a checkpoint of this package, a folder or a Hub id.
        output: the folder to write to, which must be empty or not exist.

    Returns:
        The folder `output`, with weights (safetensors), configuration, generation configuration and tokenizer.

    Raises:
        ValueError: if `output` is not empty, if the model is not one of this package's or lacks weights, or if no
            stock architecture computes the same, with the reason.
    """
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"`output` ({str(output)!r}) must be a folder that is empty or does not exist yet")
    label = f"`model` ({str(model)!r})"
    config = load_part(AutoConfig, model, label)
    family = family_of_type(config.model_type)
    if family is None:
        exportable = ", ".join(family.model_type for family in FAMILIES.values() if family.export is not None)
        raise ValueError(f"`model` ({str(model)!r}) is a {config.model_type}, but must be one of {exportable}")
    if family.export is None:
        raise ValueError(
            f"`model` ({str(model)!r}) is a {config.model_type}, which has no stock architecture: {_OTHERWISE}"
        )
    tokenizer = load_part(AutoTokenizer, model, label) if get_tokenizer_config(model) else None
    exported = resolve(family.export)(model, config)
    exported.save_pretrained(output)
    if tokenizer is None:
        logger.warning("The model has no tokenizer, so none is in %s.", output)
    else:
        save_tokenizer(tokenizer, output)
    return output
