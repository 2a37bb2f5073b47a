"""Any text, to every kind of tokenizer that is trained here, and any small corpus to train one on."""

import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from regard.tokenization.byte_level import train_byte_level
from regard.tokenization.characters import train_characters
from regard.tokenization.wordpiece import check_vocabulary, train_wordpiece, unknown_report
from regard.tokenization.words import train_words
from tests.fuzz.attempts import attempt_in_a_line

CORPUS = ["The quick brown fox, jumps over the lazy dog's back.", "Zwölf Boxkämpfer jagen Viktor quer über den Sylter"]
KINDS = {
    "word pieces": lambda texts, **settings: train_wordpiece(texts, **{"vocab_size": 150, **settings}),
    "cased word pieces": lambda texts: train_wordpiece(texts, vocab_size=150, lowercase=False),
    "word pieces without accents": lambda texts: train_wordpiece(texts, vocab_size=150, strip_accents=True),
    "bytes": lambda texts: train_byte_level(texts, vocab_size=300),
    "characters": train_characters,
    "words": train_words,
    "cased words": lambda texts: train_words(texts, lowercase=False),
}
TRAINED = {kind: train(CORPUS) for kind, train in KINDS.items()}

every_kind = pytest.mark.parametrize("kind", KINDS)

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<pad>", "<s>", "</s>", "<unk>"]
# What trips up code that takes a text for letters and spaces.
PIECES = [
    *SPECIAL,
    *"\x00 \x7f \x85 \u00ad \u0301 \u200b \u200d \u2028 \u202e \ufeff \ufffd \uffff \U0010ffff ## Ġ \r\n \t".split(
        " "
    ),
    *"שלום مرحبا 日本語 ﷺ ǆ İ ß ŉ ﬁ 👨\u200d👩\u200d👧 🇫🇷 ☃️ é e\u0301 각 ᄀ\u1161\u11a8".split(),
    " ",
    "a" * 101,
    "fox" * 50,
]
# Every code point but halves of surrogate pairs, which are no text: see below.
any_character = st.characters(exclude_categories=["Cs"])
texts = st.one_of(
    st.text(any_character, max_size=40),
    st.text(string.printable, max_size=60),
    st.lists(st.sampled_from(PIECES) | st.text(any_character, max_size=3), max_size=8).map("".join),
)


def without_special(tokenizer, text):
    """The ids of a text in which names of special tokens are text, and where each is from."""
    return tokenizer(
        text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
    )


@every_kind
@given(text=texts)
@example(text="")
@example(text=" \n")
@example(text="\x00")
def test_any_text_has_ids_of_the_vocabulary_and_places_in_itself(kind, text):
    tokenizer = TRAINED[kind]
    for encoding in (without_special(tokenizer, text), tokenizer(text, return_offsets_mapping=True, verbose=False)):
        assert all(0 <= number < len(tokenizer) for number in encoding["input_ids"])
        assert len(encoding["offset_mapping"]) == len(encoding["input_ids"])
        assert all(0 <= start <= end <= len(text) for start, end in encoding["offset_mapping"])
    assert isinstance(tokenizer.decode(encoding["input_ids"]), str)
    assert isinstance(tokenizer.decode(encoding["input_ids"], skip_special_tokens=True), str)
    # Alone as in a batch, whatever was before.
    together = tokenizer(["fox", text, "a dog"], verbose=False)["input_ids"]
    assert together[1] == encoding["input_ids"]


@every_kind
@given(text=texts)
def test_names_of_special_tokens_are_text_where_that_is_asked_for(kind, text):
    tokenizer = TRAINED[kind]
    kept = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    assert not kept & set(without_special(tokenizer, text)["input_ids"])


@given(text=texts)
def test_bytes_give_any_text_back(text):
    tokenizer = TRAINED["bytes"]
    ids = without_special(tokenizer, text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


@given(text=st.text(sorted(set("".join(CORPUS))), max_size=60))
def test_characters_give_a_text_of_known_ones_back(text):
    tokenizer = TRAINED["characters"]
    assert tokenizer.decode(without_special(tokenizer, text)["input_ids"]) == text


@given(text=texts)
def test_characters_are_one_id_each(text):
    assert len(without_special(TRAINED["characters"], text)["input_ids"]) == len(text)


@given(words=st.lists(st.sampled_from(sorted(set("".join(CORPUS).replace(",", " ").split()))), max_size=9))
def test_words_of_the_corpus_are_known(words):
    for kind in ("words", "cased words", "word pieces", "cased word pieces"):
        tokenizer = TRAINED[kind]
        assert unknown_report(tokenizer, [" ".join(words)]).unknown == 0, kind


@every_kind
@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\udc41\ud841"])
def test_half_a_surrogate_pair_is_no_text(kind, text):
    """The tokenizers say so themselves; what is read from files is asked before, see `num_bytes`."""
    with pytest.raises((TypeError, UnicodeEncodeError)):
        TRAINED[kind](text)


# Training


@every_kind
@given(corpus=st.lists(texts, max_size=5))
@example(corpus=[])
@example(corpus=["", " \n"])
@example(corpus=SPECIAL)
@example(corpus=["[SEP]" * 30, "<s></s>" * 30])
def test_any_corpus_trains_a_tokenizer_or_is_refused(kind, corpus):
    tokenizer, message = attempt_in_a_line(ValueError, KINDS[kind], iter(corpus))
    if tokenizer is None:
        assert "`texts`" in message or "`vocab_size`" in message
        return
    names = [token for token in SPECIAL if token in tokenizer.get_vocab()]
    assert tokenizer.convert_tokens_to_ids(names) == list(range(len(names)))
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    check_vocabulary(tokenizer, len(tokenizer))
    for text in corpus:
        ids = without_special(tokenizer, text)["input_ids"]
        assert all(0 <= number < len(tokenizer) for number in ids)
        if kind == "bytes":
            assert tokenizer.decode(ids) == text
    again = KINDS[kind](corpus)
    assert again.get_vocab() == tokenizer.get_vocab()


@given(corpus=st.lists(texts, min_size=1, max_size=4), vocab_size=st.integers(-1, 60), coverage=st.floats(0, 1))
def test_the_vocabulary_of_word_pieces_is_no_larger_than_asked_for(corpus, vocab_size, coverage):
    settings = {"vocab_size": vocab_size, "character_coverage": coverage}
    tokenizer, _ = attempt_in_a_line(ValueError, train_wordpiece, corpus, **settings)
    assert tokenizer is None or len(tokenizer) <= vocab_size
