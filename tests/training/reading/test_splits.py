"""Which rows are trained on and which are held out."""

from collections import Counter

import pytest
from datasets import Dataset, concatenate_datasets

from regard.training.families import seq2seq
from regard.training.families.seq2seq import PairSettings, load_pair_split
from regard.training.finetuning.settings import FinetuneSettings
from regard.training.reading.splits import load_split, sample_rows
from regard.training.run.settings import TrainingSettings


def make(name: str, split: str) -> Dataset:
    return Dataset.from_dict({"text": [f"{name} {split} {number}" for number in range(3)]})


def read(names: list[str], is_training: bool) -> Dataset:
    """Ten rows of each; three more of what is held out, which no limit holds for."""
    numbers = range(10 if is_training else 13)
    parts = [Dataset.from_dict({"text": [f"{name} {number}" for number in numbers]}) for name in names]
    return concatenate_datasets(parts)


def split(**given) -> tuple[list[str], list[str]]:
    return tuple(part[:]["text"] for part in load_split(TrainingSettings(**given), read, {"own": make}))


def three(name: str, part: str) -> list[str]:
    return make(name, part)[:]["text"]


def test_built_in_data_knows_what_to_hold_out():
    assert split(data=["own", "own:few"], validation="0.9") == (
        three("own", "train") + three("own:few", "train"),
        three("own", "validation") + three("own:few", "validation"),
    )


def test_a_share_of_other_data_is_drawn():
    rows, held_out = split(data=["a", "b"], validation="0.25")
    everything = read(["a", "b"], True)[:]["text"]
    assert (len(rows), len(held_out)) == (15, 5)
    assert sorted([*rows, *held_out]) == sorted(everything)
    assert split(data=["a", "b"], validation="0.25") == (rows, held_out)
    other = split(data=["a", "b"], validation="0.25", seed=1)[1]
    assert set(other) != set(held_out)
    # By chance: neither the beginning nor the end.
    assert held_out not in (everything[:5], everything[-5:])


def test_one_row_is_held_out_at_least():
    rows, held_out = split(data=["a"], validation="0.001")
    assert (len(rows), len(held_out)) == (9, 1)


def test_a_mixture_holds_out_of_each():
    rows, held_out = split(data=["a", "own:few", "b"], validation="0.25")
    assert [text for text in rows if text.startswith("own")] == three("own:few", "train")
    assert [text for text in held_out if text.startswith("own")] == three("own:few", "validation")
    files = [text for text in [*rows, *held_out] if not text.startswith("own")]
    assert sorted(files) == sorted(read(["a", "b"], True)[:]["text"])
    assert (len(rows), len(held_out)) == (3 + 15, 3 + 5)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"validation": "v"}, read(["v"], False)[:]["text"]),
        ({"validation": "own"}, three("own", "validation")),
        ({"validation": "own:few", "split": "test"}, three("own:few", "test")),
    ],
)
def test_another_source_is_held_out(given, expected):
    rows, held_out = split(data=["a", "own"], **given)
    assert held_out == expected
    assert rows == three("own", "train") + read(["a"], True)[:]["text"]


def test_a_name_that_begins_like_the_built_in_one_is_another():
    rows, held_out = split(data=["owner"], validation="0.1")
    assert all(text.startswith("owner ") for text in [*rows, *held_out])


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"data": []}, "`data` names no source: give 'own', files"),
        ({"data": ["a"], "validation": "1.5"}, r"`validation` \(1.5\) must be a share between 0 and 1"),
        ({"data": ["own"], "validation": "0"}, r"`validation` \(0\) must be a share between 0 and 1"),
        ({"data": ["a"], "validation": "0.99"}, "there are 10 rows in a, too few to hold out 10"),
    ],
)
def test_what_cannot_be_split(given, complaint):
    with pytest.raises(ValueError, match=complaint) as raised:
        split(**given)
    assert "\n" not in str(raised.value)


# Pairs


def dates_of(pairs: Dataset) -> set[str]:
    return {date for target in pairs["target"] for date in target.split()}


def test_dates_that_are_held_out_are_in_no_training_pair():
    rows, held_out = load_pair_split(PairSettings(data=["dates:en_US,de"], max_pairs=400))
    assert len(rows) == 400
    assert len(held_out) == 2_000
    assert {source.partition(":")[0] for source in [*rows["source"], *held_out["source"]]} == {"en_US", "de"}
    assert dates_of(rows).isdisjoint(dates_of(held_out))
    test = load_pair_split(
        PairSettings(data=["dates:en_US,de"], max_pairs=400, validation="dates:en_US,de", split="test")
    )[1]
    assert dates_of(test).isdisjoint(dates_of(rows) | dates_of(held_out))
    named = load_pair_split(PairSettings(data=["dates:en_US,de"], max_pairs=400, validation="dates:en_US,de"))[1]
    assert named[:] == held_out[:]


def test_dates_follow_the_seed_and_the_number_in_a_pair():
    pairs = {
        settings: load_pair_split(
            PairSettings(data=["dates:de"], max_pairs=50, max_dates=settings[0], seed=settings[1])
        )
        for settings in ((5, 0), (1, 0), (5, 1))
    }
    longest = {key: max(len(target.split()) for target in rows["target"]) for key, (rows, _) in pairs.items()}
    assert longest == {(5, 0): 5, (1, 0): 1, (5, 1): 5}
    for part in (0, 1):
        assert pairs[5, 0][part]["source"] != pairs[5, 1][part]["source"]
    assert max(len(target.split()) for target in pairs[1, 0][1]["target"]) == 1


def test_dates_and_a_file_are_joined(write_pairs):
    own = write_pairs("own", [(f"s{number}", f"t{number}") for number in range(10)])
    rows, held_out = load_pair_split(PairSettings(data=["dates:de", own], max_pairs=20, validation="0.2"))
    assert (len(rows), len(held_out)) == (20 + 8, 2_000 + 2)
    files = [source for source in [*rows["source"], *held_out["source"]] if not source.startswith("de: ")]
    assert sorted(files) == sorted(f"s{number}" for number in range(10))


def test_a_file_is_held_out_of_dates(write_pairs):
    other = write_pairs("other", [("s", "t"), ("u", "v")])
    rows, held_out = load_pair_split(PairSettings(data=["dates:de"], max_pairs=20, validation=other))
    assert len(rows) == 20
    assert held_out[:] == {"source": ["s", "u"], "target": ["t", "v"]}


def test_dates_are_held_out_of_a_file(write_pairs):
    own = write_pairs("own", [("s", "t")])
    rows, held_out = load_pair_split(PairSettings(data=[own], validation="dates:de"))
    assert rows[:] == {"source": ["s"], "target": ["t"]}
    assert {source[:4] for source in held_out["source"]} == {"de: "}


def test_a_file_of_one_pair_is_too_small(write_pairs):
    own = write_pairs("own", [("s", "t")])
    with pytest.raises(
        ValueError,
        match=r"there is 1 row in .*own.jsonl, too few to hold out 1 and train on 1 or more: add some, or name",
    ):
        load_pair_split(PairSettings(data=[own]))


def test_how_pairs_are_read_is_passed_on(monkeypatch):
    asked = []

    def load(names, **options):
        asked.append((names, options))
        return Dataset.from_dict({"source": ["a", "b", "c"], "target": ["d", "e", "f"]})

    monkeypatch.setattr(seq2seq, "load_pairs", load)
    reading = {"source_column": "fr", "target_column": "translation.en", "split": "test"}
    reading |= {"max_pairs": 9, "bad_records": "skip"}
    load_pair_split(PairSettings(data=["a.csv", "b/c"], validation="d.csv", **reading))
    # What is held out is read in full.
    assert asked == [(["d.csv"], {**reading, "max_pairs": None}), (["a.csv", "b/c"], reading)]


def test_an_unknown_locale_is_named():
    with pytest.raises(ValueError, match="unknown locale, 'xx'"):
        load_pair_split(PairSettings(data=["dates:xx"]))


# Drawing rows


def test_each_class_gives_its_share():
    groups = ["a"] * 70 + ["b"] * 20 + ["c"] * 10 + ["d"]
    held_out = sample_rows(groups, 0.2, seed=3)
    assert Counter(groups[place] for place in held_out) == {"a": 14, "b": 4, "c": 2}
    assert held_out == sample_rows(groups, 0.2, seed=3) == sorted(set(held_out))
    assert held_out != sample_rows(groups, 0.2, seed=4)
    # However large the share is, there is one of each to learn from.
    assert set(range(len(groups))) - set(sample_rows(groups, 0.99, seed=3)) >= {100}
    assert len(sample_rows(["a"] * 7, 0.01, seed=0)) == 1


@pytest.mark.parametrize("share", ["0", "1", "1.5", "-0.1", "nan"])
def test_a_share_is_between_0_and_1(share):
    with pytest.raises(ValueError, match=r"^`validation` \(.*\) must be a share between 0 and 1, or a source"):
        FinetuneSettings(validation=share)


def test_too_few_rows_to_hold_any_out():
    with pytest.raises(
        ValueError, match=r"^`data` has 1 usable row, too few to hold one out \(`validation` is 0\.5\)"
    ):
        sample_rows(["a"], 0.5, seed=0)
    with pytest.raises(ValueError, match=r"^`data` has 3 usable rows, each with another label: none can be held out"):
        sample_rows(["a", "b", "c"], 0.5, seed=0)
