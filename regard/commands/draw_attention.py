"""Drawing the attention maps of a trained model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModel,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
)

from ..inspection.maps.attention_map import AttentionMap, attention_map
from ..loading import load_network, require_ending
from ..modeling.loading.load import require_text

FORMATS = (".html", ".png", ".svg")


def load_attentive(model: str | Path) -> tuple[Any, Any]:
    """Loads a model, ours or stock, and its tokenizer or processor.

    Raises:
        ValueError: if there is no such model.
    """
    return load_network(model, _class_that_shows)


def _class_that_shows(config: PreTrainedConfig) -> Any:
    if not config.is_encoder_decoder:
        return AutoModel
    # A target that is not given must be generated.
    captions = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if captions else AutoModelForSeq2SeqLM


def draw_attention(
    model: str | Path,
    output: str | Path,
    text: str | None = None,
    *,
    text_pair: str | None = None,
    target: str | None = None,
    image: str | Path | None = None,
    kind: str | None = None,
    layer: int = -1,
    head: int | str = "mean",
    words: bool = False,
) -> AttentionMap:
    """Has a trained model look at a text or an image, and draws where it looked.

    Args:
        model: folder of a run or of a model, or a Hub id.
        output: the file to write: a page (.html) with all layers and heads, or a picture (.png or .svg) of one layer.
        text: see `attention_map`, as for the four after it.
        text_pair: see there.
        target: see there.
        image: file of an image, see there.
        kind: see there.
        layer: the layer of the picture, or that the page begins with; from 0, or from the last one, -1.
        head: its head, or "mean" or "max" over all.
        words: whether the pieces of words are joined; a page has a switch for it.

    Returns:
        The map.

    Raises:
        ValueError: for a model, an input, a layer or a head that won't do, or a file of another kind.
    """
    file = Path(output)
    require_ending(file, FORMATS)
    if image is not None and not Path(image).is_file():
        raise ValueError(f"`image` ({image}) must be the file of an image: there is none of that name")
    for name, given in (("text", text), ("text_pair", text_pair), ("target", target)):
        require_text(given or "", name)
    network, processor = load_attentive(model)
    source = None if image is None else str(image)
    seen = attention_map(network, processor, text, text_pair=text_pair, target=target, image=source, kind=kind)
    seen = replace(seen, title=str(model))
    if file.suffix == ".html":
        seen.save_html(file, layer, head, words)
    else:
        (seen.by_words() if words else seen).figure(layer, head).savefig(file, dpi=150)
    return seen
