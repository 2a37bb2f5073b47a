"""Attention maps as one page that opens in any browser, with all it needs in itself."""

from __future__ import annotations

import base64
import html
import io
import json
import zlib
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from .tokens import Token, is_right_to_left, printable

if TYPE_CHECKING:
    from .maps import AttentionMap

# Larger ones go into the page as JPEG.
LOSSLESS_PIXELS = 2**20
# More would make a notebook slow to open; a weight takes a byte.
NOTEBOOK_WEIGHTS = 4_000_000


def make_page(attention: AttentionMap, layer: int, head: int | str, words: bool) -> str:
    """The page of a map that begins with a layer and a head, and with tokens or words."""
    data = {**_describe(attention), "layer": layer, "head": head, "joined": words}
    scripts = [f'<script type="application/json" id="data">{_to_json(data)}</script>']
    for number, heads in enumerate(attention.weights):
        for place, weights in enumerate(heads):
            scripts.append(f'<script type="text/plain" id="weights-{number}-{place}">{_pack(weights)}</script>')
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    before, marker, after = template.partition("<!-- data -->")
    assert marker
    return "".join([before, "\n".join(scripts), after])


def make_frame(attention: AttentionMap) -> str:
    """The page in a frame, for a notebook."""
    if attention.weights.size > NOTEBOOK_WEIGHTS:
        shape = " × ".join(map(str, attention.weights.shape))
        return f"<p>Attention weights, {shape}: too many for a notebook. Write <code>save_html(path)</code>.</p>"
    page = html.escape(make_page(attention, attention.layers - 1, "mean", words=False))
    return (
        f'<iframe title="Attention map" srcdoc="{page}" sandbox="allow-scripts" loading="lazy" '
        'style="width: 100%; height: 42rem; border: 0"></iframe>'
    )


def _describe(attention: AttentionMap) -> dict[str, Any]:
    same = attention.kind in ("self", "encoder", "decoder")
    image = attention.image
    return {
        "title": printable(attention.title),
        "kind": attention.kind,
        "layers": [attention.layer_name(layer) for layer in range(attention.layers)],
        "heads": attention.heads,
        "same": same,
        "queries": _describe_tokens(attention.queries),
        "keys": None if same else _describe_tokens(attention.keys),
        "grid": attention.grid,
        "image": None if image is None else {"source": _embed(image), "width": image.width, "height": image.height},
    }


def _describe_tokens(tokens: tuple[Token, ...]) -> dict[str, Any]:
    words = "".join(token.word_text for token in tokens if token.span is not None)
    return {
        "direction": "rtl" if is_right_to_left(words) else "ltr",
        "labels": [token.label for token in tokens],
        "pieces": [printable(token.piece) for token in tokens],
        "special": [token.span is None for token in tokens],
        "words": [token.word for token in tokens],
        "wordLabels": {token.word: printable(token.word_text) for token in tokens},
    }


def _to_json(value: Any) -> str:
    # All but ASCII is escaped already; nothing must end the element, or open a comment in it.
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _pack(weights: np.ndarray) -> str:
    # By the square root, so that of a long text the small weights are not all 0.
    quantised = np.rint(255 * np.sqrt(weights.clip(0, 1))).astype(np.uint8)
    return base64.b64encode(zlib.compress(quantised.tobytes(), 6)).decode("ascii")


def _embed(image: Image.Image) -> str:
    lossless = image.width * image.height <= LOSSLESS_PIXELS
    kind = "png" if lossless else "jpeg"
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, kind, quality=90)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
