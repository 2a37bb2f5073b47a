"""Worked examples of attention: scores, weights and context vector of given vectors, with every sum written out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...modeling.attention import ALIGNMENTS, AdditiveAlignment, Alignment, attend

# The arguments of `worked_calculation` that hold the parameters of each alignment.
_PARAMETERS = {
    "dot": (),
    "scaled_dot": (),
    "bilinear": ("matrix",),
    "additive": ("query_matrix", "key_matrix", "vector"),
}

Vector = Sequence[float]
Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Calculation:
    """The result of attending from one query to keys and values.

    Attributes:
        alignment: name of the alignment.
        scores: the score of each key.
        weights: the weight of each key; the weights sum to one.
        context: the context vector, the weighted sum of the values.
        lines: the calculation as lines of text, with every sum written out.
    """

    alignment: str
    scores: tuple[float, ...]
    weights: tuple[float, ...]
    context: tuple[float, ...]
    lines: tuple[str, ...]


def parse_vector(text: str, name: str) -> list[float]:
    """Reads numbers separated by spaces or commas.

    Raises:
        ValueError: if there are no numbers, or a part is not a number.
    """
    numbers = []
    for word in text.replace(",", " ").split():
        try:
            numbers.append(float(word))
        except ValueError:
            raise ValueError(f"`{name}` ({text!r}) holds {word!r}, which is not a number") from None
    if not numbers:
        raise ValueError(f"`{name}` ({text!r}) must hold at least one number, such as '1 0.5'")
    return numbers


def parse_matrix(text: str, name: str) -> list[list[float]]:
    """Reads rows separated by semicolons, each as `parse_vector` does."""
    return [parse_vector(row, name) for row in text.split(";")]


def _vector(numbers: Vector, name: str) -> Tensor:
    if not len(numbers) or not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"`{name}` ({list(numbers)}) must hold finite numbers, at least one")
    return torch.tensor(numbers, dtype=torch.float64)


def _matrix(rows: Matrix, name: str) -> Tensor:
    if not len(rows):
        raise ValueError(f"`{name}` must hold at least one row")
    widths = sorted({len(row) for row in rows})
    if len(widths) > 1:
        raise ValueError(
            f"`{name}` has rows of {' and of '.join(map(str, widths))} numbers: they must be equally long"
        )
    return torch.stack([_vector(row, name) for row in rows])


def _require_shape(name: str, tensor: Tensor, shape: tuple[int, ...], why: str) -> None:
    if tensor.shape != shape:
        found, allowed = (" × ".join(map(str, sizes)) for sizes in (tensor.shape, shape))
        raise ValueError(f"`{name}` is {found}, but must be {allowed}: {why}")


def worked_calculation(
    query: Vector,
    keys: Matrix,
    values: Matrix | None = None,
    alignment: str = "dot",
    *,
    matrix: Matrix | None = None,
    query_matrix: Matrix | None = None,
    key_matrix: Matrix | None = None,
    vector: Vector | None = None,
) -> Calculation:
    """Attends from a query to keys and values, and writes the calculation out.

    The scores, weights and context come from the package's own alignment and attention, in float64.

    Args:
        query: the query vector q.
        keys: the key vectors k1, k2 and so on.
        values: the value vectors v1, v2 and so on, one for each key; None to use the keys.
        alignment: "dot" (q · k), "scaled_dot" (q · k / √d), "bilinear" (q · W k) or "additive" (v · tanh(W q + U k)).
        matrix: W of the bilinear alignment, with as many rows as q has numbers and as many columns as a key has.
        query_matrix: W of the additive alignment, with as many columns as q has numbers.
        key_matrix: U of the additive alignment, with as many rows as W and as many columns as a key has numbers.
        vector: v of the additive alignment, with as many numbers as W has rows.

    Raises:
        ValueError: if there is no such alignment, a parameter is missing or belongs to another alignment, or the sizes
            do not match.
    """
    if alignment not in ALIGNMENTS:
        raise ValueError(f"`alignment` ({alignment!r}) must be one of {', '.join(ALIGNMENTS)}")
    given = {"matrix": matrix, "query_matrix": query_matrix, "key_matrix": key_matrix, "vector": vector}
    for name, parameter in given.items():
        if parameter is not None and name not in _PARAMETERS[alignment]:
            raise ValueError(f"`{name}` is given, but the alignment {alignment!r} does not use it")
        if parameter is None and name in _PARAMETERS[alignment]:
            raise ValueError(f"`{name}` is missing: the alignment {alignment!r} needs it")
    q, k = _vector(query, "query"), _matrix(keys, "keys")
    v = k if values is None else _matrix(values, "values")
    if len(v) != len(k):
        raise ValueError(f"`values` has {len(v)} rows, but `keys` has {len(k)}: there must be one value for each key")
    layer, scoring = _make_alignment(alignment, q, k, matrix, query_matrix, key_matrix, vector)

    projected = layer.project_keys(k[None])
    scores = layer(q[None, None], projected)[0, 0]
    if not scores.isfinite().all():
        raise ValueError(f"`query` and `keys` give the scores {_show(scores)}: their numbers must be smaller")
    context, weights = (each[0, 0] for each in attend(layer, q[None, None], projected, v[None]))
    lines = [f"query q = {_show(q)}"]
    lines += [f"key k{number} = {_show(row)}" for number, row in enumerate(k, 1)]
    lines += [f"value v{number} = {_show(row)}" for number, row in enumerate(v, 1)]
    lines += ["", *scoring, "", *_softmax_lines(scores, weights), "", *_context_lines(weights, v, context)]
    return Calculation(
        alignment, tuple(scores.tolist()), tuple(weights.tolist()), tuple(context.tolist()), tuple(lines)
    )


@torch.no_grad()
def _make_alignment(
    name: str,
    q: Tensor,
    k: Tensor,
    matrix: Matrix | None,
    query_matrix: Matrix | None,
    key_matrix: Matrix | None,
    vector: Vector | None,
) -> tuple[Alignment, list[str]]:
    """Returns the alignment with these parameters, and the lines that explain its scores."""
    width, key_width = len(q), k.shape[1]
    if name == "additive":
        assert query_matrix is not None
        assert key_matrix is not None
        assert vector is not None
        w, u, v = _matrix(query_matrix, "query_matrix"), _matrix(key_matrix, "key_matrix"), _vector(vector, "vector")
        _require_shape("query_matrix", w, (len(w), width), "as many columns as `query` has numbers")
        _require_shape("key_matrix", u, (len(w), key_width), "rows as `query_matrix`, columns as a key has numbers")
        _require_shape("vector", v, (len(w),), "as many numbers as `query_matrix` has rows")
        additive = AdditiveAlignment(width, key_width, len(w)).double()
        for parameter, value in zip(additive.parameters(), (w, torch.zeros(len(w)), u, v[None]), strict=True):
            parameter.copy_(value)
        return additive.requires_grad_(False), _additive_lines(q, k, w, u, v)
    layer = ALIGNMENTS[name](width, key_width).double().requires_grad_(False)
    if matrix is None:
        return layer, _dot_lines(q, k, width if name == "scaled_dot" else None)
    w = _matrix(matrix, "matrix")
    _require_shape("matrix", w, (width, key_width), "rows as `query` has numbers, columns as a key has")
    layer.get_parameter("key.weight").copy_(w)
    return layer, _bilinear_lines(q, k, w)


def _number(number: float | Tensor) -> str:
    """Formats a number with at most five digits and no trailing zeros."""
    text = f"{float(number):.5g}"
    return "0" if text == "-0" else text


def _factor(number: float | Tensor) -> str:
    text = _number(number)
    return f"({text})" if text.startswith("-") else text


def _show(vector: Tensor) -> str:
    return f"({', '.join(map(_number, vector))})"


def _product(left: Tensor, right: Tensor) -> str:
    """Writes out the dot product of two vectors: "1·0.5 + 0·2 = 0.5"."""
    terms = " + ".join(f"{_factor(a)}·{_factor(b)}" for a, b in zip(left, right, strict=True))
    return f"{terms} = {_number(left @ right)}"


def _matrix_lines(name: str, matrix: Tensor, of: str, vector: Tensor) -> list[str]:
    """Writes out the product of a matrix and a vector, with a line for each row."""
    rows = [f"    row {number}: {_product(row, vector)}" for number, row in enumerate(matrix, 1)]
    return [f"  {name} {of} = {_show(matrix @ vector)}", *rows]


def _dot_lines(q: Tensor, k: Tensor, width: int | None) -> list[str]:
    lines = [f"scores: q · k / √{width}" if width else "scores: q · k"]
    for number, key in enumerate(k, 1):
        lines.append(f"  q · k{number} = {_product(q, key)}")
        if width:
            dot = q @ key
            lines.append(
                f"  score {number} = {_number(dot)} / √{width} = {_number(dot)} / {_number(width**0.5)}"
                f" = {_number(dot / width**0.5)}"
            )
    return lines


def _bilinear_lines(q: Tensor, k: Tensor, w: Tensor) -> list[str]:
    lines = ["scores: q · W k"]
    for number, key in enumerate(k, 1):
        lines += _matrix_lines("W", w, f"k{number}", key)
        lines.append(f"  q · W k{number} = {_product(q, w @ key)}")
    return lines


def _additive_lines(q: Tensor, k: Tensor, w: Tensor, u: Tensor, v: Tensor) -> list[str]:
    lines = ["scores: v · tanh(W q + U k)", *_matrix_lines("W", w, "q", q)]
    for number, key in enumerate(k, 1):
        lines += _matrix_lines("U", u, f"k{number}", key)
        total = w @ q + u @ key
        matched = torch.tanh(total)
        lines.append(f"  tanh(W q + U k{number}) = tanh{_show(total)} = {_show(matched)}")
        lines.append(f"  v · tanh(W q + U k{number}) = {_product(v, matched)}")
    return lines


def _softmax_lines(scores: Tensor, weights: Tensor) -> list[str]:
    # Subtracting the largest score keeps the powers readable, and does not change the softmax.
    largest = scores.max() if scores.abs().max() > 20 else torch.tensor(0.0, dtype=scores.dtype)
    powers = torch.exp(scores - largest)
    total = _number(powers.sum())
    subtracted = f" minus the largest ({_number(largest)})" if largest else ""
    lines = [f"weights: softmax of the scores{subtracted}"]
    for score, power in zip(scores, powers, strict=True):
        lines.append(f"  exp({_number(score - largest)}) = {_number(power)}")
    lines.append(f"  sum = {' + '.join(map(_number, powers))} = {total}")
    for number, (power, weight) in enumerate(zip(powers, weights, strict=True), 1):
        lines.append(f"  weight {number} = {_number(power)} / {total} = {_number(weight)}")
    return lines


def _context_lines(weights: Tensor, v: Tensor, context: Tensor) -> list[str]:
    names = " + ".join(f"weight {number} · v{number}" for number in range(1, len(v) + 1))
    columns = [f"  number {number}: {_product(weights, column)}" for number, column in enumerate(v.T, 1)]
    return [f"context = {names}", *columns, f"  context = {_show(context)}"]
