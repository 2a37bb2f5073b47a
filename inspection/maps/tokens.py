"""The tokens of a text, with the characters that each covers and the words that they form."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

# Scripts without spaces between words, with their signs: Thai to Tibetan, Burmese, Khmer, Chinese and Japanese. No
# rule finds their words, so each letter counts as a word, unless a token covers several letters.
_UNSPACED = re.compile("[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\ua4cf\uf900-\ufaff\U00020000-\U0003ffff]")
# A word with the hyphens and apostrophes inside it; white space; a flag, which is two regional letters; or one sign
# with its modifiers. The pattern is over the letters that `_kind` returns.
_WORD = re.compile("w[wmz]*(?:jw[wmz]*)*|s+|rr|.m*(?:z.m*)*")
# Signs for a space that some tokenizers put in front of a text.
_PREFIXES = ("▁", "Ġ")
_VISIBLE_SPACES = {" ": "␣", "\n": "⏎", "\t": "⇥"}
# The zero-width non-joiner and joiner.
_JOINERS = "\u200c\u200d"
# The text of a token; and the number of a token that shares its characters with others, such as " 1/3".
_PART = re.compile(r"(.*?)( \d+/\d+)?", re.DOTALL)


@dataclass(frozen=True)
class _Place:
    """Where the characters of a token are: the text, the start and end in it, and the first and last word."""

    sequence: int
    start: int
    end: int
    first_word: int
    last_word: int


@dataclass(frozen=True)
class Token:
    """A token of a text, or a word joined from several tokens.

    Args:
        text: the characters that the token covers, without the space around them; for a token that covers none, such
            as a special token, its name. If several tokens share one character, each has a number after it: "é 1/2".
        piece: the token's name in the vocabulary.
        span: start and end of the characters in the text; None if the token covers none.
        word: number of the token's word, the same for all tokens of the word.
        word_text: the characters of the whole word.
    """

    text: str
    piece: str
    span: tuple[int, int] | None
    word: int
    word_text: str

    @property
    def label(self) -> str:
        """The text in a form that `printable` makes safe to show."""
        characters, part = _PART.fullmatch(self.text).groups(default="")  # type: ignore[union-attr]
        return printable(characters) + part


def printable(text: str) -> str:
    """Makes every character of a text visible, and keeps it from changing the layout of its surroundings.

    White space that would vanish or break the line becomes a sign. A control character, such as one that reverses the
    writing direction, becomes its code point. A combining mark at the start of the text gets a dotted circle to sit
    on.
    """
    if not text.strip():
        return "".join(_VISIBLE_SPACES.get(character) or code_point(character) for character in text)
    first, rest = text[0], text[1:]
    if first in _JOINERS or _is_variation(first):
        return code_point(first) + printable(rest) if rest else code_point(first)
    begin = "◌" if unicodedata.category(first).startswith("M") else ""
    return begin + "".join(map(_printable, text))


def _printable(character: str) -> str:
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    # Joiners are part of the spelling of words and emoji.
    if not hidden or character in _JOINERS:
        return character
    return _VISIBLE_SPACES.get(character) or code_point(character)


def _is_variation(character: str) -> bool:
    """Returns whether a character is a variation selector, which chooses the form of the character before it."""
    return "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef"


def code_point(character: str) -> str:
    """Returns the Unicode code point of a character in angle brackets, to show in place of the character."""
    return f"⟨{ord(character):04X}⟩"


def is_right_to_left(text: str) -> bool:
    """Returns whether the first letter of a text belongs to a script that is written from right to left."""
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
    """Returns the start and end of each word of a text; signs and runs of white space count as words."""
    return [word.span() for word in _WORD.finditer("".join(map(_kind, text)))]


def word_numbers(text: str) -> list[int]:
    """Returns the number of each character's word; signs and runs of white space count as words."""
    return [number for number, span in enumerate(word_spans(text)) for _ in range(*span)]


def encoded_tokens(tokenizer: Any, encoding: Any, texts: Sequence[str]) -> tuple[Token, ...]:
    """Returns the tokens of one encoded text, or of two texts that were encoded as a pair.

    Args:
        tokenizer: the tokenizer that made the encoding.
        encoding: a batch of one, with `offset_mapping` if the tokenizer is a fast one.
        texts: the text, or both texts.
    """
    ids = [int(number) for number in encoding["input_ids"][0]]
    if "offset_mapping" not in encoding:
        return decoded_tokens(tokenizer, ids)
    spans = [(int(start), int(end)) for start, end in encoding["offset_mapping"][0]]
    return _make_tokens(tokenizer, ids, spans, encoding.sequence_ids(0), texts)


def decoded_tokens(tokenizer: Any, ids: Sequence[int]) -> tuple[Token, ...]:
    """Returns the tokens of a sequence of ids, as parts of the text that the ids decode to."""
    prefixes = [_decode(tokenizer, ids[:end]) for end in range(len(ids) + 1)]
    text = prefixes[-1]
    # A prefix differs from the whole text at its end if bytes of its last character are still missing.
    ends = [_common_length(prefix, text) for prefix in prefixes]
    special = set(tokenizer.all_special_ids)
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    spans, sequences = [], []
    for token, piece, start, end in zip(ids, pieces, ends, ends[1:], strict=False):
        spans.append((start, max(end, min(start + 1, len(text)))))
        # A model whose vocabulary is larger than its tokenizer's may write an id that the tokenizer does not know.
        sequences.append(None if token in special or piece is None else 0)
    return _make_tokens(tokenizer, ids, spans, sequences, [text])


def _common_length(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def special_token(tokenizer: Any, token: int) -> Token:
    """Returns the token of an id that covers no text."""
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
        # A prefix that is a separate token has the offsets of the first character, which belongs to the next token.
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
    """Groups token numbers by word; words that share a token form one group."""
    groups: list[list[int]] = []
    last: _Place | None = None
    for index, place in enumerate(places):
        if place and last and last.sequence == place.sequence and place.first_word <= last.last_word:
            groups[-1].append(index)
        else:
            groups.append([index])
        last = place
    return groups
