"""Tokenizers, and tiny models of many kinds, ours and stock, that read with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import regard
from regard.tokenization.byte_level import train_byte_level
from regard.tokenization.characters import train_characters
from regard.tokenization.processor import make_captioner_processor
from regard.tokenization.wordpiece import train_wordpiece
from regard.tokenization.words import train_words

TEXT = "the river returns unreturnable hashes of the bank"
# Every sign that a page or a picture might trip over.
HARD = "naïve 😀 中国 \" ' < & </script> \u2028 <!-- $x$ don't"
RIGHT_TO_LEFT = "أهلا وسهلا بكم \u202e في العالم"


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Any]:
    texts = [TEXT, "a b c", HARD] * 3
    return {
        "pieces": train_wordpiece(texts, vocab_size=200),
        "bytes": train_byte_level(texts, vocab_size=290),
        "characters": train_characters([TEXT]),
        "words": train_words([TEXT, "a small red bird flies"]),
    }


def _stock(name: str, config: dict[str, Any], vocab_size: int) -> Any:
    config_class = getattr(
        transformers, f"{name.partition('For')[0].removesuffix('Model').removesuffix('LMHead')}Config"
    )
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return getattr(transformers, name)(config_class(**{"vocab_size": vocab_size, **special, **config}))


SEQ2SEQ = {"encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2, "decoder_attention_heads": 4}
WIDTHS = {"d_model": 16, "encoder_ffn_dim": 18, "decoder_ffn_dim": 22, "max_position_embeddings": 60}
BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 12],
    "depths": [1, 1],
    "layer_type": "basic",
    "out_features": ["stage2"],
}
SMALL = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 18, "max_position_embeddings": 60}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertModel": ("pieces", {**SMALL, "num_hidden_layers": 3}),
    "BertForMultipleChoice": ("pieces", {**SMALL, "num_hidden_layers": 3}),
    "GPT2LMHeadModel": ("bytes", {"n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 60}),
    "LlamaForCausalLM": ("bytes", {**SMALL, "num_hidden_layers": 3, "num_key_value_heads": 2}),
    "BartForConditionalGeneration": ("characters", {**SEQ2SEQ, **WIDTHS, "decoder_start_token_id": 1}),
    "T5ForConditionalGeneration": (
        "characters",
        {"d_model": 16, "d_kv": 4, "d_ff": 18, "num_layers": 2, "num_heads": 4} | {"decoder_start_token_id": 0},
    ),
    "RegardBertForMaskedLM": ("pieces", {**SMALL, "num_hidden_layers": 3}),
    "RegardDecoderForCausalLM": ("bytes", {**SMALL, "num_hidden_layers": 3}),
    "RegardTransformerForConditionalGeneration": (
        "characters",
        {**SMALL, "num_hidden_layers": 2, "num_decoder_layers": 3},
    ),
    "RegardRecurrentForConditionalGeneration": ("characters", {"hidden_size": 16, "encoder_hidden_size": 5}),
}


@pytest.fixture
def make_model(tokenizers):
    """A tiny model with random weights, and its tokenizer."""

    def make(name: str, **fields: Any) -> tuple[Any, Any]:
        kind, own = MODELS[name]
        tokenizer = tokenizers[kind]
        if name.startswith("Regard"):
            config_class = getattr(regard, f"{name.partition('For')[0]}Config")
            model = getattr(regard, name)(config_class(vocab_size=len(tokenizer), **own | fields))
        else:
            model = _stock(name, own | fields, len(tokenizer))
        # Far enough from the start that the heads differ.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        return model.eval(), tokenizer

    return make


@pytest.fixture
def make_captioner(tokenizers):
    """A tiny captioner with random weights, and its processor."""

    def make(**fields: Any) -> tuple[Any, Any]:
        tokenizer = tokenizers["words"]
        config = regard.RegardCaptionerConfig(
            backbone_config=BACKBONE, vocab_size=len(tokenizer), **{"hidden_size": 16, "num_hidden_layers": 2} | fields
        )
        return regard.RegardCaptionerForConditionalGeneration(config).eval(), make_captioner_processor(
            tokenizer, (40, 56)
        )

    return make
