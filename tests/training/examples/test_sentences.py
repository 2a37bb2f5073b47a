import pickle
import random
import re

import pytest
import sentencex

from regard.training.examples import sentences
from regard.training.examples.sentences import WINDOW, split_sentences


def unspaced(text: str) -> str:
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize(
    "expected",
    [
        ["Dr. Smith met Mr. Brown at 5 p.m. on Jan. 5, 2020.", "They left at noon."],
        ["See https://docs.python.org/3.11/library/os.html for details.", "It is long."],
        ["The value is 3.14159.", "It is irrational."],
        ["Changed in version 3.11.2: the argument was added.", "It is optional."],
        ["Use e.g. a list, i.e. a mutable sequence.", "Tuples are fixed."],
        ["What is a list?", "A list is mutable!", "Good."],
        ["Call argparse.ArgumentParser() first.", "It needs no argument."],
        ["The file setup.cfg is read by pip.", "README.md is not."],
        ['"Is it done?" she asked.', '"Yes!" he said.'],
        ["مرحبا بالعالم.", "كيف حالك؟", "جيد."],
    ],
)
def test_sentences_of_a_paragraph(expected):
    assert split_sentences(" ".join(expected)) == expected


def test_chinese_and_japanese_stops_need_no_space():
    assert split_sentences("你好。真的吗？是！", "zh") == ["你好。", "真的吗？", "是！"]
    assert split_sentences("これは本です。", "ja") == ["これは本です。"]


def test_wrapped_lines_are_joined_and_paragraphs_are_not():
    text = "A sentence that is\n  wrapped twice\nby hand. Another\r\none\n\nwithout a stop\n \t\nThe end"
    assert split_sentences(text) == [
        "A sentence that is wrapped twice by hand.",
        "Another one",
        "without a stop",
        "The end",
    ]


def test_headings_and_list_items_are_segments_of_their_own():
    text = "Title\n=====\nSome text\n- first item\n  goes on\n* second\n# Heading\n\n*****\nOver\n*****\nbody"
    assert split_sentences(text) == [
        "Title =====",
        "Some text",
        "- first item goes on",
        "* second",
        "# Heading",
        "***** Over *****",
        "body",
    ]


@pytest.mark.parametrize("text", ["", " ", "\n\n\t \r\n", "\u3000\u00a0"])
def test_no_text_has_no_sentences(text):
    assert split_sentences(text) == []


PIECES = [
    *"aZ.,!?;:()[]\"'`-*#=1 \n\t\0\x01\x1c\x85\u2028\u00a0\u200b\ufeff\u0301😀。！？你؟م",
    *("\r\n", "\n\n", "\n- ", "\n1. ", "\n====\n", "Dr. ", "e.g. ", "v3.11 ", "http://a.b/c?d=E.F ", "a.B", "..."),
    *("“Yes.” ", "Word. ", "👩\u200d👧"),
]


@pytest.mark.parametrize("window", [1, 7, WINDOW])
def test_nothing_is_lost(window, monkeypatch):
    monkeypatch.setattr(sentences, "WINDOW", window)
    for seed in range(400):
        rng = random.Random(seed)
        text = "".join(rng.choices(PIECES, k=rng.randrange(60)))
        found = split_sentences(text)
        assert unspaced("".join(found)) == unspaced(text)
        assert all(sentence == " ".join(sentence.split()) != "" for sentence in found)


def test_long_paragraphs_are_split_as_short_ones():
    short = ["Dr. Smith saw os.path.Join at 3.14 p.m. in the U.K. today.", "It worked!", "Did it?"]
    assert len(" ".join(short)) * 400 > 10 * WINDOW
    assert split_sentences(" ".join(short * 400)) == short * 400


@pytest.mark.parametrize("piece", ["你好吗。", "word ", "x", "ab.Cd.", '("', "A cat. ", "a\n", "- a\n"])
def test_time_is_linear(piece, monkeypatch):
    text = piece * (200_000 // len(piece))
    # sentencex alone is quadratic in the length of Chinese text, so what is bounded is how much it is given.
    given = []

    def segment(language, part):
        given.append(len(part))
        return split(language, part)

    split = sentencex.segment
    monkeypatch.setattr(sentencex, "segment", segment)
    found = split_sentences(text)
    assert sum(given) < 4 * len(text)
    assert max(given) <= max(2 * WINDOW, 4 * max(map(len, found)))


def test_language_decides():
    text = "Das kostet ca. 5 Euro inkl. MwSt. Es ist u.a. billig."
    assert split_sentences(text, "de") != split_sentences(text, "en")


@pytest.mark.parametrize("language", ["english", "", "e", "en us", "../en"])
def test_language_must_be_a_code(language):
    with pytest.raises(ValueError, match=r"^`language` \(.*\) must be an ISO 639 code, such as 'en' or 'pt-br'$"):
        split_sentences("A text.", language)


def test_it_can_be_sent_to_a_worker():
    assert pickle.loads(pickle.dumps(split_sentences))("One. Two.") == ["One.", "Two."]
