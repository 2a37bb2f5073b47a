import math

import pytest

from regard.training.generation.text_metrics import bleu, chrf, exact_match, perplexity, token_f1

PAIRWISE = [exact_match, token_f1, bleu, chrf]
TEXTS = ["The cat sat on the mat.", "a dog ran very fast today", "Schöne Grüße, Welt!"]


@pytest.mark.parametrize(("measure", "best"), [(exact_match, 1), (token_f1, 1), (bleu, 100), (chrf, 100)])
def test_the_references_themselves_are_best_and_strangers_worst(measure, best):
    assert measure(TEXTS, TEXTS) == pytest.approx(best)
    assert measure(["zzz zzz"] * 3, TEXTS) == 0
    assert measure([""] * 3, TEXTS) == 0
    assert 0 < measure([TEXTS[0], "x", "y"], TEXTS) < best


@pytest.mark.parametrize("measure", PAIRWISE)
def test_case_counts(measure):
    assert measure([text.upper() for text in TEXTS], TEXTS) < measure(TEXTS, TEXTS)


@pytest.mark.parametrize("measure", PAIRWISE)
def test_lists_that_do_not_match_are_refused(measure):
    for predictions, references in ([], []), (["a"], []), ([], ["a"]), (["a", "b"], ["a"]):
        sizes = rf"`predictions` \({len(predictions)}\) and `references` \({len(references)}\)"
        with pytest.raises(ValueError, match=sizes):
            measure(predictions, references)
    with pytest.raises(TypeError, match=r"`predictions` must be .* not one string"):
        measure("a", ["a"])
    with pytest.raises(TypeError, match=r"`references` must be .* not one string"):
        measure(["a"], "a")


def test_exact_match_is_exact():
    assert exact_match(["a", "b ", "C", "d"], ["a", "b", "c", "d"]) == 0.5


@pytest.mark.parametrize(
    ("prediction", "reference", "f1"),
    [
        # Two of three words found, of four wanted: precision 2/3, recall 1/2.
        ("a big dog", "a very small dog", 4 / 7),
        ("dog a", "a dog", 1),
        # The word counts once, as the reference has it once: precision 1/3, recall 1.
        ("dog dog dog", "dog", 1 / 2),
        ("a dog.", "a dog", 1 / 2),
        ("", "", 1),
        (" \n", "", 1),
        ("", "a", 0),
    ],
)
def test_token_f1_by_hand(prediction, reference, f1):
    assert token_f1([prediction], [reference]) == pytest.approx(f1)


def test_token_f1_is_the_mean_over_texts():
    assert token_f1(["a b c d e f g h", "x"], ["a b c d e f g h", "y"]) == pytest.approx(0.5)


def test_bleu_by_hand():
    predictions = ["the cat sat on the mat", "a dog ran fast today"]
    references = ["the cat sat on a mat", "a dog ran very fast today"]
    # Matches of 1, 2, 3 and 4 words, first and second text: 5 + 5 of 6 + 5, 3 + 3 of 5 + 4, 2 + 1 of 4 + 3,
    # 1 + 0 of 3 + 2. The second "the" is one more than the reference has. 11 words stand for 12.
    precisions = [10 / 11, 6 / 9, 3 / 7, 1 / 5]
    brevity = math.exp(1 - 12 / 11)
    assert bleu(predictions, references) == pytest.approx(100 * brevity * math.prod(precisions) ** (1 / 4))
    # Counted over the corpus, not the mean over texts.
    assert bleu(predictions, references) != pytest.approx(
        sum(bleu([p], [r]) for p, r in zip(predictions, references, strict=True)) / 2
    )


def test_bleu_smooths_orders_without_a_match():
    # Of "a b x c d", 4 of 5, 2 of 4, 0 of 3 and 0 of 2 n-grams are found; the zeros become 1/2 and 1/4 of a match.
    precisions = [4 / 5, 2 / 4, 1 / 2 / 3, 1 / 4 / 2]
    assert bleu(["a b x c d"], ["a b y c d"]) == pytest.approx(100 * math.prod(precisions) ** (1 / 4))


def test_bleu_parts_punctuation_from_words():
    assert bleu(["The cat sat on the mat ."], ["The cat sat on the mat."]) == pytest.approx(100)


def test_text_that_looks_tokenized_raises_no_warning(caplog):
    bleu(["a dog ran ."] * 200, ["a dog ran ."] * 200)
    assert caplog.text == ""


def test_chrf_by_hand():
    # One character: 2 of 2 found, of 3 wanted; two: 1 of 1, of 2; longer ones the prediction has none of.
    precision, recall = 1, (2 / 3 + 1 / 2) / 2
    assert chrf(["ab"], ["abc"]) == pytest.approx(100 * 5 * precision * recall / (4 * precision + recall))
    # Recall weighs more than precision.
    assert chrf(["ab"], ["abc"]) < chrf(["abc"], ["ab"])


def test_chrf_leaves_white_space_out():
    assert chrf(["thec lass"], ["the class"]) == pytest.approx(100)


def test_chrf_is_counted_over_the_corpus():
    # 4 + 0 of 4 + 1 single characters match, then all of 3, 2 and 1 longer ones.
    precision = (4 / 5 + 1 + 1 + 1) / 4
    assert chrf(["abcd", "x"], ["abcd", "y"]) == pytest.approx(100 * precision)


def test_perplexity():
    assert perplexity(0.0, 3) == 1
    # Each token is one of 37 equally likely ones.
    assert perplexity(5 * math.log(37), 5) == pytest.approx(37)
    assert perplexity(1e6, 1) == math.inf
    assert perplexity(math.inf, 7) == math.inf
    assert math.isnan(perplexity(math.nan, 7))
    for count in (0, -1):
        with pytest.raises(ValueError, match=rf"`count` \({count}\) must be at least 1"):
            perplexity(1.0, count)
