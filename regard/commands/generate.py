"""Generating with a trained model: continuing a text, rewriting one, or captioning an image."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from ..families.seeds import require_seed
from ..loading import for_generation, load_network
from ..modeling.loading.load import require_text
from ..training.generation.generate import require_beams

# Scores divided by much less would overflow.
LEAST_TEMPERATURE = 1e-6


@torch.inference_mode()
def generate_text(
    prompt: str | Path,
    model: str | Path = "runs/decoder",
    *,
    max_new_tokens: int | None = None,
    sample: bool = True,
    temperature: float = 1.0,
    top_k: int = 50,
    top_p: float = 0.9,
    beams: int = 1,
    seed: int | None = None,
) -> str:
    """Generates a text.

    Args:
        prompt: the beginning of a text, for a decoder, which continues it; a source, for an encoder-decoder; the file
            of an image, for a captioner.
        model: folder of a run or of a model, or a Hub id.
        max_new_tokens: largest number of tokens to generate; if None, 64 for a decoder, and for the others as many as
            they were trained on. It is never more than the model has positions for.
        sample: whether a decoder draws each token; if not, it takes the most probable one, as the other families do.
        temperature: temperature of the draw: below 1 sharper, above 1 flatter.
        top_k: the draw is among this many of the most probable tokens; 0: among all.
        top_p: the draw is among the most probable tokens that have this share of the probability.
        beams: number of beams to search with, instead of drawing.
        seed: seed of the draw; None: another text each time.

    Returns:
        The generated text; for a decoder it begins with the prompt.

    Raises:
        ValueError: if there is no such model, the prompt is empty, too long or no image, or an option is out of range.
    """
    for name, value, fits, allowed in (
        ("max_new_tokens", max_new_tokens, max_new_tokens is None or max_new_tokens >= 1, "at least 1"),
        (
            "temperature",
            temperature,
            LEAST_TEMPERATURE <= temperature < math.inf,
            f"at least {LEAST_TEMPERATURE:g}, and finite",
        ),
        ("top_k", top_k, top_k >= 0, "at least 0"),
        ("top_p", top_p, 0 < top_p <= 1, "more than 0 and at most 1"),
    ):
        if not fits:
            raise ValueError(f"`{name}` ({value}) must be {allowed}")
    require_beams(beams)
    if seed is not None:
        require_seed(seed)
    network, processor = load_network(model, for_generation)
    options: dict[str, Any] = {"num_beams": beams}
    if network.config.is_encoder_decoder:
        inputs = _read_source(prompt, processor)
        limit = getattr(network.config, "max_position_embeddings", None)
    else:
        inputs = _read_prompt(str(prompt), processor)
        limit = network.config.max_position_embeddings - inputs["input_ids"].shape[1]
        if limit < 1:
            raise ValueError(
                f"`prompt` has {inputs['input_ids'].shape[1]} tokens, and the model has room for "
                f"{network.config.max_position_embeddings}: shorten it"
            )
        if sample and beams == 1:
            options |= {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        max_new_tokens = max_new_tokens or 64
    if max_new_tokens is not None:
        options["max_new_tokens"] = max_new_tokens if limit is None else min(max_new_tokens, limit)
    if seed is not None:
        set_seed(seed)
    generated = network.generate(**inputs, **options)
    return processor.batch_decode(generated, skip_special_tokens=True)[0]


def _read_source(prompt: str | Path, processor: Any) -> dict[str, Any]:
    if hasattr(processor, "image_processor"):
        if not Path(prompt).is_file():
            raise ValueError(f"`prompt` ({prompt}) must be the file of an image: there is no such file")
        return processor(images=str(prompt), return_tensors="pt")
    return _read_prompt(str(prompt), processor)


def _read_prompt(prompt: str, tokenizer: Any) -> dict[str, Any]:
    if not prompt.strip():
        raise ValueError("`prompt` is empty: give it a word or more")
    require_text(prompt, "prompt")
    return tokenizer(prompt, return_tensors="pt")
