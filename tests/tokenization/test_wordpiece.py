import itertools
import json
import logging
import pydoc_data.topics
import random
import re
import time
import unicodedata
import weakref
from collections import Counter
from pathlib import Path

import pytest
from transformers import BertTokenizer

from regard.tokenization.wordpiece import (
    SPECIAL_TOKENS,
    UnknownReport,
    _count_words,
    check_vocabulary,
    train_wordpiece,
    unknown_report,
)
from tests.support.fresh import run_python

ROOT = Path(__file__).parents[2]
SETTINGS = {
    f"lowercase={lowercase} strip_accents={strip_accents}": {"lowercase": lowercase, "strip_accents": strip_accents}
    for lowercase in (True, False)
    for strip_accents in (True, False)
}
LETTERS = ["Mañana hacía calor", "Ich möchte ein Café", "Її словник їй ДОПОМІГ", "cafe voila Hacia mochte"] * 3


def mixed_strings(count: int, seed: int) -> list[str]:
    """Digits, accents, emoji, Chinese, right-to-left, punctuation, control characters and spaces, all mixed."""
    kinds = [
        "abcdefghij THE and Zz",
        "0123456789",
        "éñüßÅçİıǅſ" + unicodedata.normalize("NFD", "éñüÅ"),
        "👍🏽👩‍👩‍👧🇫🇷☃️😀",
        "中文字符漢字かなカナ한국어",
        "שלוםمرحبابالعالم\u200f",
        ".,;:!?-_'\"()[]{}#@€→§「」…",
        "\x00\x01\x07\x0b\x0c\x1b\x1c\x1f\x7f\x85\xad\u200b\u200d\ufeff\ufffd\ue000",
        " \t\n\r\xa0\u2003\u3000",
    ]
    generator = random.Random(seed)
    return [
        "".join(generator.choice(generator.choice(kinds)) for _ in range(generator.randrange(61)))
        for _ in range(count)
    ]


def vocabulary(tokenizer: BertTokenizer) -> list[str]:
    ids = tokenizer.get_vocab()
    assert sorted(ids.values()) == list(range(len(ids)))
    return sorted(ids, key=ids.__getitem__)


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    return [*list(pydoc_data.topics.topics.values())[:30], *mixed_strings(200, seed=1), *LETTERS]


@pytest.fixture(scope="module")
def trained(corpus) -> dict[str, BertTokenizer]:
    return {
        name: train_wordpiece(corpus, vocab_size=1237, model_max_length=77, **settings)
        for name, settings in SETTINGS.items()
    }


@pytest.fixture(scope="module")
def tokenizer(trained) -> BertTokenizer:
    return trained["lowercase=True strip_accents=False"]


@pytest.fixture(scope="module")
def reloaded(trained, tmp_path_factory) -> dict[str, dict]:
    """What a process that cannot import regard gets from AutoTokenizer, by settings."""
    folder = tmp_path_factory.mktemp("saved")
    for name, tokenizer in trained.items():
        tokenizer.save_pretrained(folder / name)
        (folder / name / "config.json").write_text(json.dumps({"model_type": "regard_bert", "vocab_size": 1237}))
    (folder / "texts.json").write_text(json.dumps(mixed_strings(1000, seed=2)))
    script = """
import json, pathlib, sys
from transformers import AutoTokenizer
texts = json.loads(pathlib.Path("texts.json").read_text())
found = {}
for folder in sorted(path for path in pathlib.Path(".").iterdir() if path.is_dir()):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found[folder.name] = {
        "class": type(tokenizer).__name__,
        "ids": tokenizer(texts)["input_ids"],
        "pair": dict(tokenizer("the", "class")),
        "model_max_length": tokenizer.model_max_length,
    }
    for copy in ("copy", "copy of copy"):
        tokenizer.save_pretrained(folder / copy)
        tokenizer = AutoTokenizer.from_pretrained(folder / copy)
assert "regard" not in sys.modules
print(json.dumps(found))
"""
    result = run_python(script, folder)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    for name in found:
        found[name]["folder"] = folder / name
    return found


def test_it_is_a_stock_tokenizer_whose_special_tokens_come_first(tokenizer):
    assert type(tokenizer) is BertTokenizer
    assert tuple(vocabulary(tokenizer)[:5]) == SPECIAL_TOKENS
    names = ("pad_token_id", "unk_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
    assert [getattr(tokenizer, name) for name in names] == [0, 1, 2, 3, 4]
    assert len(tokenizer) == 1237


@pytest.mark.parametrize("name", SETTINGS)
def test_autotokenizer_gives_the_same_ids_without_our_code(trained, reloaded, name):
    assert reloaded[name]["class"] == "BertTokenizer"
    assert reloaded[name]["ids"] == trained[name](mixed_strings(1000, seed=2))["input_ids"]
    assert reloaded[name]["model_max_length"] == 77
    assert reloaded[name]["pair"]["token_type_ids"] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("name", SETTINGS)
def test_saving_again_changes_nothing(reloaded, name):
    folder = reloaded[name]["folder"]
    assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "BertTokenizer"
    for copy in ("copy", "copy of copy"):
        assert (folder / copy / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    # The first load adds `is_local` to the configuration; from then on it stays as it is.
    configurations = [(folder / copy / "tokenizer_config.json").read_bytes() for copy in ("copy", "copy of copy")]
    assert configurations[0] == configurations[1]


@pytest.mark.parametrize(
    ("lowercase", "strip_accents", "words"),
    [
        (True, False, ["hacía", "möchte", "їй"]),
        (True, True, ["hacia", "mochte", "іи"]),
        (False, False, ["Hacía", "MÖCHTE", "Їй"]),
        (False, True, ["Hacia", "MOCHTE", "Іи"]),
    ],
)
def test_lower_casing_and_accents_are_two_options(lowercase, strip_accents, words):
    texts = ["Hacía MÖCHTE Їй"] * 3
    tokenizer = train_wordpiece(texts, vocab_size=99, lowercase=lowercase, strip_accents=strip_accents)
    assert tokenizer.tokenize("Hacía MÖCHTE Їй") == words


def test_the_vocabulary_is_the_same_in_every_process(capsys):
    # All words are equally frequent, and so are the rare characters: nearly every choice is a tie.
    script = """
import json, random
from regard.tokenization.wordpiece import train_wordpiece
generator = random.Random(0)
words = ["".join(generator.choices("abcdefgh", k=7)) for _ in range(500)] + list("αβγδεζηθικλμνξοπρστυφχψω")
for vocab_size in (99, 997):
    ids = train_wordpiece(words, vocab_size=vocab_size, min_frequency=1).get_vocab()
    print(json.dumps(sorted(ids.items(), key=lambda item: item[1])))
"""
    # The second one has another seed of the hashes.
    exec(script, {})
    first = capsys.readouterr().out
    second = run_python(script, ROOT, environment={"RAYON_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "true"})
    assert second.returncode == 0, second.stderr
    assert [len(json.loads(line)) for line in first.splitlines()] == [99, 997]
    assert first == second.stdout


def test_a_word_is_unknown_only_for_an_unknown_character_or_its_length(tokenizer):
    known = set(vocabulary(tokenizer))
    letters = [c for c in known if len(c) == 1 and f"##{c}" in known]
    assert set("abcdefghijklmnopqrstuvwxyz0123456789éí中שمü👍") <= known
    generator = random.Random(3)
    for length in (1, 2, 7, 40, 100):
        assert "[UNK]" not in tokenizer.tokenize("".join(generator.choices(letters, k=length)))
    assert tokenizer.tokenize("the" + "ሀ") == ["[UNK]"]


def test_every_known_character_can_continue_a_word_unless_it_is_one(tokenizer):
    known = set(vocabulary(tokenizer))
    assert {"##a", "##é", "##👍", "##\u0301"} <= known
    assert {".", "中", "-"} <= known
    assert not {"##.", "##中", "##-"} & known


@pytest.mark.parametrize("text", ["", " ", "\t\n \u3000\xa0", "\x00", "\u200b\ufeff\x07\ufffd"])
def test_text_without_words_has_no_tokens(tokenizer, text):
    assert tokenizer.tokenize(text) == []
    assert tokenizer(text)["input_ids"] == [2, 3]


def test_control_characters_vanish(tokenizer):
    assert tokenizer.tokenize("th\x00e cl\x1bas\u200bs\x7f") == tokenizer.tokenize("the class")


def test_accents_typed_either_way_are_known(trained):
    composed = "café hacía möchte їй"
    decomposed = unicodedata.normalize("NFD", composed)
    assert composed != decomposed
    for name, settings in SETTINGS.items():
        assert "[UNK]" not in trained[name].tokenize(composed)
        assert "[UNK]" not in trained[name].tokenize(decomposed)
        if settings["strip_accents"]:
            assert trained[name].tokenize(composed) == trained[name].tokenize(decomposed)
    # The marks come from the composed letters alone, even where none stands in the corpus.
    assert "[UNK]" not in train_wordpiece([composed], vocab_size=199).tokenize(decomposed)


def test_chinese_characters_are_words_and_right_to_left_text_keeps_its_order(tokenizer):
    assert tokenizer.tokenize("a中文b") == ["a", "中", "文", "b"]
    assert "".join(tokenizer.tokenize("שלום")).replace("##", "") == "שלום"


def test_special_tokens_written_in_a_text_are_special_as_in_stock(tokenizer):
    assert tokenizer.tokenize("the [MASK] class") == ["the", "[MASK]", "class"]
    assert tokenizer("the [SEP]", add_special_tokens=False)["input_ids"][-1] == tokenizer.sep_token_id
    assert "[MASK]" not in tokenizer.tokenize("the [mask] class")


def test_words_too_long_are_unknown_and_cost_no_time(tokenizer):
    assert tokenizer.tokenize("a" * 100) != ["[UNK]"]
    assert tokenizer.tokenize("a" * 101) == ["[UNK]"]
    assert tokenizer.tokenize("the " + "a" * 200 + " class") == ["the", "[UNK]", "class"]
    start = time.perf_counter()
    assert tokenizer.tokenize("ab" * 500_000) == ["[UNK]"]
    small = train_wordpiece(["ab" * 100_000, "ab" * 50, "ba ba"], vocab_size=31)
    assert time.perf_counter() - start < 5
    assert small.tokenize("ab" * 50) != ["[UNK]"]


def test_words_are_counted_as_the_tokenizer_splits_them(tokenizer):
    texts = mixed_strings(300, seed=4)
    backend = tokenizer.backend_tokenizer
    expected = Counter(
        word
        for text in texts
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))
    )
    assert _count_words(backend, texts) == expected


def test_rare_characters_do_not_crowd_out_the_words():
    # 2,000 rare characters, 1 in 200 of all, which would fill the vocabulary three times over.
    words = [f"{first}{last}ing" for first in "bcdfghjklm" for last in ("ea", "oo", "ai", "ou", "ie")]
    rare = [chr(code) for code in range(0x1200, 0x1200 + 2000) if chr(code).isalpha()]
    tokenizer = train_wordpiece([" ".join(words)] * 2000 + rare, vocab_size=499)
    known = vocabulary(tokenizer)
    characters = [piece for piece in known[5:] if len(piece.removeprefix("##")) == 1]
    assert set(words) <= set(known)
    assert len(characters) > 240
    assert tokenizer.tokenize("beaing coo" + rare[-1]) == ["beaing", "[UNK]"]


def test_room_left_goes_to_rare_characters():
    # Chinese characters are never merged, so half of the vocabulary would stay empty.
    hanzi = [chr(0x4E00 + i) for i in range(300)]
    texts = [" ".join(hanzi[:100])] * 200 + hanzi
    tokenizer = train_wordpiece(texts, vocab_size=251)
    assert len(tokenizer) == 251
    assert sum(character in tokenizer.get_vocab() for character in hanzi) == 246
    assert train_wordpiece(texts, vocab_size=305).tokenize("".join(hanzi)) == hanzi


def test_nothing_is_learned_across_a_character_left_out():
    texts = ["q z"] * 1000 + ["q☃z"] * 5
    tokenizer = train_wordpiece(texts, vocab_size=99, character_coverage=0.99)
    assert "qz" not in tokenizer.get_vocab()
    assert "qz" in train_wordpiece([*texts, "qz", "qz"], vocab_size=99, character_coverage=0.99).get_vocab()


def test_character_coverage():
    words = ["".join(letters) for letters in itertools.product("ab", repeat=5)]
    texts = words * 100 + ["☃"] * 10 + ["☄"] * 5
    found = []
    for coverage in (0.999, 0.9995, 1.0):
        known = train_wordpiece(texts, vocab_size=23, character_coverage=coverage).get_vocab()
        found.append(("☃" in known, "☄" in known))
    assert found == [(False, False), (True, False), (True, True)]
    for wrong in (0, -0.5, 1.01):
        with pytest.raises(ValueError, match=r"`character_coverage` \(.*\) must be"):
            train_wordpiece(texts, character_coverage=wrong)


def test_a_vocabulary_too_small_says_what_is_enough():
    texts = ["the quick brown fox jumps over the lazy dog."] * 3
    # 26 letters that start and continue, one full stop, five special tokens.
    for vocab_size in (-1, 0, 5, 57):
        with pytest.raises(ValueError, match=rf"`vocab_size` \({vocab_size}\) must be at least 58:"):
            train_wordpiece(texts, vocab_size=vocab_size)
    assert len(train_wordpiece(texts, vocab_size=58)) == 58
    # Less will do for less than the 99% that is the least otherwise.
    with pytest.raises(ValueError, match=r"at least (\d\d): .* 50% of the characters") as refusal:
        train_wordpiece(texts, vocab_size=5, character_coverage=0.5)
    least = int(re.search(r"at least (\d+)", str(refusal.value))[1])
    assert least < 40
    assert len(train_wordpiece(texts, vocab_size=least, character_coverage=0.5)) == least


@pytest.mark.parametrize("texts", [[], [""], [" \n", "\x00"], ["a" * 101]])
def test_a_corpus_without_words_is_refused(texts):
    with pytest.raises(ValueError, match="no words"):
        train_wordpiece(texts)


def test_one_string_is_not_a_corpus(tokenizer):
    with pytest.raises(TypeError, match="not one string"):
        train_wordpiece("the class")
    with pytest.raises(TypeError, match="not one string"):
        unknown_report(tokenizer, "the class")


def test_a_small_corpus_gives_a_smaller_vocabulary_and_says_so(caplog):
    texts = ["the class the class"]
    with caplog.at_level(logging.WARNING):
        tokenizer = train_wordpiece(iter(texts), vocab_size=999)
    assert f"{len(tokenizer)} word pieces instead of 999" in caplog.text
    assert tokenizer.tokenize("the class") == ["the", "class"]
    caplog.clear()
    train_wordpiece(texts, vocab_size=len(tokenizer))
    # One id is left free here, but for want of a second one, not of text.
    assert len(train_wordpiece(["aaa bb c"], vocab_size=10, character_coverage=0.8)) == 9
    assert caplog.text == ""


def test_min_frequency():
    texts = ["often often often seldom"]
    found = {n: train_wordpiece(texts, vocab_size=99, min_frequency=n).get_vocab() for n in (1, 3, 4)}
    assert [("often" in vocab, "seldom" in vocab) for vocab in found.values()] == [
        (True, True),
        (True, False),
        (False, False),
    ]
    with pytest.raises(ValueError, match=r"`min_frequency` \(0\) must be"):
        train_wordpiece(texts, min_frequency=0)


def test_the_most_frequent_pair_is_merged_first():
    texts = ["a b " * 5000, "ab " * 1200, "cd " * 2500]
    known = train_wordpiece(texts, vocab_size=14).get_vocab()
    assert ("cd" in known, "ab" in known) == (True, False)


def test_texts_are_let_go_once_read(tokenizer):
    class Text(str):
        pass

    alive = weakref.WeakSet()

    def read():
        for number in range(12):
            text = Text(f"the{number} " + " " * 400_000)
            alive.add(text)
            most.append(len(alive))
            yield text

    most: list[int] = []
    assert unknown_report(tokenizer, read()).tokens >= 12
    assert max(most) < 7


def test_unknown_report_counts_what_the_tokenizer_makes(tokenizer):
    texts = [*mixed_strings(200, seed=5), *["xሀx the Ꮳ Ꮳ"] * 50, "a" * 300, "the" + " " * 1_000_000, "the class"]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    report = unknown_report(tokenizer, iter(texts))
    assert report.tokens == sum(map(len, encoded))
    assert report.unknown == sum(ids.count(tokenizer.unk_token_id) for ids in encoded)
    assert report.share == report.unknown / report.tokens
    assert report.examples[:2] == (("Ꮳ", 100), ("xሀx", 50))
    assert ("a" * 100, 1) in unknown_report(tokenizer, texts, max_examples=999).examples
    assert unknown_report(tokenizer, texts, max_examples=1).examples == (("Ꮳ", 100),)


def test_unknown_report_of_nothing(tokenizer):
    assert unknown_report(tokenizer, []) == UnknownReport(tokens=0, unknown=0, examples=())
    assert unknown_report(tokenizer, [""]).share == 0


def test_unknown_report_neither_sees_nor_changes_truncation_and_padding(trained):
    tokenizer = trained["lowercase=False strip_accents=False"]
    tokenizer(["the class"], truncation=True, padding="max_length", max_length=5)
    before = tokenizer.backend_tokenizer.to_str()
    assert unknown_report(tokenizer, ["the " * 20, "the"]).tokens == 21
    assert tokenizer.backend_tokenizer.to_str() == before


def test_a_model_must_have_every_id(corpus):
    tokenizer = train_wordpiece(corpus, vocab_size=701)
    check_vocabulary(tokenizer, 701)
    check_vocabulary(tokenizer, 704)
    tokenizer.add_tokens(["<one>", "<two>", "<three>"])
    check_vocabulary(tokenizer, 704)
    for vocab_size in (701, 703):
        with pytest.raises(ValueError, match=rf"has {vocab_size}.*resize_token_embeddings\(704\)"):
            check_vocabulary(tokenizer, vocab_size)
