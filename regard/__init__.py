"""regard: Hugging Face-compatible attention models, from recurrent alignment scores to BERT.

Once this package and transformers are imported, in either order, transformers' Auto classes know every model family:
`AutoModelForMaskedLM.from_pretrained(folder)` and the like find them. Importing this package alone imports neither
transformers nor torch; each public name is imported on first use.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# In a checkout the subpackages are siblings of this folder; installed, they lie inside it.
if not (Path(__file__).parent / "modeling").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

from .families.registry import FAMILIES
from .importing import MovedModules, when_imported

if TYPE_CHECKING:
    # All public names except those of `commands`, which imports this module.
    from .configuration.bert import RegardBertConfig
    from .configuration.captioner import RegardCaptionerConfig
    from .configuration.decoder import RegardDecoderConfig
    from .configuration.recurrent import RegardRecurrentConfig
    from .configuration.transformer import RegardTransformerConfig
    from .encoding import encode_texts
    from .inspection.faithfulness.faithfulness import faithfulness
    from .inspection.maps.attention_map import attention_map
    from .inspection.senses.senses import word_senses
    from .inspection.steps.dependence import order_effect, position_gradients
    from .inspection.steps.head_distances import head_distances, plot_head_distances
    from .inspection.steps.trace import format_trace, trace_shapes
    from .inspection.steps.worked_example import worked_calculation
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
    from .tokenization.processor import RegardCaptionerProcessor, make_captioner_processor
    from .training.families.evaluate import evaluate_model
    from .training.planning.plan import plan_training

# The module of each public function. The public names of a family are in its record.
_FUNCTIONS = {
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
    "plan_training": ".training.planning.plan",
    "plot_head_distances": ".inspection.steps.head_distances",
    "position_gradients": ".inspection.steps.dependence",
    "trace_shapes": ".inspection.steps.trace",
    "train_model": ".commands.train",
    "word_senses": ".inspection.senses.senses",
    "worked_calculation": ".inspection.steps.worked_example",
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


def _modules() -> dict[str, str]:
    """The module of each public name."""
    modules = dict(_FUNCTIONS)
    for family in FAMILIES.values():
        modules[f"train_{family.name}"] = ".commands.train"
        for part in family.public_parts():
            module, _, name = part.partition(":")
            modules[name] = module
    return modules


def __getattr__(name: str) -> Any:
    if name in ("configuration", "modeling", "tokenization"):
        # So that `regard.modeling.attention` works after `import regard` alone.
        return importlib.import_module(f".{name}", "regard")
    module = _modules().get(name)
    if module is None:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    return getattr(importlib.import_module(module, "regard"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})


def _register() -> None:
    from .registration import register_families

    register_families()


sys.meta_path.append(MovedModules())
when_imported("transformers", _register)
