"""Traces of an attention layer: every tensor of the model's own forward pass, step by step, with its shape.

Dimension letters: `LETTERS` explains them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ...modeling import attention
from ...modeling.attention import (
    AdditiveAlignment,
    Alignment,
    BilinearAlignment,
    MultiHeadAttention,
    ScaledDotAlignment,
)
from ...modeling.captioner import RegardCaptionerForConditionalGeneration
from ...modeling.recurrent import RecurrentDecoderStep
from ..maps.eager_mode import eager_attention

LETTERS = {
    "B": "batch",
    "H": "heads",
    "Q": "queries",
    "K": "keys and values",
    "P": "cells of the image, its keys and values",
    "D": "width of a head",
    "E": "width of the model",
    "C": "width of the encoder's states",
    "A": "width of the alignment",
    "F": "channels of the feature map",
    "Y": "its rows",
    "X": "its columns",
}


@dataclass(frozen=True)
class Step:
    """One tensor of a trace.

    Attributes:
        stage: "input", "project", "score", "normalize", "combine" or "output".
        name: name of the tensor.
        letters: the letters of its dimensions, keys of `LETTERS`, such as "B H Q K".
        meaning: how the tensor is computed from those before it.
        tensor: the tensor that the model computed, detached.
    """

    stage: str
    name: str
    letters: str
    meaning: str
    tensor: Tensor


@dataclass(frozen=True)
class Trace:
    """The tensors of one call of one attention layer.

    Attributes:
        layer: name of the module.
        kind: "self-attention", "cross-attention", "spatial attention" or the class name of an alignment.
        call: number of the call in the forward pass, from 0; a recurrent decoder makes one call per target token.
        steps: the tensors in the order in which they are computed.
    """

    layer: str
    kind: str
    call: int
    steps: tuple[Step, ...]

    def __getitem__(self, name: str) -> Tensor:
        """Returns the tensor of the step with a name."""
        return next(step.tensor for step in self.steps if step.name == name)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dimension letter."""
        return {
            letter: size
            for step in self.steps
            for letter, size in zip(step.letters.split(), step.tensor.shape, strict=True)
        }


# Steps as (stage, name, letters, meaning).
_Outline = tuple[tuple[str, str, str, str], ...]
_AFTER_SCORES: _Outline = (
    ("normalize", "masked", "B Q K", "{scored}, with the lowest number where the mask hides a key"),
    ("normalize", "weights", "B Q K", "softmax of masked over the keys; 0 where the mask hides a key"),
)


def _heads_outline(is_cross: bool) -> _Outline:
    source = "memory" if is_cross else "input"
    return (
        ("input", "input", "B Q E", "the input of the layer"),
        *((("input", "memory", "B K E", "the output of the encoder"),) if is_cross else ()),
        ("project", "query", "B Q E", "input · W_query + b_query"),
        ("project", "key", "B K E", f"{source} · W_key + b_key"),
        ("project", "value", "B K E", f"{source} · W_value + b_value"),
        ("project", "query heads", "B H Q D", "query, split into heads"),
        ("project", "key heads", "B H K D", "key, split into heads"),
        ("project", "value heads", "B H K D", "value, split into heads"),
        ("score", "scores", "B H Q K", "query heads · key heads"),
        ("score", "scaled", "B H Q K", "scores / √D"),
        *((stage, name, "B H Q K", meaning.format(scored="scaled")) for stage, name, _, meaning in _AFTER_SCORES),
        ("combine", "context", "B H Q D", "weights · value heads"),
        ("combine", "merged", "B Q E", "context, heads concatenated"),
        ("output", "output", "B Q E", "merged · W_output + b_output"),
    )


def _alignment_outline(alignment: Alignment) -> _Outline:
    scaled = isinstance(alignment, ScaledDotAlignment)
    project: _Outline = (("project", "projected keys", "B K E", "the states themselves"),)
    score: _Outline = (("score", "scores", "B Q K", "query state · projected keys"),)
    if isinstance(alignment, BilinearAlignment):
        project = (("project", "projected keys", "B K E", "W · states"),)
    elif isinstance(alignment, AdditiveAlignment):
        project = (
            ("project", "projected keys", "B K A", "U · states"),
            ("project", "projected query", "B Q A", "W · query state + b"),
        )
        score = (
            ("score", "matched", "B Q K A", "tanh(projected query + projected keys)"),
            ("score", "scores", "B Q K", "v · matched"),
        )
    elif scaled:
        score = (*score, ("score", "scaled", "B Q K", "scores / √E"))
    return (
        ("input", "query state", "B Q E", "state of the decoder's last layer before it reads the token"),
        ("input", "states", "B K C", "the keys and values"),
        *project,
        *score,
        *(
            (stage, name, letters, meaning.format(scored="scaled" if scaled else "scores"))
            for stage, name, letters, meaning in _AFTER_SCORES
        ),
        ("combine", "context", "B Q C", "weights · states"),
    )


class _SoftmaxInput(TorchFunctionMode):
    """Notes the input of every softmax."""

    def __init__(self, note: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.softmax:
            self.note("masked", args[0])
        return func(*args, **(kwargs or {}))


class _Recorder:
    """Notes the tensors of the chosen layers while they run, and ignores all others."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, dict[str, Tensor]]] = []
        self.running = False
        self.feature_map: Tensor | None = None

    def note(self, name: str, tensor: Tensor) -> None:
        if self.running:
            self.calls[-1][1][name] = tensor.detach()

    def begin(self, module: nn.Module, *_: Any) -> None:
        self.calls.append((module, {}))
        self.running = True

    def end(self, *_: Any) -> None:
        self.running = False

    def note_feature_map(self, module: nn.Module, given: Any, output: Any) -> None:
        self.feature_map = output.feature_maps[-1].detach()

    # Wrappers of the three functions of `modeling/attention.py` that note their inputs and outputs.

    def dot_scores(self, original: Callable, query: Tensor, keys: Tensor, scale: float = 1.0) -> Tensor:
        scaled = original(query, keys, scale)
        if self.running:
            self.note("query heads", query)
            self.note("key heads", keys)
            # The one tensor that the models do not compute: they scale the query before the product, which takes less
            # work than scaling the scores. Here the same function runs on the same tensors without the scale.
            self.note("scores", original(query, keys))
            self.note("scaled", scaled)
        return scaled

    def normalize(self, original: Callable, *args: Any, **kwargs: Any) -> Tensor:
        with _SoftmaxInput(self.note):
            weights = original(*args, **kwargs)
        self.note("weights", weights)
        return weights

    def combine(self, original: Callable, weights: Tensor, values: Tensor) -> Tensor:
        context = original(weights, values)
        self.note("value heads", values)
        self.note("states", values)
        self.note("context", context)
        return context


def _hooks_of_heads(layer: MultiHeadAttention, recorder: _Recorder) -> Iterator[Any]:
    def note_input(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        recorder.note("input", args[0])
        if kwargs.get("memory") is not None:
            recorder.note("memory", kwargs["memory"])

    def note_parts(names: tuple[str, ...], module: nn.Module, given: Any, output: Tensor) -> None:
        for name, part in zip(names, output.chunk(len(names), dim=-1), strict=True):
            recorder.note(name, part)

    yield layer.register_forward_pre_hook(note_input, with_kwargs=True)
    if layer.is_cross_attention:
        yield layer.query.register_forward_hook(partial(note_parts, ("query",)))
        yield layer.key_value.register_forward_hook(partial(note_parts, ("key", "value")))
    else:
        yield layer.query_key_value.register_forward_hook(partial(note_parts, ("query", "key", "value")))
    yield layer.output.register_forward_pre_hook(lambda module, given: recorder.note("merged", given[0]))
    yield layer.output.register_forward_hook(lambda module, given, output: recorder.note("output", output))


def _hooks_of_alignment(alignment: Alignment, recorder: _Recorder) -> Iterator[Any]:
    def note_scores(module: nn.Module, given: tuple[Tensor, Tensor], output: Tensor) -> None:
        recorder.note("query state", given[0])
        recorder.note("projected keys", given[1])
        if not isinstance(alignment, ScaledDotAlignment):
            recorder.note("scores", output)

    yield alignment.register_forward_hook(note_scores)
    if isinstance(alignment, AdditiveAlignment):
        yield alignment.query.register_forward_hook(
            lambda module, given, output: recorder.note("projected query", output)
        )
        yield alignment.score.register_forward_pre_hook(lambda module, given: recorder.note("matched", given[0]))


def _attending(model: PreTrainedModel, layer: int) -> dict[nn.Module, str]:
    """Returns the attention modules of a layer, with their names."""
    found = {
        module: (name, module.layer_idx if isinstance(module, MultiHeadAttention) else 0)
        for name, module in model.named_modules()
        if isinstance(module, MultiHeadAttention)
        or (isinstance(module, RecurrentDecoderStep) and module.alignment is not None)
    }
    if not found:
        raise ValueError(
            f"`model` is a {type(model).__name__} without attention: it must be a model of regard with attention"
        )
    count = 1 + max(index for _, index in found.values())
    if not 0 <= layer < count:
        raise ValueError(
            f"`layer` ({layer}) must be at least 0 and less than {count}, the number of layers with attention"
        )
    return {module: name for module, (name, index) in found.items() if index == layer}


def trace_shapes(model: PreTrainedModel, inputs: Mapping[str, Any], layer: int = 0) -> list[Trace]:
    """Traces one input through the attention of one layer.

    The tensors are those of the model's own forward pass, in evaluation mode and on the eager kernel. Hooks note the
    inputs and outputs of the layer's projections, and `dot_scores`, `normalize` and `combine` of
    `modeling/attention.py` are patched to note theirs. Hooks and patches are removed afterwards, also after an error.
    No other thread should run a model of the package in the meantime.

    Args:
        model: any model of the package with attention.
        inputs: keyword arguments of the model, as its tokenizer or processor returns them.
        layer: number of the layer, from 0; in an encoder-decoder the number of an encoder and of a decoder layer.

    Returns:
        A trace for each call of each attention module of the layer, in order of the calls. A recurrent decoder has one
        for each target token.

    Raises:
        ValueError: if there is no such layer, the model has no attention, or the inputs do not suit it.
    """
    chosen = _attending(model, layer)
    recorder = _Recorder()
    with ExitStack() as stack:
        stack.enter_context(eager_attention(model))
        for name in ("dot_scores", "normalize", "combine"):
            own = partial(getattr(recorder, name), getattr(attention, name))
            stack.enter_context(patch.object(attention, name, own))
        for module in chosen:
            handles = [module.register_forward_pre_hook(recorder.begin)]
            if isinstance(module, MultiHeadAttention):
                handles += _hooks_of_heads(module, recorder)
            elif isinstance(module, RecurrentDecoderStep) and module.alignment is not None:
                handles += _hooks_of_alignment(module.alignment, recorder)
            handles.append(module.register_forward_hook(recorder.end))
            for handle in handles:
                stack.callback(handle.remove)
        if isinstance(model, RegardCaptionerForConditionalGeneration):
            stack.callback(model.encoder.backbone.register_forward_hook(recorder.note_feature_map).remove)
        model(**{**inputs, "output_attentions": True, "return_dict": True})

    traces: list[Trace] = []
    for module, noted in recorder.calls:
        call = sum(trace.layer == chosen[module] for trace in traces)
        traces.append(_make_trace(module, chosen[module], call, noted, recorder.feature_map))
    return traces


def _make_trace(
    module: nn.Module, name: str, call: int, noted: dict[str, Tensor], feature_map: Tensor | None
) -> Trace:
    outline: _Outline
    if isinstance(module, MultiHeadAttention):
        outline = _heads_outline(module.is_cross_attention)
        kind = "cross-attention" if module.is_cross_attention else "self-attention"
    else:
        assert isinstance(module, RecurrentDecoderStep)
        assert module.alignment is not None
        outline, kind = _alignment_outline(module.alignment), type(module.alignment).__name__
    if feature_map is not None and kind != "self-attention":
        kind = "spatial attention" if kind == "cross-attention" else f"spatial attention, {kind}"
        noted = {"feature map": feature_map, **noted}
        # The keys are the cells of the image, and the states are as wide as the decoder.
        letters = str.maketrans({"K": "P", "C": "E"})
        outline = (
            ("input", "feature map", "B F Y X", "output of the backbone; its cells are the keys and values"),
            *((stage, step, own.translate(letters), meaning) for stage, step, own, meaning in outline),
        )
    steps = tuple(Step(stage, step, letters, meaning, noted[step]) for stage, step, letters, meaning in outline)
    return Trace(name, kind, call, steps)


def _summary(step: Step) -> tuple[str, str, str, str]:
    """Returns the smallest, mean and largest unmasked value, and the meaning with the number of masked values."""
    hidden = step.tensor == torch.finfo(step.tensor.dtype).min
    seen = step.tensor[~hidden].float()
    shown = [f"{float(value):.3g}" for value in (seen.min(), seen.mean(), seen.max())] if len(seen) else [""] * 3
    count = f"; hidden: {int(hidden.sum())} of {hidden.numel()}" if hidden.any() else ""
    return shown[0], shown[1], shown[2], step.meaning + count


def format_trace(trace: Trace) -> str:
    """Returns a trace as a table: each step with its stage, letters, shape, and smallest, mean and largest value."""
    header = ("", "step", "letters", "shape", "min", "mean", "max", "")
    rows = [header]
    stage = ""
    for step in trace.steps:
        shape = " × ".join(map(str, step.tensor.shape))
        rows.append(("" if step.stage == stage else step.stage, step.name, step.letters, shape, *_summary(step)))
        stage = step.stage
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{trace.layer}: {trace.kind}"]
    lines += [f"  {letter} = {size}, {LETTERS[letter]}" for letter, size in trace.sizes.items()]
    for row in rows:
        cells = [
            cell.rjust(width) if 4 <= place <= 6 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
