"""Commands that follow attention step by step, and show what masks, positions and heads do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import PreTrainedConfig

from ..configuration.seeds import require_seed
from ..inspection.maps.tokens import printable
from ..inspection.steps.dependence import order_effect, position_gradients
from ..inspection.steps.head_distances import HeadDistances, head_distances, plot_head_distances
from ..inspection.steps.trace import format_trace, trace_shapes
from ..inspection.steps.worked_example import parse_matrix, parse_vector, worked_calculation
from ..loading import load_network, require_ending
from ..modeling.bert import RegardBertModel
from ..modeling.loading.load import require_text
from ..modeling.losses import shift_right
from ..registration import FAMILIES
from ..training.reading.documents import load_documents
from .generate import GENERATORS

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Model = Annotated[str, typer.Argument(help="Folder of a run or a model, or a Hub id.")]
Text = Annotated[str, typer.Option(help="What the model reads; of an encoder-decoder the source.")]
Target = Annotated[
    str | None, typer.Option(help="What a decoder writes; what the model itself generates, if not given.")
]
Image = Annotated[Path | None, typer.Option(help="File of the image that a captioner sees.")]

_TEXT = "Return the list of all names."


def load_model(model: str | Path) -> tuple[Any, Any]:
    """Loads a model of any family, and its tokenizer or processor.

    Raises:
        ValueError: if there is no such model, or it is of another family.
    """

    def choose(config: PreTrainedConfig) -> Any:
        if config.model_type in ("bert", "regard_bert"):
            return RegardBertModel
        if config.model_type not in GENERATORS:
            families = ", ".join(family.model_type for family in FAMILIES)
            raise ValueError(f"`model` ({model}) is a {config.model_type!r}: it must be one of {families}, or a BERT")
        return GENERATORS[config.model_type]

    return load_network(model, choose)


def read_inputs(
    network: Any, processor: Any, text: str, target: str | None = None, image: Path | None = None
) -> dict[str, Tensor]:
    """A model's keyword arguments for one text or image; with those of its decoder, if it is an encoder-decoder.

    Raises:
        ValueError: if a text is empty, an image is missing, or one is given that the model has no use for.
    """
    is_captioner = hasattr(processor, "image_processor")
    if is_captioner != (image is not None):
        raise ValueError(f"`image` ({image}) must be {'the file of an image' if is_captioner else 'left out'}")
    if image is not None and not image.is_file():
        raise ValueError(f"`image` ({image}) must be the file of an image: there is none of that name")
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
    # As a reader knows them: the tokens of a byte-level tokenizer are spelt in characters of their own.
    return [printable(tokenizer.decode([index])) for index in ids[0].tolist()]


@app.command(short_help="Follow one input through a layer's attention.")
def shapes(
    model: Model,
    text: Text = _TEXT,
    target: Target = None,
    image: Image = None,
    layer: Annotated[int, typer.Option(help="Number of the layer, from 0.")] = 0,
) -> None:
    """Follow one input through a layer's attention: each step, its shape and its values."""
    network, processor = load_model(model)
    inputs = read_inputs(network, processor, text, target, image)
    traces = trace_shapes(network, inputs, layer)
    for name in ("input_ids", "decoder_input_ids"):
        if name in inputs:
            typer.echo(f"{name}: {' | '.join(_tokens(processor, inputs[name]))}")
    for trace in traces:
        # The later calls of a recurrent decoder differ in their numbers alone.
        if trace.call == 0:
            calls = sum(other.layer == trace.layer for other in traces)
            first = f"\n(the first of {calls} decoder steps)" if calls > 1 else ""
            typer.echo(f"{first}\n{format_trace(trace)}")


@app.command(short_help="Work out the attention of given vectors.")
def calculation(
    query: Annotated[str, typer.Option(help="The query's numbers: '1 0'.")],
    keys: Annotated[str, typer.Option(help="The keys, with ; between them: '1 0; 0 1'.")],
    values: Annotated[str | None, typer.Option(help="As many values as keys; the keys if not given.")] = None,
    alignment: Annotated[str, typer.Option(help="dot, scaled_dot, bilinear or additive.")] = "dot",
    matrix: Annotated[str | None, typer.Option(help="W of q · W k, row by row: '1 0; 0 1'.")] = None,
    query_matrix: Annotated[str | None, typer.Option(help="W of v · tanh(W q + U k).")] = None,
    key_matrix: Annotated[str | None, typer.Option(help="U of v · tanh(W q + U k).")] = None,
    vector: Annotated[str | None, typer.Option(help="v of v · tanh(W q + U k).")] = None,
) -> None:
    """Work out scores, weights and context of given vectors, with every sum written out."""

    def matrix_of(text: str | None, name: str) -> list[list[float]] | None:
        return None if text is None else parse_matrix(text, name)

    worked = worked_calculation(
        parse_vector(query, "query"),
        parse_matrix(keys, "keys"),
        matrix_of(values, "values"),
        alignment,
        matrix=matrix_of(matrix, "matrix"),
        query_matrix=matrix_of(query_matrix, "query_matrix"),
        key_matrix=matrix_of(key_matrix, "key_matrix"),
        vector=None if vector is None else parse_vector(vector, "vector"),
    )
    typer.echo("\n".join(worked.lines))


@app.command(short_help="Show whether outputs depend on later tokens.")
def causality(model: Model, text: Text = _TEXT, target: Target = None, image: Image = None) -> None:
    """Show whether outputs depend on later tokens: by their gradients, which the causal mask makes exactly 0."""
    network, processor = load_model(model)
    inputs = read_inputs(network, processor, text, target, image)
    gradients = position_gradients(network, inputs)
    tokens = _tokens(processor, inputs["decoder_input_ids" if network.config.is_encoder_decoder else "input_ids"])
    later = gradients.triu(1)
    width = max(map(len, tokens))
    typer.echo("Largest gradient of the output at a token by the embeddings of those up to it, and of those after it:")
    for place, token in enumerate(tokens):
        before, after = float(gradients[place, : place + 1].max()), float(later[place].max())
        typer.echo(f"  {place:3}  {token.ljust(width)}  {before:9.3g}  {after:9.3g}")
    if bool((later == 0).all()):
        typer.echo("No output depends on a later token: all those gradients are exactly 0.")
    else:
        typer.echo(f"Outputs depend on later tokens, by up to {float(later.max()):.3g}: no mask hides the future.")


@app.command(short_help="Show whether the order of a text is seen.")
def order(
    model: Model,
    text: Text = _TEXT,
    seed: Annotated[int, typer.Option(help="Of the permutation.")] = 0,
) -> None:
    """Permute a text, with position embeddings and with these set to zero: only the former tell its order."""
    require_seed(seed)
    network, processor = load_model(model)
    if hasattr(processor, "image_processor"):
        raise ValueError(f"`model` ({model}) is a captioner, which reads no text")
    ids = read_inputs(network, processor, text, None if not network.config.is_encoder_decoder else text)["input_ids"]
    effect = order_effect(network, ids, seed)
    typer.echo(f"text:     {' | '.join(_tokens(processor, ids))}")
    typer.echo(f"permuted: {' | '.join(_tokens(processor, ids[:, list(effect.permutation)]))}")
    typer.echo(f"Largest difference between its output and the permuted output (outputs reach {effect.largest:.3g}):")
    typer.echo(f"  with positions     {effect.with_positions:.3g}")
    typer.echo(f"  without positions  {effect.without_positions:.3g}")
    if effect.without_positions <= 1e-4 * effect.largest:
        typer.echo("Without positions the order makes no difference but for rounding.")
    else:
        typer.echo("Without positions the order still makes a difference: the causal mask tells it too.")


@app.command(short_help="Draw where each head looks.")
def heads(
    model: Model,
    text: Annotated[list[str] | None, typer.Option(help="A text. Repeat it for several.")] = None,
    data: Annotated[str, typer.Option(help="Source of texts, as for `train`, if no text is given.")] = "python-docs",
    documents: Annotated[int, typer.Option(help="How many of its documents are read.")] = 32,
    max_offset: Annotated[int, typer.Option(help="How far to each side places are told apart.")] = 10,
    output: Annotated[Path, typer.Option(help="File of the picture.")] = Path("heads.png"),
) -> None:
    """Draw where each head looks: its mean weight by the distance between key and query."""
    require_ending(output)
    for one in text or ():
        _require_words(one, "text")
    network, tokenizer = load_model(model)
    texts = text or load_documents(data, max_documents=documents)["text"]
    limit = getattr(network.config, "max_position_embeddings", None)
    if limit is None or hasattr(tokenizer, "image_processor"):
        raise ValueError(f"`model` ({model}) has no self-attention over a text")
    encoded = (tokenizer(one, truncation=True, max_length=limit, return_tensors="pt") for one in texts)
    measured = head_distances(network, encoded, max_offset)
    plot_head_distances(measured, output)
    typer.echo("\n".join(head_lines(measured)))
    typer.echo(f"Drawn in {output}")


def head_lines(measured: HeadDistances) -> list[str]:
    """A line for each head: its mean distance, and the offset that it gives most weight to."""
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
