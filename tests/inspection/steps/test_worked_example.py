"""The worked calculation against numbers worked out by hand; the hand's working stands in the comments."""

import math
import re

import pytest
import torch

from regard.inspection.steps.worked_example import parse_matrix, parse_vector, worked_calculation
from regard.modeling.attention import ALIGNMENTS


def test_dot():
    # q = (1, 2), k1 = (2, 1), k2 = (1, -1)
    #   q · k1 = 1·2 + 2·1 = 4            q · k2 = 1·1 + 2·(-1) = -1
    #   e^4 = 54.59815, e^-1 = 0.367879   sum = 54.966029
    #   weights 54.59815 / 54.966029 = 0.9933071, 0.367879 / 54.966029 = 0.0066929
    # v1 = (10, 0, 1), v2 = (0, 5, 1)
    #   context = (9.933071, 5 · 0.0066929 = 0.0334643, 1)
    worked = worked_calculation([1, 2], [[2, 1], [1, -1]], [[10, 0, 1], [0, 5, 1]])
    assert worked.scores == (4, -1)
    assert worked.weights == pytest.approx((0.9933071, 0.0066929), abs=1e-7)
    assert worked.context == pytest.approx((9.933071, 0.0334643, 1.0), abs=1e-6)
    for line in (
        "  q · k1 = 1·2 + 2·1 = 4",
        "  q · k2 = 1·1 + 2·(-1) = -1",
        "  exp(4) = 54.598",
        "  exp(-1) = 0.36788",
        "  sum = 54.598 + 0.36788 = 54.966",
        "  weight 1 = 54.598 / 54.966 = 0.99331",
        "  number 1: 0.99331·10 + 0.0066929·0 = 9.9331",
        "  context = (9.9331, 0.033464, 1)",
    ):
        assert line in worked.lines


def test_scaled_dot():
    # q = (1, 1, 1, 1), d = 4, √d = 2
    #   q · k1 = 2 + 0 + 0 + 0 = 2, score 2 / 2 = 1     q · k2 = 0, score 0
    #   e^1 = 2.718282, e^0 = 1, sum 3.718282, weights 0.7310586 and 0.2689414
    # values 3 and 7: context 3 · 0.7310586 + 7 · 0.2689414 = 2.1931758 + 1.8825898 = 4.0757656
    worked = worked_calculation([1, 1, 1, 1], [[2, 0, 0, 0], [0, 0, 0, 0]], [[3], [7]], "scaled_dot")
    assert worked.scores == (1, 0)
    assert worked.weights == pytest.approx((0.7310586, 0.2689414), abs=1e-7)
    assert worked.context == pytest.approx((4.0757656,), abs=1e-6)
    assert "  score 1 = 2 / √4 = 2 / 2 = 1" in worked.lines
    # Without the scale: e^2 = 7.389056, weights 7.389056 / 8.389056 = 0.8807971 and 0.1192029
    unscaled = worked_calculation([1, 1, 1, 1], [[2, 0, 0, 0], [0, 0, 0, 0]], [[3], [7]], "dot")
    assert unscaled.weights == pytest.approx((0.8807971, 0.1192029), abs=1e-7)


def test_bilinear():
    # W = [[1, 0, 2], [0, -1, 1]], k1 = (1, 1, 0), k2 = (0, 2, 1)
    #   W k1 = (1·1 + 0·1 + 2·0, 0·1 - 1·1 + 1·0) = (1, -1)
    #   W k2 = (1·0 + 0·2 + 2·1, 0·0 - 1·2 + 1·1) = (2, -1)
    # q = (1, 3): q · W k1 = 1 - 3 = -2, q · W k2 = 2 - 3 = -1
    #   weights 1 / (1 + e) = 0.2689414 and e / (1 + e) = 0.7310586
    # values (1, 1) and (0, 2): context (0.2689414, 0.2689414 + 1.4621172 = 1.7310586)
    worked = worked_calculation(
        [1, 3], [[1, 1, 0], [0, 2, 1]], [[1, 1], [0, 2]], "bilinear", matrix=[[1, 0, 2], [0, -1, 1]]
    )
    assert worked.scores == (-2, -1)
    assert worked.weights == pytest.approx((0.2689414, 0.7310586), abs=1e-7)
    assert worked.context == pytest.approx((0.2689414, 1.7310586), abs=1e-7)
    assert "  W k2 = (2, -1)" in worked.lines
    assert "    row 2: 0·0 + (-1)·2 + 1·1 = -1" in worked.lines
    assert "  q · W k2 = 1·2 + 3·(-1) = -1" in worked.lines


def test_additive():
    # W = [[1, 1], [0, 1], [2, 0]], U = [[1], [0], [-2]], v = (1, 2, 4)
    # q = (0.5, -0.5): W q = (0.5 - 0.5, -0.5, 2·0.5) = (0, -0.5, 1)
    # k1 = (0): U k1 = (0, 0, 0), sum (0, -0.5, 1)
    #   tanh: 0, -0.4621172, 0.7615942; v · tanh = 0 - 0.9242343 + 3.0463766 = 2.1221423
    # k2 = (1): U k2 = (1, 0, -2), sum (1, -0.5, -1)
    #   tanh: 0.7615942, -0.4621172, -0.7615942; v · tanh = 0.7615942 - 0.9242343 - 3.0463766 = -3.2090168
    #   difference 5.3311591: weights 1 / (1 + e^-5.3311591) = 0.9951847 and 0.0048153
    # No values: the keys are the values, context 0 · 0.9951847 + 1 · 0.0048153
    worked = worked_calculation(
        [0.5, -0.5],
        [[0], [1]],
        alignment="additive",
        query_matrix=[[1, 1], [0, 1], [2, 0]],
        key_matrix=[[1], [0], [-2]],
        vector=[1, 2, 4],
    )
    assert worked.scores == pytest.approx((2.1221423, -3.2090168), abs=1e-6)
    assert worked.weights == pytest.approx((0.9951847, 0.0048153), abs=1e-6)
    assert worked.context == pytest.approx((0.0048153,), abs=1e-6)
    assert "  W q = (0, -0.5, 1)" in worked.lines
    assert "  tanh(W q + U k2) = tanh(1, -0.5, -1) = (0.76159, -0.46212, -0.76159)" in worked.lines
    assert "  v · tanh(W q + U k1) = 1·0 + 2·(-0.46212) + 4·0.76159 = 2.1221" in worked.lines


def random_arguments(alignment: str) -> dict:
    def numbers(*shape: int) -> list:
        return torch.randn(shape, dtype=torch.float64).tolist()

    width = 3 if "dot" in alignment else 4
    arguments = {"query": numbers(3), "keys": numbers(5, width), "values": numbers(5, 2), "alignment": alignment}
    if alignment == "bilinear":
        arguments["matrix"] = numbers(3, 4)
    if alignment == "additive":
        arguments |= {"query_matrix": numbers(6, 3), "key_matrix": numbers(6, 4), "vector": numbers(6)}
    return arguments


SUM = re.compile(r"(?:= |: |^)((?:\(?-?[\d.e-]+\)?·\(?-?[\d.e-]+\)?(?: \+ )?)+) = (-?[\d.e-]+)$")


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_every_sum_that_is_written_out_is_right(alignment):
    worked = worked_calculation(**random_arguments(alignment))
    assert math.fsum(worked.weights) == pytest.approx(1)
    sums = [SUM.search(line) for line in worked.lines if "·" in line and not line.rstrip().endswith(")")]
    found = [match for match in sums if match]
    assert len(found) >= 7
    for match in found:
        products = [product.split("·") for product in match[1].split(" + ")]
        total = sum(float(left.strip("()")) * float(right.strip("()")) for left, right in products)
        # As good as five digits are.
        assert total == pytest.approx(float(match[2]), abs=2e-3, rel=1e-3)
    assert worked.lines[-1] == f"  context = ({', '.join(f'{number:.5g}' for number in worked.context)})"


def test_large_scores_are_written_without_their_largest():
    # 30 and 1000: weights e^-970 = 0 and 1
    worked = worked_calculation([1], [[30], [1000]])
    assert worked.weights == (0, 1)
    assert "weights: softmax of the scores minus the largest (1000)" in worked.lines
    assert "  exp(-970) = 0" in worked.lines


def test_of_scores_far_below_zero_the_largest_is_subtracted_too():
    # -1000 and -1001: without the subtraction both powers are 0, and the weights are no numbers.
    worked = worked_calculation([1], [[-1000], [-1001]])
    assert worked.weights == pytest.approx((1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))))
    assert "weights: softmax of the scores minus the largest (-1000)" in worked.lines


def test_reading_vectors_and_matrices():
    assert parse_vector(" 1, -0.5 2e1 ", "query") == [1, -0.5, 20]
    assert parse_matrix("1 0;0,1 ; 2 2", "keys") == [[1, 0], [0, 1], [2, 2]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 x", r"^`query` \('1 x'\) holds 'x', which is not a number$"),
        ("  ", r"^`query` \('  '\) must hold at least one number"),
        ("1; 2", r"^`query` \('1; 2'\) holds '1;', which is not a number$"),
    ],
)
def test_text_that_is_no_vector(text, message):
    with pytest.raises(ValueError, match=message):
        parse_vector(text, "query")


def test_a_matrix_with_an_empty_row():
    with pytest.raises(ValueError, match=r"^`keys` \(''\) must hold at least one number"):
        parse_matrix("1 2;", "keys")


ADDITIVE = {"alignment": "additive", "query_matrix": [[1, 0]], "key_matrix": [[1, 1]], "vector": [1]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"alignment": "general"}, r"^`alignment` \('general'\) must be one of dot, scaled_dot, bilinear, additive$"),
        ({"keys": [[1, 0], [1]]}, r"^`keys` has rows of 1 and of 2 numbers: they must be equally long$"),
        ({"keys": []}, r"^`keys` must hold at least one row$"),
        ({"query": []}, r"^`query` \(\[\]\) must hold finite numbers, at least one$"),
        ({"query": [1, math.nan]}, r"^`query` \(\[1, nan\]\) must hold finite numbers, at least one$"),
        (
            {"query": [1e300, 0], "keys": [[1e300, 0]]},
            r"^`query` and `keys` give the scores \(inf\): their numbers must be",
        ),
        ({"values": [[1, 0]]}, r"^`values` has 1 rows, but `keys` has 2: there must be one value for each key$"),
        ({"query": [1, 0, 0]}, r"^DotAlignment needs queries and keys of one width, got 3 and 2: "),
        ({"matrix": [[1]]}, r"^`matrix` is given, but the alignment 'dot' does not use it$"),
        ({"alignment": "bilinear"}, r"^`matrix` is missing: the alignment 'bilinear' needs it$"),
        ({"alignment": "bilinear", "matrix": [[1, 0]]}, r"^`matrix` is 1 × 2, but must be 2 × 2: "),
        (ADDITIVE | {"vector": None}, r"^`vector` is missing: the alignment 'additive' needs it$"),
        (ADDITIVE | {"vector": [1, 2]}, r"^`vector` is 2, but must be 1: "),
        (ADDITIVE | {"query_matrix": [[1]]}, r"^`query_matrix` is 1 × 1, but must be 1 × 2: "),
        (ADDITIVE | {"key_matrix": [[1, 1], [1, 1]]}, r"^`key_matrix` is 2 × 2, but must be 1 × 2: "),
    ],
)
def test_what_does_not_go_together(changed, message):
    with pytest.raises(ValueError, match=message):
        worked_calculation(**{"query": [1, 0], "keys": [[1, 0], [0, 1]], **changed})
