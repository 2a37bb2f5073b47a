"""regard: Hugging Face-compatible attention models, from recurrent alignment scores to BERT.

Importing the package registers every model family with transformers' Auto classes, so that
`AutoModelForMaskedLM.from_pretrained(folder)` and the like find them.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# In a checkout the subpackages are siblings of this folder; installed, they lie inside it.
if not (Path(__file__).parent / "modeling").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

from .configuration.bert import RegardBertConfig
from .configuration.captioner import RegardCaptionerConfig
from .configuration.decoder import RegardDecoderConfig
from .configuration.recurrent import RegardRecurrentConfig
from .configuration.transformer import RegardTransformerConfig
from .modeling.bert import RegardBertModel
from .modeling.bert_pretraining import (
    RegardBertForMaskedLM,
    RegardBertForNextSentencePrediction,
    RegardBertForPreTraining,
)
from .modeling.bert_tasks import (
    RegardBertForMultipleChoice,
    RegardBertForQuestionAnswering,
    RegardBertForSequenceClassification,
    RegardBertForTokenClassification,
)
from .modeling.captioner import RegardCaptionerForConditionalGeneration, spatial_maps
from .modeling.decoder import RegardDecoderForCausalLM, RegardDecoderModel
from .modeling.recurrent import RegardRecurrentForConditionalGeneration, RegardRecurrentModel
from .modeling.transformer import RegardTransformerForConditionalGeneration, RegardTransformerModel
from .registration import register_families
from .tokenization.processor import RegardCaptionerProcessor, make_captioner_processor

register_families()

# What training needs is imported when it is first asked for: loading a model does not need it.
_TRAINING = ("train_model", "train_bert", "train_captioner", "train_decoder", "train_recurrent", "train_transformer")
_LAZY = {
    "attention_map": ".inspection.maps.attention_map",
    "encode_texts": ".encoding",
    "evaluate_model": ".training.families.evaluate",
    "faithfulness": ".inspection.faithfulness.faithfulness",
    "fill_masks": ".commands.fill",
    "finetune": ".commands.finetune",
    "format_trace": ".inspection.steps.trace",
    "generate_text": ".commands.generate",
    "head_distances": ".inspection.steps.head_distances",
    "order_effect": ".inspection.steps.dependence",
    "plan_training": ".commands.plan",
    "plot_head_distances": ".inspection.steps.head_distances",
    "position_gradients": ".inspection.steps.dependence",
    "trace_shapes": ".inspection.steps.trace",
    "word_senses": ".inspection.senses.senses",
    "worked_calculation": ".inspection.steps.worked_example",
    **dict.fromkeys(_TRAINING, ".commands.train"),
}

__all__ = [
    "RegardBertConfig",
    "RegardBertForMaskedLM",
    "RegardBertForMultipleChoice",
    "RegardBertForNextSentencePrediction",
    "RegardBertForPreTraining",
    "RegardBertForQuestionAnswering",
    "RegardBertForSequenceClassification",
    "RegardBertForTokenClassification",
    "RegardBertModel",
    "RegardCaptionerConfig",
    "RegardCaptionerForConditionalGeneration",
    "RegardCaptionerProcessor",
    "RegardDecoderConfig",
    "RegardDecoderForCausalLM",
    "RegardDecoderModel",
    "RegardRecurrentConfig",
    "RegardRecurrentForConditionalGeneration",
    "RegardRecurrentModel",
    "RegardTransformerConfig",
    "RegardTransformerForConditionalGeneration",
    "RegardTransformerModel",
    "attention_map",
    "encode_texts",
    "evaluate_model",
    "faithfulness",
    "fill_masks",
    "finetune",
    "format_trace",
    "generate_text",
    "head_distances",
    "make_captioner_processor",
    "order_effect",
    "plan_training",
    "plot_head_distances",
    "position_gradients",
    "spatial_maps",
    "trace_shapes",
    "train_bert",
    "train_captioner",
    "train_decoder",
    "train_model",
    "train_recurrent",
    "train_transformer",
    "word_senses",
    "worked_calculation",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name], "regard"), name)
