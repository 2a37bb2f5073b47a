"""The model families, and their registration with transformers' Auto classes."""

from __future__ import annotations

import transformers

from .configuration.bert import RegardBertConfig
from .configuration.captioner import RegardCaptionerConfig
from .configuration.decoder import RegardDecoderConfig
from .configuration.recurrent import RegardRecurrentConfig
from .configuration.transformer import RegardTransformerConfig
from .modeling import bert, bert_pretraining, bert_tasks, captioner, decoder, recurrent, transformer
from .tokenization.processor import RegardCaptionerProcessor

# Each family's classes by Auto class, and the stock tokenizer classes that `AutoTokenizer` takes for a family.
FAMILIES: dict = {
    RegardBertConfig: {
        "AutoModel": bert.RegardBertModel,
        "AutoModelForPreTraining": bert_pretraining.RegardBertForPreTraining,
        "AutoModelForMaskedLM": bert_pretraining.RegardBertForMaskedLM,
        "AutoModelForNextSentencePrediction": bert_pretraining.RegardBertForNextSentencePrediction,
        "AutoModelForSequenceClassification": bert_tasks.RegardBertForSequenceClassification,
        "AutoModelForTokenClassification": bert_tasks.RegardBertForTokenClassification,
        "AutoModelForQuestionAnswering": bert_tasks.RegardBertForQuestionAnswering,
        "AutoModelForMultipleChoice": bert_tasks.RegardBertForMultipleChoice,
    },
    RegardDecoderConfig: {
        "AutoModel": decoder.RegardDecoderModel,
        "AutoModelForCausalLM": decoder.RegardDecoderForCausalLM,
    },
    RegardTransformerConfig: {
        "AutoModel": transformer.RegardTransformerModel,
        "AutoModelForSeq2SeqLM": transformer.RegardTransformerForConditionalGeneration,
    },
    RegardRecurrentConfig: {
        "AutoModel": recurrent.RegardRecurrentModel,
        "AutoModelForSeq2SeqLM": recurrent.RegardRecurrentForConditionalGeneration,
    },
    RegardCaptionerConfig: {
        "AutoModelForImageTextToText": captioner.RegardCaptionerForConditionalGeneration,
    },
}
TOKENIZERS = {RegardBertConfig: transformers.BertTokenizer}
PROCESSORS = {RegardCaptionerConfig: RegardCaptionerProcessor}


def register_families() -> None:
    """Registers every family.

    Raises:
        ValueError: if a model type is already taken by a class of transformers.
    """
    for config_class, models in FAMILIES.items():
        transformers.AutoConfig.register(config_class.model_type, config_class)
        for auto_class, model_class in models.items():
            getattr(transformers, auto_class).register(config_class, model_class)
    for config_class, tokenizer_class in TOKENIZERS.items():
        transformers.AutoTokenizer.register(config_class, tokenizer_class)
    for config_class, processor_class in PROCESSORS.items():
        transformers.AutoProcessor.register(config_class, processor_class)
