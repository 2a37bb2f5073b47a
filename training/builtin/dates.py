"""The built-in sequence-to-sequence data: dates as many languages write them, to be rewritten as ISO 8601.

Nothing is downloaded: Babel contains the date formats and the names of months and days of the Unicode CLDR.
"""

import datetime
import difflib
import hashlib
from collections.abc import Iterator, Sequence
from functools import cache

import babel
import numpy as np
from babel import Locale
from babel.dates import format_date, tokenize_pattern, untokenize_pattern
from datasets import Dataset, Features, Value
from datasets.fingerprint import Hasher

# Languages that differ in script, in the order of day, month and year, or in both. Languages that need invisible marks
# of direction (Arabic), or whose default calendar is not the Gregorian (Thai, Persian), are left out.
LOCALES = tuple("cs da de el en_GB en_US es fi fr he hi hu it ja ko lt nl pl pt_BR ru sv tr uk zh".split())

SIZES = {"train": 100_000, "validation": 2_000, "test": 2_000}

FIRST_DATE = datetime.date(1900, 1, 1)
LAST_DATE = datetime.date(2099, 12, 31)

# Part of every cache key: raise it whenever the same arguments give other rows than before.
FORMAT_VERSION = 1

_SPLITS = tuple(SIZES)
_FORMATS = ("short", "medium", "long", "full")
_SKELETONS = ("yMd", "yMEd", "yMMMd", "yMMMEd", "yMMMMd", "yMMMMEEEEd")


def load_dates(
    split: str = "train",
    *,
    locales: Sequence[str] = LOCALES,
    max_dates: int = 5,
    size: int | None = None,
    seed: int = 0,
) -> Dataset:
    """Loads rows such as `en_US: Tuesday, November 10, 2026; 1/5/1987`, to be rewritten as `2026-11-10 1987-01-05`.

    A source is the name of a locale, followed by one or more dates in that locale, each in a random format; the target
    is the same dates in ISO 8601. The year always has four digits, so that locale and date determine the day.

    The splits share no date: nine in ten of the days from 1900 to 2099 belong to `train`, and each other split has
    half of the rest. Row i depends only on i and the arguments except `size`, so a longer data set starts with the
    shorter one. The rows are written to the cache of `datasets`, where a later call with the same arguments finds
    them.

    Args:
        split: `train`, `validation` or `test`.
        locales: Which of `LOCALES` to draw from.
        max_dates: The most dates in a row. All numbers from one to this are equally likely.
        size: The number of rows; None for the number in `SIZES`.
        seed: Another seed draws other rows. The dates of a split do not depend on it.

    Returns:
        A data set with the columns `source` and `target`.

    Raises:
        ValueError: An argument is out of range, or a locale is unknown.
    """
    if split not in SIZES:
        raise ValueError(f"`split` ({split!r}) must be one of {', '.join(map(repr, SIZES))}")
    locales = tuple(locales)
    _check_locales(locales, "`locales`")
    if max_dates < 1:
        raise ValueError(f"`max_dates` ({max_dates}) must be at least 1")
    if size is None:
        size = SIZES[split]
    if size < 1:
        raise ValueError(f"`size` ({size}) must be at least 1, or None for {SIZES[split]:,}")
    if seed < 0:
        raise ValueError(f"`seed` ({seed}) must not be negative")

    def rows() -> Iterator[dict[str, str]]:
        for index in range(size):
            rng = np.random.default_rng([seed, _SPLITS.index(split), index])
            yield _draw_row(_dates(split), locales, max_dates, rng)

    arguments = (split, locales, max_dates, size, seed)
    return Dataset.from_generator(
        rows,
        features=Features({"source": Value("string"), "target": Value("string")}),
        fingerprint=Hasher.hash(("dates", FORMAT_VERSION, babel.__version__, arguments)),
    )


def parse_dates_name(name: str) -> tuple[str, ...]:
    """Returns the locales in a name of this data.

    Args:
        name: `dates` for all of `LOCALES`, or `dates:` and some of them: `dates:de,fr,en_US`.

    Raises:
        ValueError: The name is not of this form, or a locale is not in `LOCALES`.
    """
    task, colon, listed = name.partition(":")
    if task != "dates":
        raise ValueError(f"{name!r} is not 'dates', or 'dates:' and locales with commas between them")
    if not colon:
        return LOCALES
    locales = tuple(locale.strip() for locale in listed.split(",") if locale.strip())
    _check_locales(locales, repr(name))
    return locales


@cache
def date_patterns(locale: str) -> tuple[str, ...]:
    """Returns the ways in which a locale writes a whole date, as CLDR patterns for `format_date`.

    They are the CLDR's own patterns, except that a year of two digits is written with four.

    Args:
        locale: One of `LOCALES`.
    """
    known = Locale.parse(locale)
    formats = [known.date_formats[name].pattern for name in _FORMATS]
    # Not every locale has every skeleton.
    formats += [known.datetime_skeletons[name].pattern for name in _SKELETONS if name in known.datetime_skeletons]
    patterns = []
    for tokens in map(tokenize_pattern, formats):
        whole_year = [("field", ("y", 1)) if token == ("field", ("y", 2)) else token for token in tokens]
        patterns.append(untokenize_pattern(whole_year))
    return tuple(dict.fromkeys(patterns))


def _check_locales(locales: Sequence[str], where: str) -> None:
    if not locales:
        raise ValueError(f"{where} names no locale; there are {', '.join(LOCALES)}")
    for locale in locales:
        if locale not in LOCALES:
            nearest = difflib.get_close_matches(str(locale), LOCALES, n=1, cutoff=0.55)  # 'fr_FR' is near to 'fr'
            hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
            raise ValueError(f"{where} names an unknown locale, {locale!r}{hint}; there are {', '.join(LOCALES)}")


def _draw_row(
    dates: Sequence[datetime.date], locales: Sequence[str], max_dates: int, rng: np.random.Generator
) -> dict[str, str]:
    name = locales[int(rng.integers(len(locales)))]
    patterns = date_patterns(name)
    number = rng.integers(1, max_dates + 1)
    drawn = [dates[index] for index in rng.integers(len(dates), size=number)]
    formats = [patterns[index] for index in rng.integers(len(patterns), size=number)]
    locale = Locale.parse(name)
    written = [format_date(date, pattern, locale) for date, pattern in zip(drawn, formats, strict=True)]
    return {"source": f"{name}: {'; '.join(written)}", "target": " ".join(date.isoformat() for date in drawn)}


@cache
def _dates(split: str) -> tuple[datetime.date, ...]:
    """Returns the days of a split, in order."""
    days = range(FIRST_DATE.toordinal(), LAST_DATE.toordinal() + 1)
    return tuple(datetime.date.fromordinal(day) for day in days if _split_of(day) == split)


def _split_of(day: int) -> str:
    # Unlike Python's own hash, this one is the same in every process and on every machine.
    percent = int.from_bytes(hashlib.blake2b(str(day).encode(), digest_size=8).digest(), "big") % 100
    if percent < 5:
        return "validation"
    return "test" if percent < 10 else "train"
