import pytest
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerFast

from regard.inspection.maps.tokens import (
    Token,
    decoded_tokens,
    encoded_tokens,
    is_right_to_left,
    printable,
    word_numbers,
)
from tests.inspection.conftest import HARD, RIGHT_TO_LEFT, TEXT


def words_of(text: str) -> list[str]:
    numbers = word_numbers(text)
    assert len(numbers) == len(text)
    assert numbers == sorted(numbers)
    return ["".join(text[i] for i in range(len(text)) if numbers[i] == word) for word in sorted(set(numbers))]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("don't long-legged, snake_case", ["don't", " ", "long-legged", ",", " ", "snake_case"]),
        ("a -b c- '", ["a", " ", "-", "b", " ", "c", "-", " ", "'"]),
        ("x  \n\t y", ["x", "  \n\t ", "y"]),
        ("中国 naïve", ["中", "国", " ", "naïve"]),
        ("nai\u0308ve हिन्दी", ["nai\u0308ve", " ", "हिन्दी"]),
        ("한국어 ไทย", ["한국어", " ", "ไ", "ท", "ย"]),
        ("👨\u200d👩\u200d👧👍🏽❤\ufe0f", ["👨\u200d👩\u200d👧", "👍🏽", "❤\ufe0f"]),
        ("🇩🇪🇫🇷🇮 x", ["🇩🇪", "🇫🇷", "🇮", " ", "x"]),
        ("می\u200cخواهم أهلا", ["می\u200cخواهم", " ", "أهلا"]),
        ("", []),
    ],
)
def test_words_of_a_text_in_any_script(text, words):
    assert words_of(text) == words


def encode(tokenizer, *texts):
    encoding = tokenizer(*texts, return_offsets_mapping=True)
    return encoded_tokens(tokenizer, encoding.convert_to_tensors("pt", prepend_batch_axis=True), texts)


@pytest.mark.parametrize("kind", ["pieces", "bytes", "characters", "words"])
@pytest.mark.parametrize("text", [TEXT, HARD, RIGHT_TO_LEFT, "  spaced\n out  "])
def test_tokens_are_joined_back_to_the_text(tokenizers, kind, text):
    tokens = encode(tokenizers[kind], text)
    for token in tokens:
        if token.span is None:
            assert token.text == token.piece == token.word_text
            continue
        found = text[slice(*token.span)]
        assert token.text.partition(" ")[0] in found or token.text == found
        assert found in token.word_text or not found.strip()
    # Words are whole: each holds the words of the text that its tokens touch.
    assert [token.word for token in tokens] == sorted(token.word for token in tokens)
    joined = {token.word: token.word_text for token in tokens if token.span}
    if kind == "pieces":
        # This one leaves control characters out.
        assert list(joined.values()) == [word for word in words_of(text) if word.strip() and word != "\u202e"]


def test_a_character_of_several_tokens_is_numbered(tokenizers):
    tokens = encode(tokenizers["bytes"], "河 a")
    assert [token.text for token in tokens] == ["<s>", "河 1/3", "河 2/3", "河 3/3", " ", "a"]
    assert [token.word for token in tokens] == [0, 1, 1, 1, 2, 3]


@pytest.mark.parametrize(("character", "label"), [(" ", "␣ 1/2"), ("\u0301", "◌\u0301 1/2"), ("\u200d", "⟨200D⟩ 1/2")])
def test_a_part_of_a_character_that_is_not_seen_has_a_label(character, label):
    assert Token(f"{character} 1/2", "x", (0, 1), 0, character).label == label


@pytest.mark.parametrize("text", ["日本 日", "▁日"])
def test_a_prefix_that_is_a_token_of_its_own_stands_for_no_text(text):
    """Its offsets are those of the first character, which is not shared."""
    backend = Tokenizer(Unigram([(piece, -1.0) for piece in ("<unk>", "▁", "日", "本")], unk_id=0))
    backend.pre_tokenizer = Metaspace(prepend_scheme="always")
    tokens = encode(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"), text)
    if text[0] == "▁":
        assert [(token.text, token.span) for token in tokens] == [("▁", (0, 1)), ("日", (1, 2))]
        return
    assert [(token.text, token.span) for token in tokens] == [
        ("▁", None),
        ("日", (0, 1)),
        ("本", (1, 2)),
        (" ", (2, 3)),
        ("日", (3, 4)),
    ]
    assert len({token.word for token in tokens}) == 5


def test_an_id_that_the_tokenizer_has_nothing_for(tokenizers):
    tokenizer = tokenizers["pieces"]
    ids = tokenizer("the bank", add_special_tokens=False)["input_ids"]
    tokens = decoded_tokens(tokenizer, [ids[0], 999, *ids[1:]])
    assert [token.label for token in tokens] == ["the", "id 999", "bank"]
    assert tokens[1].span is None


def test_what_the_tokenizer_does_not_know_keeps_its_text(tokenizers):
    token = encode(tokenizers["pieces"], "the Ж")[2]
    assert (token.text, token.piece) == ("Ж", "[UNK]")


def test_pairs(tokenizers):
    tokens = encode(tokenizers["pieces"], "the", "the bank")
    assert [token.text for token in tokens if token.span is None] == ["[CLS]", "[SEP]", "[SEP]"]
    assert [token.word_text for token in tokens if token.span][:2] == ["the", "the"]
    assert tokens[1].word != tokens[3].word


def test_a_special_token_in_the_text_is_one_word(tokenizers):
    tokens = encode(tokenizers["pieces"], "the [MASK] bank")
    mask = next(token for token in tokens if token.piece == "[MASK]")
    assert (mask.text, mask.word_text, mask.span) == ("[MASK]", "[MASK]", (4, 10))


@pytest.mark.parametrize("kind", ["pieces", "bytes", "characters", "words"])
def test_ids_alone_give_the_tokens_of_what_they_decode_to(tokenizers, kind):
    tokenizer = tokenizers[kind]
    ids = tokenizer(TEXT)["input_ids"]
    decoded = decoded_tokens(tokenizer, ids)
    encoded = encode(tokenizer, tokenizer.decode(ids, skip_special_tokens=True))
    assert decoded == encoded


def test_ids_of_bytes_give_whole_characters(tokenizers):
    ids = tokenizers["bytes"]("a河😀b")["input_ids"]
    decoded = decoded_tokens(tokenizers["bytes"], ids)
    assert decoded == encode(tokenizers["bytes"], "a河😀b")
    # A character that was not finished.
    assert decoded_tokens(tokenizers["bytes"], ids[:3])[1].text == "a"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" ", "␣"),
        ("a\nb", "a⏎b"),
        ("a\u202eb", "a⟨202E⟩b"),
        ("\u2028", "⟨2028⟩"),
        ("\x00", "⟨0000⟩"),
        ("می\u200cخو", "می\u200cخو"),
        ("a b", "a b"),
        ("\u00a0", "⟨00A0⟩"),
        (" \u3000\n", "␣⟨3000⟩⏎"),
        ("\u200d", "⟨200D⟩"),
        ("\ufe0f\u200d👧", "⟨FE0F⟩⟨200D⟩👧"),
        ("\u0301", "◌\u0301"),
        ("्\u200da\u0301", "◌्\u200da\u0301"),
        ("", ""),
    ],
)
def test_hidden_characters_are_shown(text, shown):
    assert printable(text) == shown


def test_direction():
    assert is_right_to_left(RIGHT_TO_LEFT)
    assert is_right_to_left("12, שלום abc")
    assert not is_right_to_left(TEXT)
    assert not is_right_to_left("12 !")


def test_words_of_two_texts_are_never_one(tokenizers):
    """Not even where no special token stands between them."""
    encoding = tokenizers["characters"]("ab", "ab", add_special_tokens=False, return_offsets_mapping=True)
    tokens = encoded_tokens(
        tokenizers["characters"], encoding.convert_to_tensors("pt", prepend_batch_axis=True), ("ab", "ab")
    )
    assert [(token.word, token.word_text) for token in tokens] == [(0, "ab"), (0, "ab"), (1, "ab"), (1, "ab")]
