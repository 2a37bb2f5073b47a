import datetime
import re
from collections import Counter

import numpy as np
import pytest
from babel import Locale
from babel.dates import format_date, format_skeleton, get_month_names

from regard.training.builtin import dates
from regard.training.builtin.dates import LOCALES, SIZES, date_patterns, load_dates, parse_dates_name

# In which order each locale writes a date in figures; all others write the day first.
MONTH_FIRST = {"en_US"}
YEAR_FIRST = {"hu", "ja", "ko", "lt", "sv", "zh"}

SKELETONS = "yMd yMEd yMMMd yMMMEd yMMMMd yMMMMEEEEd".split()

A_LEAP_YEAR = [datetime.date(2028, 1, 1) + datetime.timedelta(days=day) for day in range(366)]


@pytest.fixture(scope="module", params=SIZES)
def rows(request):
    return list(load_dates(request.param, size=1500))


def split_source(row: dict[str, str]) -> tuple[str, list[str], list[datetime.date]]:
    locale, _, written = row["source"].partition(": ")
    return locale, written.split("; "), [datetime.date.fromisoformat(date) for date in row["target"].split(" ")]


def read_date(locale: str, written: str) -> datetime.date:
    """Reads a date as someone would who knows the locale's order of figures and its names of months."""
    figures = list(re.finditer(r"\d+", written))
    (year,) = (figure for figure in figures if len(figure[0]) == 4)
    if len(figures) == 3:
        numbers = [int(figure[0]) for figure in figures]
        if locale in YEAR_FIRST:
            return datetime.date(*numbers)
        first, second, year_number = numbers
        month, day = (first, second) if locale in MONTH_FIRST else (second, first)
        return datetime.date(year_number, month, day)
    (day_figure,) = (figure for figure in figures if figure is not year)
    if locale in MONTH_FIRST:
        month_text = written[: day_figure.start()].split(", ")[-1]
    else:
        month_text = written[min(year.end(), day_figure.end()) : max(year.start(), day_figure.start())]
    found = {
        name: month
        for width in ("wide", "abbreviated")
        for month, name in get_month_names(width, "format", locale).items()
        if name in month_text
    }
    return datetime.date(int(year[0]), found[max(found, key=len)], int(day_figure[0]))


def babels_ways(date: datetime.date, locale: str) -> set[str]:
    """All that Babel offers for a date, apart from the years of two digits."""
    known = Locale.parse(locale)
    written = {format_skeleton(name, date, fuzzy=False, locale=locale) for name in SKELETONS if has(known, name)}
    for name in ("short", "medium", "long", "full"):
        pattern = known.date_formats[name].pattern
        if "yy" in pattern:
            written.add(format_date(date, pattern.replace("yy", "y"), locale))
        else:
            written.add(format_date(date, name, locale))
    return written


def has(known: Locale, skeleton: str) -> bool:
    return skeleton in known.datetime_skeletons


def test_the_target_is_what_the_source_says(rows):
    seen = Counter()
    for row in rows:
        locale, written, days = split_source(row)
        assert [read_date(locale, text) for text in written] == days, row
        seen[locale] += 1
    assert sorted(seen) == sorted(LOCALES)
    assert max(seen.values()) < 3 * min(seen.values())


def test_each_date_is_written_as_babel_does(rows):
    for row in rows:
        locale, written, days = split_source(row)
        for text, day in zip(written, days, strict=True):
            assert text in babels_ways(day, locale), row


@pytest.mark.parametrize("locale", LOCALES)
def test_the_formats_are_those_of_babel_and_all_of_them_are_drawn(locale):
    day = datetime.date(2026, 2, 3)
    assert {format_date(day, pattern, locale) for pattern in date_patterns(locale)} == babels_ways(day, locale)

    drawn = set()
    for row in load_dates(locales=[locale], size=60):
        _, written, days = split_source(row)
        for text, day in zip(written, days, strict=True):
            drawn.update(pattern for pattern in date_patterns(locale) if format_date(day, pattern, locale) == text)
    assert drawn == set(date_patterns(locale))


@pytest.mark.parametrize("locale", LOCALES)
def test_a_written_date_means_one_day(locale):
    meaning = {}
    for pattern in date_patterns(locale):
        fields = re.findall("[A-Za-z]+", re.sub("'[^']*'", " ", pattern))
        assert "".join(sorted(set("".join(fields)) - set("Ec"))) == "Mdy", pattern  # no era above all
        for day in A_LEAP_YEAR:
            text = format_date(day, pattern, locale)
            assert meaning.setdefault(text, day) == day, (text, pattern)
            assert re.findall(r"\d{3,}", text) == ["2028"]
            assert "; " not in text


def test_the_name_of_the_locale_decides_between_two_readings():
    american, british = (
        {format_date(datetime.date(2026, *day), pattern, locale) for pattern in date_patterns(locale)}
        for locale, day in (("en_US", (11, 10)), ("en_GB", (10, 11)))
    )
    assert "11/10/2026" in american & british


def test_few_characters_are_enough():
    ways = [(locale, pattern) for locale in LOCALES for pattern in date_patterns(locale)]
    used = {
        character for locale, pattern in ways for day in A_LEAP_YEAR for character in format_date(day, pattern, locale)
    }
    assert 150 < len(used) < 300
    marks_of_direction = "\u200e\u200f\u061c"
    assert not used & set(marks_of_direction)


def test_numbers_of_dates_and_lengths(rows):
    numbers = Counter(len(split_source(row)[2]) for row in rows)
    assert sorted(numbers) == [1, 2, 3, 4, 5]
    assert max(numbers.values()) < 1.4 * min(numbers.values())

    for row in rows:
        _, written, days = split_source(row)
        assert len(written) == len(days)
        assert row["target"] == " ".join(day.isoformat() for day in days)
        assert all(datetime.date(1900, 1, 1) <= day <= datetime.date(2099, 12, 31) for day in days)
    lengths = [len(row["source"]) for row in rows]
    assert 10 <= min(lengths) < 16
    assert 120 < max(lengths) <= 220


def test_no_date_is_in_two_splits_whatever_the_seed():
    days = {
        split: {
            day for seed in (0, 7) for row in load_dates(split, size=3000, seed=seed) for day in split_source(row)[2]
        }
        for split in SIZES
    }
    assert all(len(found) > 2500 for found in days.values())
    assert not days["train"] & days["validation"]
    assert not days["train"] & days["test"]
    assert not days["validation"] & days["test"]


def test_the_splits_share_out_all_days():
    days = {split: dates._dates(split) for split in SIZES}
    all_days = sorted(day for found in days.values() for day in found)
    assert (all_days[0], all_days[-1]) == (datetime.date(1900, 1, 1), datetime.date(2099, 12, 31))
    assert np.diff([day.toordinal() for day in all_days]).tolist() == [1] * (len(all_days) - 1)
    for split, share in {"train": 0.9, "validation": 0.05, "test": 0.05}.items():
        assert len(days[split]) / len(all_days) == pytest.approx(share, abs=0.004)


def test_the_days_of_a_split_stay_the_same():
    # Recorded, because a model trained with one version must not be tested by another on what it was trained on.
    assert [str(day) for day in dates._dates("validation")[:3]] == ["1900-02-13", "1900-04-29", "1900-05-01"]
    assert [str(day) for day in dates._dates("test")[:3]] == ["1900-01-17", "1900-01-29", "1900-02-02"]


def test_a_longer_data_set_starts_with_the_shorter_one():
    few, many = load_dates("test", size=37), load_dates("test", size=99)
    assert few[:] == many[:37]
    assert len(many) == 99


def test_rows_made_again_are_the_same(monkeypatch):
    made = load_dates("test", size=37)
    monkeypatch.setattr(dates, "FORMAT_VERSION", "made again")
    again = load_dates("test", size=37)
    assert again.cache_files != made.cache_files
    assert again[:] == made[:]


@pytest.mark.parametrize("other", [{"seed": 1}, {"split": "validation"}, {"max_dates": 3}, {"locales": ["de", "zh"]}])
def test_each_argument_makes_other_rows(other):
    assert load_dates(**{"split": "test", "size": 37} | other)[:] != load_dates("test", size=37)[:]


def test_arguments_reach_the_rows():
    rows = [split_source(row) for row in load_dates(locales=["zh", "pt_BR"], max_dates=2, size=50)]
    assert {locale for locale, _, _ in rows} == {"zh", "pt_BR"}
    assert {len(days) for _, _, days in rows} == {1, 2}


def test_rows_are_read_from_the_cache(monkeypatch):
    made = load_dates("validation", size=13, seed=5)
    assert made.cache_files

    def refuse(*arguments):
        raise AssertionError("made again")

    monkeypatch.setattr(dates, "_draw_row", refuse)
    assert load_dates("validation", size=13, seed=5)[:] == made[:]
    with monkeypatch.context() as patch:
        patch.setattr("babel.__version__", "0.0")
        with pytest.raises(Exception, match="generating the dataset"):
            load_dates("validation", size=13, seed=5)


def test_default_sizes():
    assert len(load_dates("validation")) == SIZES["validation"] == 2000
    assert SIZES == {"train": 100_000, "validation": 2000, "test": 2000}


def test_names():
    assert parse_dates_name("dates") == LOCALES
    assert parse_dates_name("dates:de,fr, en_US") == ("de", "fr", "en_US")
    assert len(set(LOCALES)) == len(LOCALES)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "dates:de,en_USA",
            r"'dates:de,en_USA' names an unknown locale, 'en_USA' \(did you mean 'en_US'\?\); there are cs, ",
        ),
        ("dates:fr_FR", r"'fr_FR' \(did you mean 'fr'\?\)"),
        ("dates:xx", "'xx'; there are cs, "),
        ("dates:", "'dates:' names no locale; there are cs, "),
        ("data:de", "'data:de' is not 'dates'"),
    ],
)
def test_refused_names(name, message):
    with pytest.raises(ValueError, match=message):
        parse_dates_name(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "dev"}, r"`split` \('dev'\) must be one of 'train', 'validation', 'test'"),
        ({"locales": ["de", "en-US"]}, r"`locales` names an unknown locale, 'en-US' \(did you mean 'en_US'\?\);"),
        ({"locales": []}, "`locales` names no locale"),
        ({"max_dates": 0}, r"`max_dates` \(0\) must be at least 1"),
        ({"size": 0}, r"`size` \(0\) must be at least 1, or None for 100,000"),
        ({"seed": -1}, r"`seed` \(-1\) must not be negative"),
    ],
)
def test_refused_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_dates(**arguments)
