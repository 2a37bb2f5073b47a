"""Following attention step by step, and showing what masks, positions and heads do, for `regard inspect`.

Arguments that several functions share: `model` is the folder of a run or of a model, or a Hub id; `text` is what the
model reads, for an encoder-decoder the source; `target` is what a decoder writes, and if None what the model itself
generates; `image` is the file of the image that a captioner sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..families.seeds import require_seed
from ..inspection.maps.tokens import printable
from ..inspection.steps.dependence import order_effect, position_gradients
from ..inspection.steps.head_distances import HeadDistances, head_distances, plot_head_distances
from ..inspection.steps.trace import format_trace, trace_shapes
from ..inspection.steps.worked_example import parse_matrix, parse_vector, worked_calculation
from ..loading import for_steps, load_network, require_ending
from ..modeling.loading.load import require_text
from ..modeling.losses import shift_right
from ..training.reading.documents import load_documents


def read_inputs(
    network: Any, processor: Any, text: str, target: str | None = None, image: Path | None = None
) -> dict[str, Tensor]:
    """Returns a model's keyword arguments for one text or image, with those of the decoder of an encoder-decoder.

    Raises:
        ValueError: if a text is empty, an image is missing, or an argument is given that the model does not take.
    """
    is_captioner = hasattr(processor, "image_processor")
    if is_captioner != (image is not None):
        raise ValueError(f"`image` ({image}) must be {'the file of an image' if is_captioner else 'left out'}")
    if image is not None and not image.is_file():
        raise ValueError(f"`image` ({image}) must be the file of an image: there is no such file")
    if target is not None and not network.config.is_encoder_decoder:
        raise ValueError("`target` is given, but the model has no decoder beside an encoder")
    tokenizer = processor.tokenizer if is_captioner else processor
    for name, given in (("text", text), ("target", target)):
        if given is not None:
            _require_words(given, name)
    inputs = dict(processor(images=str(image), return_tensors="pt") if image else tokenizer(text, return_tensors="pt"))
    if network.config.is_encoder_decoder:
        if target is None:
            with torch.inference_mode():
                written = network.generate(**inputs)[:, :-1]
            # Tensors of inference mode take no part in gradients.
            inputs["decoder_input_ids"] = written.clone()
        else:
            labels = tokenizer(target, return_tensors="pt")["input_ids"]
            inputs["decoder_input_ids"] = shift_right(labels, network.config.decoder_start_token_id, None)
    return inputs


def _require_words(given: str, name: str) -> None:
    if not given.strip():
        raise ValueError(f"`{name}` is empty: give it a word or more")
    require_text(given, name)


def _tokens(processor: Any, ids: Tensor) -> list[str]:
    tokenizer = getattr(processor, "tokenizer", processor)
    # Decoded, because a byte-level tokenizer spells its tokens in characters of its own.
    return [printable(tokenizer.decode([index])) for index in ids[0].tolist()]


def shape_lines(
    model: str | Path, text: str, target: str | None = None, image: Path | None = None, layer: int = 0
) -> list[str]:
    """Describes each step of a layer's attention: its shape and its values.

    Raises:
        ValueError: if there is no such model or layer, or an input does not suit the model.
    """
    network, processor = load_network(model, for_steps)
    inputs = read_inputs(network, processor, text, target, image)
    traces = trace_shapes(network, inputs, layer)
    lines = [
        f"{name}: {' | '.join(_tokens(processor, inputs[name]))}"
        for name in ("input_ids", "decoder_input_ids")
        if name in inputs
    ]
    for trace in traces:
        # The later calls of a recurrent decoder differ in their numbers alone.
        if trace.call == 0:
            calls = sum(other.layer == trace.layer for other in traces)
            lines += ["", *([f"(the first of {calls} decoder steps)"] if calls > 1 else []), format_trace(trace)]
    return lines


def calculation_lines(
    query: str, keys: str, alignment: str, vector: str | None, matrices: dict[str, str | None]
) -> list[str]:
    """Works out the attention of given vectors, with every sum written out.

    Args:
        query: the numbers of the query.
        keys: the numbers of the keys, which are separated by ";".
        alignment: name of the alignment.
        vector: the numbers of the vector of additive alignment.
        matrices: the other arguments of `worked_calculation`, as text.

    Raises:
        ValueError: if a text holds no numbers, or the numbers don't suit the alignment.
    """
    parsed = {name: None if text is None else parse_matrix(text, name) for name, text in matrices.items()}
    worked = worked_calculation(
        parse_vector(query, "query"),
        parse_matrix(keys, "keys"),
        parsed.pop("values"),
        alignment,
        vector=None if vector is None else parse_vector(vector, "vector"),
        **parsed,
    )
    return list(worked.lines)


def causality_lines(model: str | Path, text: str, target: str | None = None, image: Path | None = None) -> list[str]:
    """Describes how much the output at each token depends on the tokens up to it, and on those after it.

    Raises:
        ValueError: if there is no such model, or an input does not suit it.
    """
    network, processor = load_network(model, for_steps)
    inputs = read_inputs(network, processor, text, target, image)
    gradients = position_gradients(network, inputs)
    tokens = _tokens(processor, inputs["decoder_input_ids" if network.config.is_encoder_decoder else "input_ids"])
    later = gradients.triu(1)
    width = max(map(len, tokens))
    lines = ["Largest gradient of the output at a token by the embeddings of those up to it, and of those after it:"]
    for place, token in enumerate(tokens):
        before, after = float(gradients[place, : place + 1].max()), float(later[place].max())
        lines.append(f"  {place:3}  {token.ljust(width)}  {before:9.3g}  {after:9.3g}")
    if bool((later == 0).all()):
        lines.append("No output depends on a later token: all those gradients are exactly 0.")
    else:
        lines.append(f"Outputs depend on later tokens, by up to {float(later.max()):.3g}: no mask hides the future.")
    return lines


def order_lines(model: str | Path, text: str, seed: int = 0) -> list[str]:
    """Describes how a permutation of a text changes the outputs, with positions and without.

    Raises:
        ValueError: if there is no such model, it reads no text, or the text is empty.
    """
    require_seed(seed)
    network, processor = load_network(model, for_steps)
    if hasattr(processor, "image_processor"):
        raise ValueError(f"`model` ({model}) is a captioner, which reads no text")
    ids = read_inputs(network, processor, text, None if not network.config.is_encoder_decoder else text)["input_ids"]
    effect = order_effect(network, ids, seed)
    lines = [
        f"text:     {' | '.join(_tokens(processor, ids))}",
        f"permuted: {' | '.join(_tokens(processor, ids[:, list(effect.permutation)]))}",
        f"Largest difference between its output and the permuted output (outputs reach {effect.largest:.3g}):",
        f"  with positions     {effect.with_positions:.3g}",
        f"  without positions  {effect.without_positions:.3g}",
    ]
    if effect.without_positions <= 1e-4 * effect.largest:
        lines.append("Without positions the order makes no difference but for rounding.")
    else:
        lines.append("Without positions the order still makes a difference: the causal mask tells it too.")
    return lines


def draw_heads(
    model: str | Path,
    output: str | Path,
    texts: Sequence[str] = (),
    *,
    data: str = "python-docs",
    documents: int = 32,
    max_offset: int = 10,
) -> HeadDistances:
    """Draws the mean weight of each head by the distance between key and query.

    Args:
        model: folder of a run or of a model, or a Hub id.
        output: file of the picture.
        texts: to measure on; if there are none, documents of `data`.
        data: source of texts, as for training.
        documents: largest number of its documents to read.
        max_offset: largest distance to each side that is shown by itself.

    Raises:
        ValueError: if a text is empty, the file can't be written, or the model has no self-attention over a text.
    """
    require_ending(output)
    for text in texts:
        _require_words(text, "text")
    network, tokenizer = load_network(model, for_steps)
    texts = texts or load_documents(data, max_documents=documents)["text"]
    limit = getattr(network.config, "max_position_embeddings", None)
    if limit is None or hasattr(tokenizer, "image_processor"):
        raise ValueError(f"`model` ({model}) has no self-attention over a text")
    encoded = (tokenizer(text, truncation=True, max_length=limit, return_tensors="pt") for text in texts)
    measured = head_distances(network, encoded, max_offset)
    plot_head_distances(measured, output)
    return measured


def head_lines(measured: HeadDistances) -> list[str]:
    """Describes each head in a line: its mean distance, and the offset with the largest weight."""
    lines = [
        f"{measured.texts} texts, {measured.tokens} tokens; with equal weights the mean distance is "
        f"{measured.uniform_distance:.1f}",
        "layer  head  mean distance  most weight at",
    ]
    best = measured.weights.nan_to_num(-1.0).max(dim=-1)
    for layer, (distances, most, places) in enumerate(
        zip(measured.mean_distance, best.values, best.indices, strict=True)
    ):
        for head, distance in enumerate(distances):
            offset = int(measured.offsets[places[head]])
            lines.append(f"{layer:5}  {head:4}  {float(distance):13.1f}  {offset:+d} ({float(most[head]):.2f})")
    return lines
