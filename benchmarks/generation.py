"""Greedy generation by a decoder and by an encoder-decoder, against stock models of the same sizes and weights.

The weights are random, and exported by `regard.sharing.export`: a decoder becomes GPT-2, with GPT-2's activation, and
an encoder-decoder Marian. Both sides call `generate`, which is transformers' own, on the same prompts or sources
without padding; the end token is held back until all tokens are there. Besides two small ones there are the models as
published: GPT-2 with 124 million parameters, and Marian with the default vocabulary of transformers.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .compare import Case
from .pretraining import SPECIALS, TINY
from .sides import Side, Work

TITLE = "Greedy generation"

DECODER = {"family": "decoder", "hidden_act": "gelu_new", "norm_position": "pre", "position_embedding_type": "learned"}
ENCODER_DECODER = {
    "family": "transformer",
    "hidden_act": "silu",
    "norm_position": "post",
    "position_embedding_type": "sinusoidal",
}
SMALL = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
GPT2 = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
MARIAN = {
    "vocab_size": 58101,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
}
TASK = {"length": 32, "new_tokens": 256}


def _case(work: str, parameters: Mapping[str, Any], rows: int, **fields: Any) -> Case:
    peer = {"decoder": "gpt2", "transformer": "marian"}[parameters["family"]]
    return Case(
        f"{work}, {rows} at once",
        {**parameters, **TASK, "rows": rows},
        figures={peer: {"speed": 1.15}},
        sides=("regard", peer),
        **fields,
    )


DECODER_WORK = "decoder, 256 wide, 4 layers, 8,192 tokens"
ENCODER_DECODER_WORK = "encoder-decoder, 256 wide, 4 + 4 layers, 8,192 tokens"
QUICK = {"quick": TINY | {"length": 7, "new_tokens": 5}}
LARGE = {"warm_up": 1, "repetitions": 5}

CASES = {
    "decoder-1": _case(DECODER_WORK, DECODER | SMALL, 1, **QUICK),
    "decoder-8": _case(DECODER_WORK, DECODER | SMALL, 8),
    "gpt2-1": _case("decoder of GPT-2's size", DECODER | GPT2, 1, **LARGE),
    "encoder-decoder-1": _case(ENCODER_DECODER_WORK, ENCODER_DECODER | SMALL, 1),
    "encoder-decoder-8": _case(ENCODER_DECODER_WORK, ENCODER_DECODER | SMALL, 8, **QUICK),
    "marian-1": _case("encoder-decoder of Marian's size", ENCODER_DECODER | MARIAN, 1, **LARGE),
}


def write_inputs(parameters: dict[str, Any], folder: Path) -> None:
    """Writes a model of ours, its export, and the prompts."""
    from regard import (
        RegardDecoderConfig,
        RegardDecoderForCausalLM,
        RegardTransformerConfig,
        RegardTransformerForConditionalGeneration,
    )
    from regard.sharing.export import export_model

    config_class, model_class = {
        "decoder": (RegardDecoderConfig, RegardDecoderForCausalLM),
        "transformer": (RegardTransformerConfig, RegardTransformerForConditionalGeneration),
    }[parameters["family"]]
    torch.manual_seed(0)
    fields = {*SMALL, *DECODER} - {"family"}
    model = model_class(config_class(**{name: parameters[name] for name in fields}))
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases of 0 and norms of 1 would hide that a side leaves them out.
            parameter.add_(torch.randn_like(parameter), alpha=model.config.initializer_range)
    model.save_pretrained(folder / "regard")
    export_model(folder / "regard", folder / "stock")
    shape = parameters["rows"], parameters["length"]
    prompts = np.random.default_rng(0).integers(SPECIALS, parameters["vocab_size"], shape)
    torch.save(torch.from_numpy(prompts), folder / "prompts.pt")


class GenerationSide(Side):
    """Calls `generate`; what differs is the model."""

    name = "stock"

    def __init__(self, parameters: dict[str, Any], folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

        super().__init__(parameters, folder)
        loader = {"decoder": AutoModelForCausalLM, "transformer": AutoModelForSeq2SeqLM}[parameters["family"]]
        self.model = loader.from_pretrained(folder / self.name).eval()
        self.prompts = torch.load(folder / "prompts.pt")

    def generate(self) -> torch.Tensor:
        """The tokens, with the prompts in front if the model is a decoder."""
        number = self.parameters["new_tokens"]
        return self.model.generate(
            self.prompts,
            attention_mask=torch.ones_like(self.prompts),
            do_sample=False,
            num_beams=1,
            min_new_tokens=number,
            max_new_tokens=number,
        )

    def check(self) -> dict[str, Any]:
        """The tokens."""
        return {"tokens": self.generate().tolist()}

    def run(self, turn: int) -> Work:
        """Generates for all prompts at once."""
        began = time.perf_counter()
        self.generate()
        return Work(time.perf_counter() - began, self.parameters["rows"] * self.parameters["new_tokens"])


class RegardGeneration(GenerationSide):
    """Ours."""

    name = "regard"

    def __init__(self, parameters: dict[str, Any], folder: Path) -> None:
        import regard  # noqa: F401 - registers its models

        super().__init__(parameters, folder)


class GPT2Generation(GenerationSide):
    """transformers' `GPT2LMHeadModel`."""


class MarianGeneration(GenerationSide):
    """transformers' `MarianMTModel`."""


SIDES = {"regard": RegardGeneration, "gpt2": GPT2Generation, "marian": MarianGeneration}
