"""What the tests of model cards share: results of runs of each family, and how a card's tables are read."""

import copy
import re

from huggingface_hub import ModelCard

from regard.configuration.bert import RegardBertConfig
from regard.configuration.captioner import RegardCaptionerConfig
from regard.configuration.decoder import RegardDecoderConfig
from regard.configuration.recurrent import RegardRecurrentConfig
from regard.configuration.transformer import RegardTransformerConfig

SIZES = {"vocab_size": 1_234, "hidden_size": 128}
CONFIGS = {
    "bert": RegardBertConfig(**SIZES, num_hidden_layers=3, num_attention_heads=4),
    "decoder": RegardDecoderConfig(**SIZES, num_hidden_layers=3, num_attention_heads=4),
    "transformer": RegardTransformerConfig(**SIZES, num_hidden_layers=3, num_decoder_layers=2, num_attention_heads=4),
    "recurrent": RegardRecurrentConfig(**SIZES, num_hidden_layers=2, rnn_type="lstm", alignment="bilinear"),
    "captioner": RegardCaptionerConfig(**SIZES, num_hidden_layers=1, rnn_type="lstm", alignment="scaled_dot"),
}
CONFIG = CONFIGS["bert"]

# What the results of all families have.
COMMON = {
    "parameters": 1_234_567,
    "step": 1_000,
    "epoch": 3,
    "step_in_epoch": 2,
    "seconds": 321.4,
    "tokens": 4_567_890,
    "processes": 1,
    "device": "cpu",
    "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
}
SETTINGS = {
    "validation": "0.05",
    "tokenizer": None,
    "batch_size": 32,
    "evaluation_batches": None,
    "max_length": 128,
    "precision": "no",
    "learning_rate": 1e-3,
    "schedule": "linear",
    "warmup": 0.1,
    "weight_decay": 0.01,
    "dropout": 0.1,
    "seed": 0,
}
TARGET_METRICS = {"loss": 1.23456, "perplexity": 3_456.789, "token_accuracy": 0.61239, "exact_match": 0.34567}
RESULTS = {
    **COMMON,
    "family": "bert",
    "architecture": "RegardBertForPreTraining",
    "metrics": {
        "masked_accuracy": 0.41236,
        "masked_accuracy_baseline": 0.0789,
        "masked_loss": 3.14159,
        "masked_loss_unigram": 6.5,
        "next_sentence_accuracy": 0.876,
        "next_sentence_baseline": 0.512,
    },
    "filled": [{"text": "The [MASK] sat.", "word": "cat", "guesses": ["dog", "cat", "##s"]}],
    "data": {
        "documents": 4_321,
        "tokens": 765_432,
        "examples": 999,
        "unknown_share": 0.00123,
        "held_out_documents": 21,
        "held_out_examples": 45,
        "random_pairs_share": 0.5,
    },
    "settings": {
        **SETTINGS,
        "data": ["python-docs"],
        "language": "en",
        "mask_rate": 0.15,
        "whole_words": False,
        "next_sentence": True,
    },
}
PAIRS = {
    **COMMON,
    "metrics": {**TARGET_METRICS, "chrf": 71.234, "bleu": 55.678},
    "by_target_words": [
        {"key": 1, "number": 1_200, "exact_match": 0.98765},
        {"key": 2, "number": 7, "exact_match": 0.5432},
    ],
    "by_source_length": [{"key": 20, "number": 1_111, "exact_match": 0.87654}],
    "generated": [{"source": "en: 1/2/2003", "target": "2003-01-02", "prediction": "2003-02-01"}],
    "data": {"pairs": 4_321, "tokens": 765_432, "held_out_pairs": 1_207},
    "settings": {
        **SETTINGS,
        "data": ["dates"],
        "units": "characters",
        "beams": 1,
        "label_smoothing": 0.0,
        "language": None,
    },
}
ALL_RESULTS = {
    "bert": RESULTS,
    "decoder": {
        **COMMON,
        "family": "decoder",
        "metrics": {
            "loss": 2.34567,
            "perplexity": 1_234.567,
            "perplexity_unigram": 2_345.678,
            "token_accuracy": 0.41236,
            "token_accuracy_baseline": 0.0789,
        },
        "generated": [{"prompt": "Returns the", "continuation": " length\nof it."}],
        "data": {"documents": 4_321, "tokens": 765_432, "held_out_documents": 21, "held_out_tokens": 4_567},
        "settings": {**SETTINGS, "data": ["python-docs"], "language": "en"},
    },
    "transformer": {**PAIRS, "family": "transformer"},
    "recurrent": {**PAIRS, "family": "recurrent"},
    "captioner": {
        **COMMON,
        "family": "captioner",
        "metrics": {**TARGET_METRICS, "token_f1": 0.76543, "base_letter": 0.93211},
        "generated": [{"target": "latin small letter a", "prediction": "latin small letter e"}],
        "data": {"images": 4_321, "tokens": 765_432, "held_out_images": 1_001},
        "settings": {
            **SETTINGS,
            "data": ["glyphs"],
            "image_size": 48,
            "backbone": None,
            "beams": 1,
            "label_smoothing": 0.0,
            "language": None,
        },
    },
}
FAMILIES = list(ALL_RESULTS)
EXAMPLES = {family: "filled" if family == "bert" else "generated" for family in FAMILIES}


def changed(family: str = "bert", **parts) -> dict:
    """The results of a family with some of their parts, or parts of parts, replaced."""
    results = copy.deepcopy(ALL_RESULTS[family])
    for name, part in parts.items():
        results[name] = {**results[name], **part} if isinstance(part, dict) else part
    return results


def rows(card: ModelCard, first_cell: str) -> list[str]:
    """The lines of the table whose header begins with this cell."""
    lines = card.text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first_cell} |"))
    assert set(lines[start + 1]) == {"|", "-"}
    end = next(number for number, line in enumerate([*lines, ""]) if number > start and not line.startswith("|"))
    return lines[start + 2 : end]


def cells(row: str) -> list[str]:
    """The cells of a row as Markdown shows them: a pipe parts cells where nothing escapes it."""
    parts = re.findall(r"(?:\\.|[^\\|])*(?=\|)", row)
    return [re.sub(r"\\(.)", r"\1", part).strip() for part in parts if part]
