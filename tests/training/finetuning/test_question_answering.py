"""Question answering: windows cover the context, and tokens and characters map to each other, in any script."""

import itertools

import numpy as np
import pytest

from regard.tokenization.wordpiece import train_wordpiece
from regard.training.finetuning.question_answering import (
    best_answers,
    find_tokens,
    make_windows,
    no_answer_token,
    shorten_questions,
    trim,
)

CONTEXTS = {
    "latin": "Ada Lovelace, born in 1815, wrote the first program; she died in London in 1852, aged thirty-six.",
    "german": "Das Straßenfest in Köln war übervoll: größer als je zuvor, sagte Bürgermeisterin Müller am Dienstag.",
    "chinese": "北京是中华人民共和国的首都，位于华北平原的北部，是一座历史悠久的城市，人口超过两千万。",
    "arabic": "القاهرة هي عاصمة مصر وأكبر مدنها، وتقع على ضفاف نهر النيل في شمال البلاد منذ قرون طويلة.",
    "hindi": "दिल्ली भारत की राजधानी है और यमुना नदी के किनारे बसी हुई एक बहुत पुरानी नगरी है जो बड़ी है।",
    "emoji": "The 👩‍🚀 flew to the 🌕 and back, then ate 🍕🍕 with 𝒻𝓇𝒾𝑒𝓃𝒹𝓈 at the café near the fire 🔥 station.",
}


@pytest.fixture(scope="module")
def wordpiece():
    return train_wordpiece(list(CONTEXTS.values()) * 3, vocab_size=300)


@pytest.fixture(params=["wordpiece", "bytes"])
def any_tokenizer(request, wordpiece, byte_tokenizer):
    return wordpiece if request.param == "wordpiece" else byte_tokenizer


@pytest.mark.parametrize("script", CONTEXTS)
@pytest.mark.parametrize("stride", [0, 3, 7])
def test_windows_cover_the_context_with_overlap(script, stride, any_tokenizer):
    context = CONTEXTS[script]
    windows = make_windows(any_tokenizer, ["who?"], [context], 25, stride)
    assert len(windows) > 1
    whole = make_windows(any_tokenizer, ["who?"], [context], 999, stride)
    assert len(whole) == 1
    spans = [[span for span in window.spans if span is not None] for window in windows]
    assert all(len(window.inputs["input_ids"]) <= 25 for window in windows)
    joined = spans[0]
    for before, after in itertools.pairwise(spans):
        if stride:
            assert before[-stride:] == after[:stride]
        joined = joined + after[stride:]
    assert joined == [span for span in whole[0].spans if span is not None]


@pytest.mark.parametrize("script", CONTEXTS)
def test_every_answer_of_whole_words_comes_back_from_its_tokens(script, any_tokenizer):
    """To the character, from whichever window is the surest."""
    context = CONTEXTS[script]
    windows = make_windows(any_tokenizer, ["who?"], [context], 40, 16)
    ends = sorted({span[1] for window in windows for span in window.spans if span and not context[span[0]].isspace()})
    starts = sorted({span[0] for window in windows for span in window.spans if span})
    tried = 0
    for start, end in itertools.product(starts[::3], ends[::2]):
        text = context[start:end]
        if not 0 < len(text) <= 12 or trim(context, start, text) != (start, end):
            continue
        tokens = find_tokens(windows, [(start, end)])
        if not any(tokens):
            continue
        scores = [np.zeros((2, len(window.spans))) for window in windows]
        for table, span in zip(scores, tokens, strict=True):
            if span is not None:
                table[0, span[0]] += 9
                table[1, span[1]] += 9
        (answer,) = best_answers(windows, [s[0] for s in scores], [s[1] for s in scores], [context], None, 99)
        assert (answer.text, answer.start, answer.end) == (text, start, end)
        tried += 1
    assert tried > 10


def test_an_answer_is_marked_where_all_of_it_is(wordpiece):
    context = " ".join(f"word{number}" for number in range(30))
    start = context.index("word14")
    place = (start, start + len("word14 word15"))
    windows = make_windows(wordpiece, ["who?"], [context], 30, 14)
    tokens = find_tokens(windows, [place])
    assert None in tokens
    assert any(tokens)
    for window, span in zip(windows, tokens, strict=True):
        inside = [each for each in window.spans if each is not None]
        assert (span is not None) == (inside[0][0] <= place[0] and place[1] <= inside[-1][1])
        if span is not None:
            assert (window.spans[span[0]][0], window.spans[span[1]][1]) == place
    # Within a token: the whole token.
    (inner,) = find_tokens(windows[:1], [(1, 2)])
    assert windows[0].spans[inner[0]][0] == 0
    assert find_tokens(windows, [None]) == [None] * len(windows)


def test_answers_are_trimmed_and_checked():
    assert trim("a  red cat ", 1, "  red ") == (3, 6)
    assert trim("a red cat", 2, "red") == (2, 5)
    assert trim("a red cat", 3, "red") is None
    assert trim("a red cat", -3, "cat") is None
    assert trim("a red cat", 1, " ") is None
    assert trim("a red cat", 99, "red") is None


def test_long_questions_leave_room(wordpiece):
    questions, cut = shorten_questions(wordpiece, ["who wrote the first program in London?", "who?"], 5)
    assert cut == 1
    assert questions[1] == "who?"
    assert "who wrote the first program in London?".startswith(questions[0])
    assert len(wordpiece(questions[0], add_special_tokens=False)["input_ids"]) == 5


def test_the_best_span_is_that_of_an_explicit_loop(wordpiece):
    rng = np.random.default_rng(0)
    contexts = [CONTEXTS["latin"], CONTEXTS["german"]]
    windows = make_windows(wordpiece, ["who?", "which town is it?"], contexts, 40, 9)
    starts, ends = ([rng.normal(size=len(window.spans) + 3) for window in windows] for _ in range(2))
    # Padding and the question have the highest scores, and are no answer.
    for scores in (*starts, *ends):
        scores[-3:] = 99
        scores[:2] = 99
    answers = best_answers(windows, starts, ends, contexts, None, 4)
    for row, answer in enumerate(answers):
        found = []
        for window, start, end in zip(windows, starts, ends, strict=True):
            places = [place for place, span in enumerate(window.spans) if span is not None]
            for first, last in itertools.product(places, places):
                if window.row == row and first <= last < first + 4:
                    found.append((start[first] + end[last], window.spans[first][0], window.spans[last][1]))
        _, begin, stop = max(found)
        assert (answer.start, answer.end, answer.text) == (begin, stop, contexts[row][begin:stop])
        assert 0 < answer.probability <= 1


def test_no_answer_wins_where_its_score_is_higher(wordpiece):
    context = CONTEXTS["latin"]
    windows = make_windows(wordpiece, ["who?"], [context], 25, 5)
    none = [no_answer_token(wordpiece, window) for window in windows]
    assert none == [0] * len(windows)
    scores = [np.zeros(len(window.spans)) for window in windows]
    for each in scores:
        each[0] = 5.0
    assert best_answers(windows, scores, scores, [context], none, 9)[0].text == ""
    # One window is less sure that there is none than another is of its answer.
    scores[1][0], scores[1][8] = 0.0, 4.0
    assert best_answers(windows, scores, scores, [context], none, 9)[0].text != ""
    # Where each question has an answer, that of none does not count.
    scores[1][8] = 0.0
    assert best_answers(windows, scores, scores, [context], None, 9)[0].text != ""
