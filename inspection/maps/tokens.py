"""What a tokenizer made of a text: its tokens, the characters that each stands for, and the words that they join."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

# Scripts that put no space between words, with the signs that go with them: Thai to Tibetan, Burmese, Khmer, Chinese
# and Japanese. No rule finds their words, so a letter is taken for one unless a token holds several.
_UNSPACED = re.compile("[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\ua4cf\uf900-\ufaff\U00020000-\U0003ffff]")
# A word with the hyphens and apostrophes inside it; white space; a flag, which is two letters; or one sign, with what
# modifies it. In the letters of `_kind`.
_WORD = re.compile("w[wmz]*(?:jw[wmz]*)*|s+|rr|.m*(?:z.m*)*")
# What some tokenizers put before a text.
_PREFIXES = ("▁", "Ġ")
_SEEN = {" ": "␣", "\n": "⏎", "\t": "⇥"}
# The two joiners.
_JOINERS = "\u200c\u200d"
# The text of a token, and the number of one that shares its characters with others.
_PART = re.compile(r"(.*?)( \d+/\d+)?", re.DOTALL)


@dataclass(frozen=True)
class _Place:
    """Where a token's characters are: in which of the texts, from where to where, in which of its words."""

    sequence: int
    start: int
    end: int
    first_word: int
    last_word: int


@dataclass(frozen=True)
class Token:
    """A token of a text, or a word that was joined of some.

    Args:
        text: the characters of the text that it stands for, without the space around them; for one that stands for
            none, such as a special token, its name. Where several tokens share one character, it is numbered.
        piece: what the vocabulary calls it.
        span: where the characters begin and end in the text; None if there are none.
        word: number of the word that it belongs to; tokens of one word have the same.
        word_text: the characters of the whole word.
    """

    text: str
    piece: str
    span: tuple[int, int] | None
    word: int
    word_text: str

    @property
    def label(self) -> str:
        """The text as it may be shown: see `printable`."""
        characters, part = _PART.fullmatch(self.text).groups(default="")  # type: ignore[union-attr]
        return printable(characters) + part


def printable(text: str) -> str:
    """A text in which all that is there can be seen, and none of it changes how what is around it is laid out.

    White space that would be lost or break the line has a sign; characters of control, those that turn the direction
    of writing among them, have their number in place of themselves. A mark that begins the text is on a dotted circle,
    as there is no letter that it could be on.
    """
    if not text.strip():
        return "".join(_SEEN.get(character) or number_of(character) for character in text)
    first, rest = text[0], text[1:]
    if first in _JOINERS or _is_variation(first):
        return number_of(first) + printable(rest) if rest else number_of(first)
    begin = "◌" if unicodedata.category(first).startswith("M") else ""
    return begin + "".join(map(_printable, text))


def _printable(character: str) -> str:
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    # Joiners belong to the spelling of words and to emoji.
    if not hidden or character in _JOINERS:
        return character
    return _SEEN.get(character) or number_of(character)


def _is_variation(character: str) -> bool:
    """Whether a character only chooses the form of the one before it."""
    return "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef"


def number_of(character: str) -> str:
    """A character by its number in Unicode, where it can't be shown itself."""
    return f"⟨{ord(character):04X}⟩"


def is_right_to_left(text: str) -> bool:
    """Whether the first letter of a text is of a script that is written from right to left."""
    directions = (unicodedata.bidirectional(character) for character in text)
    return next((direction for direction in directions if direction in ("L", "R", "AL")), "L") != "L"


@lru_cache(maxsize=4096)
def _kind(character: str) -> str:
    category = unicodedata.category(character)
    if character.isspace():
        return "s"
    if character == "\u200d":
        return "z"
    # Variation selectors are marks; skin tones are not.
    if category.startswith("M") or character == "\u200c" or "\U0001f3fb" <= character <= "\U0001f3ff":
        return "m"
    if "\U0001f1e6" <= character <= "\U0001f1ff":
        return "r"
    if character in "-'’":
        return "j"
    return "w" if (character.isalnum() or character == "_") and not _UNSPACED.match(character) else "o"


def word_spans(text: str) -> list[tuple[int, int]]:
    """Where the words of a text begin and end, one after the other; a sign and white space count as words."""
    return [word.span() for word in _WORD.finditer("".join(map(_kind, text)))]


def word_numbers(text: str) -> list[int]:
    """For each character of a text, the number of the word that it is in; white space counts as a word."""
    return [number for number, span in enumerate(word_spans(text)) for _ in range(*span)]


def encoded_tokens(tokenizer: Any, encoding: Any, texts: Sequence[str]) -> tuple[Token, ...]:
    """The tokens of one text, or of two that were encoded as a pair.

    Args:
        tokenizer: that made the encoding.
        encoding: of a batch of one, with `offset_mapping` if the tokenizer is a fast one.
        texts: the text, or both.
    """
    ids = [int(number) for number in encoding["input_ids"][0]]
    if "offset_mapping" not in encoding:
        return decoded_tokens(tokenizer, ids)
    spans = [(int(start), int(end)) for start, end in encoding["offset_mapping"][0]]
    return _make_tokens(tokenizer, ids, spans, encoding.sequence_ids(0), texts)


def decoded_tokens(tokenizer: Any, ids: Sequence[int]) -> tuple[Token, ...]:
    """The tokens of ids, as parts of the text that these decode to."""
    prefixes = [_decode(tokenizer, ids[:end]) for end in range(len(ids) + 1)]
    text = prefixes[-1]
    # What a prefix has that the whole has not is a character of which bytes are missing.
    ends = [_common_length(prefix, text) for prefix in prefixes]
    special = set(tokenizer.all_special_ids)
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    spans, sequences = [], []
    for token, piece, start, end in zip(ids, pieces, ends, ends[1:], strict=False):
        spans.append((start, max(end, min(start + 1, len(text)))))
        # A model may write an id that its tokenizer has nothing for, where its vocabulary is the larger one.
        sequences.append(None if token in special or piece is None else 0)
    return _make_tokens(tokenizer, ids, spans, sequences, [text])


def _common_length(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def special_token(tokenizer: Any, token: int) -> Token:
    """A token that stands for no text."""
    return _make_tokens(tokenizer, [token], [(0, 0)], [None], [])[0]


def _make_tokens(
    tokenizer: Any,
    ids: Sequence[int],
    spans: Sequence[tuple[int, int]],
    sequences: Sequence[int | None],
    texts: Sequence[str],
) -> tuple[Token, ...]:
    named = zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True)
    pieces = [f"id {token}" if piece is None else str(piece) for token, piece in named]
    numbers = [word_numbers(text) for text in texts]
    places: list[_Place | None] = []
    for piece, sequence, (start, end) in zip(pieces, sequences, spans, strict=True):
        if sequence is None or start == end:
            places.append(None)
            continue
        inside = texts[sequence][start:end]
        # A prefix that is a token of its own has the place of the first character, which is the next token's.
        if piece in _PREFIXES and inside.strip() and inside != piece:
            places.append(None)
            continue
        if inside.strip():
            start, end = start + len(inside) - len(inside.lstrip()), end - len(inside) + len(inside.rstrip())
        words = numbers[sequence]
        places.append(_Place(sequence, start, end, words[start], words[end - 1]))

    tokens: list[Token] = []
    for word, members in enumerate(_join(places)):
        known = [place for place in map(places.__getitem__, members) if place is not None]
        if not known:
            tokens += [Token(pieces[index], pieces[index], None, word, pieces[index]) for index in members]
            continue
        text = texts[known[0].sequence]
        whole = text[known[0].start : max(place.end for place in known)]
        for index, place in zip(members, known, strict=True):
            sharing = [other for other in members if places[other] == place]
            part = f" {sharing.index(index) + 1}/{len(sharing)}" if len(sharing) > 1 else ""
            span = (place.start, place.end)
            tokens.append(Token(text[slice(*span)] + part, pieces[index], span, word, whole))
    return tuple(tokens)


def _join(places: Sequence[_Place | None]) -> list[list[int]]:
    """The tokens of each word: those that share one, or that a token joins which holds several."""
    groups: list[list[int]] = []
    last: _Place | None = None
    for index, place in enumerate(places):
        if place and last and last.sequence == place.sequence and place.first_word <= last.last_word:
            groups[-1].append(index)
        else:
            groups.append([index])
        last = place
    return groups
