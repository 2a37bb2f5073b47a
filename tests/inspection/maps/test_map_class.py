import numpy as np
import pytest

from regard.inspection.maps.attention_map import AttentionMap
from regard.inspection.maps.tokens import Token


def tokens(*words: str) -> tuple[Token, ...]:
    """Tokens of words that are written with their pieces apart: `un-do`."""
    made, end = [], 0
    for number, word in enumerate(words):
        for piece in word.split("-"):
            made.append(Token(piece, piece, (end, end + len(piece)), number, word.replace("-", "")))
            end += len(piece)
    return tuple(made)


@pytest.fixture
def attention():
    """Two layers of three heads: five queries of three words, seven keys of four."""
    scores = np.random.default_rng(0).random((2, 3, 5, 7), dtype=np.float32) ** 4
    queries, keys = tokens("a", "un-do-ing", "b"), tokens("c-d", "e", "f-g", "h-i")
    return AttentionMap(scores / scores.sum(-1, keepdims=True), queries, keys, "cross", "title")


@pytest.mark.parametrize("layer", [0, 1, -1, -2])
def test_one_head_the_mean_and_the_largest(attention, layer):
    weights = attention.weights[layer]
    for head in (0, 1, 2, -1, -3):
        np.testing.assert_array_equal(attention.matrix(layer, head), weights[head])
    mean, largest = attention.matrix(layer), attention.matrix(layer, "max")
    np.testing.assert_allclose(mean, (weights[0] + weights[1] + weights[2]) / 3, rtol=1e-6)
    np.testing.assert_allclose(mean.sum(-1), 1, rtol=1e-6)
    assert (largest >= weights).all()
    assert (largest.sum(-1) > 1.01).all()


def test_numbers_may_be_those_of_numpy(attention):
    layer, head = np.int64(-1), np.argmax([0, 0, 1])
    np.testing.assert_array_equal(attention.matrix(layer, head), attention.weights[1, 2])
    assert attention.figure(layer, head).get_suptitle().endswith("layer 1, head 2")
    assert attention.to_html(layer, head) == attention.to_html(1, 2)


def test_pieces_are_joined_to_words(attention):
    words = attention.by_words()
    assert [word.text for word in words.queries] == ["a", "undoing", "b"]
    assert [word.text for word in words.keys] == ["cd", "e", "fg", "hi"]
    assert words.queries[1].piece == "un do ing"
    assert words.queries[1].span == (1, 8)
    assert words.weights.shape == (2, 3, 3, 4)
    np.testing.assert_allclose(words.weights.sum(-1), 1, rtol=1e-5)
    expected = np.zeros_like(words.weights)
    sizes = [1, 3, 1]
    for i, query in enumerate(attention.queries):
        for j, key in enumerate(attention.keys):
            expected[:, :, query.word, key.word] += attention.weights[:, :, i, j] / sizes[query.word]
    np.testing.assert_allclose(words.weights, expected, rtol=1e-5)
    np.testing.assert_array_equal(words.by_words().weights, words.weights)


def test_a_row_of_zeros_stays_one(attention):
    attention.weights[:, :, 1:4] = 0
    assert (attention.by_words().weights[:, :, 1] == 0).all()


@pytest.mark.parametrize(
    ("layer", "head", "told"),
    [
        (2, 0, "`layer` (2) must be 0 to 1, or from the last one back -1 to -2"),
        (-3, 0, "`layer` (-3) must be"),
        (0, 3, "`head` (3) must be 0 to 2, or from the last one back -1 to -3, 'mean' or 'max'"),
        (0, "median", "`head` ('median') must be 0 to 2"),
        ("0", 0, "`layer` ('0') must be"),
    ],
)
def test_a_layer_or_head_that_is_not_there(attention, layer, head, told):
    for use in (attention.matrix, attention.figure, attention.to_html):
        with pytest.raises(ValueError, match="must be") as caught:
            use(layer, head)
        assert str(caught.value).startswith(told)
