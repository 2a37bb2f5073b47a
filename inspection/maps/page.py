"""Attention maps as one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np
from PIL import Image

from .tokens import Token, is_right_to_left, printable

# Larger images are embedded as JPEG.
LOSSLESS_PIXELS = 2**20
# More weights, at a byte each, would make a notebook slow to open.
NOTEBOOK_WEIGHTS = 4_000_000


def make_page(
    weights: np.ndarray, description: Mapping[str, Any], layer: int, head: int | str, join_words: bool
) -> str:
    """Returns the HTML page of an attention map.

    Args:
        weights: the attention weights, (layers, heads, queries, keys).
        description: the other data that `page.html` reads; see `AttentionMap._description`.
        layer: number of the layer that the page first shows.
        head: number of the head that the page first shows, or "mean" or "max".
        join_words: whether the page first shows words instead of tokens.
    """
    data = {**description, "layer": layer, "head": head, "joined": join_words}
    scripts = [f'<script type="application/json" id="data">{_to_json(data)}</script>']
    for number, heads in enumerate(weights):
        for place, matrix in enumerate(heads):
            scripts.append(f'<script type="text/plain" id="weights-{number}-{place}">{_pack(matrix)}</script>')
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    before, marker, after = template.partition("<!-- data -->")
    assert marker
    return "".join([before, "\n".join(scripts), after])


def make_frame(weights: np.ndarray, description: Mapping[str, Any]) -> str:
    """Returns the page inside an `iframe`, for a notebook; or a hint to save it if it would be too large.

    Args:
        weights: as for `make_page`.
        description: as for `make_page`.
    """
    if weights.size > NOTEBOOK_WEIGHTS:
        shape = " × ".join(map(str, weights.shape))
        return f"<p>Attention weights, {shape}: too many for a notebook. Write <code>save_html(path)</code>.</p>"
    page = html.escape(make_page(weights, description, len(weights) - 1, "mean", join_words=False))
    return (
        f'<iframe title="Attention map" srcdoc="{page}" sandbox="allow-scripts" loading="lazy" '
        'style="width: 100%; height: 42rem; border: 0"></iframe>'
    )


def describe_tokens(tokens: Sequence[Token]) -> dict[str, Any]:
    """Returns the labels of tokens and their words, as `page.html` reads them."""
    words = "".join(token.word_text for token in tokens if token.span is not None)
    return {
        "direction": "rtl" if is_right_to_left(words) else "ltr",
        "labels": [token.label for token in tokens],
        "pieces": [printable(token.piece) for token in tokens],
        "special": [token.span is None for token in tokens],
        "words": [token.word for token in tokens],
        "wordLabels": {token.word: printable(token.word_text) for token in tokens},
    }


def describe_image(image: Image.Image) -> dict[str, Any]:
    """Returns an image as a data URL with its size, as `page.html` reads it."""
    lossless = image.width * image.height <= LOSSLESS_PIXELS
    kind = "png" if lossless else "jpeg"
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, kind, quality=90)
    encoded = base64.b64encode(buffer.getvalue()).decode("ascii")
    return {"source": f"data:image/{kind};base64,{encoded}", "width": image.width, "height": image.height}


def _to_json(value: Any) -> str:
    # `dumps` escapes everything but ASCII. What is left to escape could end the script element or open a comment.
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _pack(weights: np.ndarray) -> str:
    # The square root keeps the small weights of a long text apart from 0.
    quantised = np.rint(255 * np.sqrt(weights.clip(0, 1))).astype(np.uint8)
    return base64.b64encode(zlib.compress(quantised.tobytes(), 6)).decode("ascii")
