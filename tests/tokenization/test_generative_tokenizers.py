import json
import logging
import random
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast

from regard.tokenization.byte_level import train_byte_level
from regard.tokenization.characters import train_characters
from regard.tokenization.generative import SPECIAL_TOKENS, save_tokenizer
from regard.tokenization.words import train_words
from tests.support.fresh import run_python

ROOT = Path(__file__).parents[2]
TRAINERS = {"byte_level": train_byte_level, "characters": train_characters, "words": train_words}
NAMES = list(TRAINERS)
SPECIAL_TEXT = "a <s> b</s> <pad><unk> c"


def mixed_strings(count: int, seed: int) -> list[str]:
    """Words, digits, accents, combining marks, emoji, Chinese, right-to-left, controls, spaces, punctuation, mixed."""
    kinds = [
        *["the class Of words".split()] * 3,
        list("0123456789"),
        list("éñüßÅçİıǅſ" + unicodedata.normalize("NFD", "éñüÅệ") + "\u0315\u0300\u05ae"),
        ["👍🏽", "👩‍👩‍👧", "🇫🇷", "☃️", "😀"],
        list("中文字符漢字かなカナ한국어"),
        list("שלוםمرحبا\u200f"),
        list(".,;:!?-_'\"()[]{}<>/#@€→§「」…’"),
        list("\x00\x01\x0b\x1b\x1c\x7f\x85\xad\u200b\u200d\ufeff\ufffd\ue000\U0010ffff"),
        [*" \t\n\r\xa0\u2003\u3000", "  ", " .", " 's"],
    ]
    generator = random.Random(seed)
    return [
        "".join(generator.choice(generator.choice(kinds)) for _ in range(generator.randrange(41)))
        for _ in range(count)
    ]


def vocabulary(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    ids = tokenizer.get_vocab()
    assert sorted(ids.values()) == list(range(len(ids)))
    return sorted(ids, key=ids.__getitem__)


def decode(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    return tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)


@pytest.fixture(scope="module")
def trained() -> dict[str, PreTrainedTokenizerFast]:
    corpus = [*mixed_strings(300, seed=1), SPECIAL_TEXT]
    tokenizers = {name: train(corpus, model_max_length=77) for name, train in TRAINERS.items() if name != "byte_level"}
    return {"byte_level": train_byte_level(corpus, vocab_size=337, model_max_length=77), **tokenizers}


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for name, tokenizer in trained.items():
        save_tokenizer(tokenizer, folder / name)
        config = {"model_type": "regard_transformer", "vocab_size": len(tokenizer)}
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def reloaded(saved) -> dict[str, dict]:
    """What a process that cannot import regard gets from AutoTokenizer."""
    (saved / "texts.json").write_text(json.dumps(mixed_strings(1000, seed=2)))
    script = """
import json, pathlib, sys
from transformers import AutoTokenizer
texts = json.loads(pathlib.Path("texts.json").read_text())
found = {}
for folder in sorted(path for path in pathlib.Path(".").iterdir() if path.is_dir()):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found[folder.name] = {
        "ids": tokenizer(texts)["input_ids"],
        "decoded": tokenizer.batch_decode(tokenizer(texts)["input_ids"], skip_special_tokens=True),
        "outputs": list(tokenizer("the")),
        "special": [tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token],
        "model_max_length": tokenizer.model_max_length,
        "padding_side": tokenizer.padding_side,
    }
assert "regard" not in sys.modules
print(json.dumps(found))
"""
    result = run_python(script, saved)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_stock_tokenizer_whose_special_tokens_come_first(trained, name):
    tokenizer = trained[name]
    assert type(tokenizer) is PreTrainedTokenizerFast
    assert tuple(vocabulary(tokenizer)[:4]) == SPECIAL_TOKENS == ("<pad>", "<s>", "</s>", "<unk>")
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id")
    assert [getattr(tokenizer, name) for name in names] == [0, 1, 2, 3]
    assert sorted(tokenizer.all_special_ids) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", NAMES)
def test_autotokenizer_gives_the_same_ids_without_our_code(trained, reloaded, name):
    texts = mixed_strings(1000, seed=2)
    found = reloaded[name]
    assert found["ids"] == trained[name](texts)["input_ids"]
    assert found["decoded"] == [decode(trained[name], text) for text in texts]
    assert found["outputs"] == ["input_ids", "attention_mask"]
    assert found["special"] == list(SPECIAL_TOKENS)
    assert (found["model_max_length"], found["padding_side"]) == (77, "right")


@pytest.mark.parametrize("model_type", ["regard_decoder", "regard_recurrent", "regard_transformer", None])
@pytest.mark.parametrize("name", NAMES)
def test_autotokenizer_gives_the_same_ids_beside_any_of_our_models(trained, saved, tmp_path, name, model_type):
    import regard  # noqa: F401  (registers the model types)

    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((saved / name / file).read_bytes())
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = mixed_strings(300, seed=3)
    assert tokenizer(texts)["input_ids"] == trained[name](texts)["input_ids"]
    assert type(tokenizer) is PreTrainedTokenizerFast


@pytest.mark.parametrize("name", NAMES)
def test_the_saved_class_is_public_and_saving_again_changes_nothing(saved, tmp_path, name):
    folders = [saved / name]
    for copy in ("copy", "copy of copy"):
        save_tokenizer(AutoTokenizer.from_pretrained(folders[-1]), tmp_path / copy)
        folders.append(tmp_path / copy)
    for folder in folders:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
        # Earlier versions would give segment ids by themselves.
        assert config["model_input_names"] == ["input_ids", "attention_mask"]
        assert (folder / "tokenizer.json").read_bytes() == (folders[0] / "tokenizer.json").read_bytes()
    # The first load adds `is_local` to the configuration; from then on it stays as it is.
    configurations = [(folder / "tokenizer_config.json").read_bytes() for folder in folders]
    assert configurations[1] == configurations[2]


def test_saving_changes_nothing_but_the_name_of_the_class(trained, tmp_path):
    trained["words"].save_pretrained(tmp_path / "stock")
    save_tokenizer(trained["words"], str(tmp_path / "ours"))
    stock = (tmp_path / "stock" / "tokenizer_config.json").read_text()
    assert PreTrainedTokenizerFast.__name__ in stock
    renamed = stock.replace(PreTrainedTokenizerFast.__name__, "PreTrainedTokenizerFast")
    assert (tmp_path / "ours" / "tokenizer_config.json").read_text() == renamed

    bert = BertTokenizer(vocab={token: index for index, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])})
    save_tokenizer(bert, tmp_path / "bert")
    config = json.loads((tmp_path / "bert" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "BertTokenizer"


def test_the_vocabulary_is_the_same_in_every_process(capsys):
    # All words are equally frequent, and so are the rare characters: nearly every choice is a tie.
    script = """
import json, random
from regard.tokenization.byte_level import train_byte_level
from regard.tokenization.characters import train_characters
from regard.tokenization.words import train_words
generator = random.Random(0)
words = ["".join(generator.choices("abcdefgh", k=7)) for _ in range(500)] + list("αβγδεζηθικλμνξοπρστυφχψω")
tokenizers = [train_byte_level(words, vocab_size=size, min_frequency=1) for size in (399, 997)]
for tokenizer in (*tokenizers, train_characters(words), train_words(words)):
    print(tokenizer.backend_tokenizer.to_str())
"""
    # The second one has another seed of the hashes.
    exec(script, {})
    first = capsys.readouterr().out
    second = run_python(script, ROOT, environment={"RAYON_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "true"})
    assert second.returncode == 0, second.stderr
    vocabularies = [json.loads(line)["model"]["vocab"] for line in first.splitlines()]
    assert [len(vocab) for vocab in vocabularies] == [399, 997, 4 + 8 + 24, 4 + 500 + 24]
    assert first == second.stdout


def test_a_prompt_begins_and_does_not_end(trained):
    tokenizer = trained["byte_level"]
    ids = tokenizer("the class")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert ids[1:] == tokenizer("the class", add_special_tokens=False)["input_ids"]
    assert not set(ids[1:]) & {0, 1, 2, 3}
    assert tokenizer("")["input_ids"] == [1]
    assert tokenizer(" the" * 99, truncation=True)["input_ids"][0] == 1


@pytest.mark.parametrize("name", ["characters", "words"])
def test_a_target_ends(trained, name):
    tokenizer = trained[name]
    ids = tokenizer("the class")["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    assert ids[:-1] == tokenizer("the class", add_special_tokens=False)["input_ids"]
    assert not set(ids[:-1]) & {0, 1, 2}
    assert tokenizer("")["input_ids"] == [2]
    cut = tokenizer("the " * 99, truncation=True)["input_ids"]
    assert (len(cut), cut[-1]) == (77, 2)


@pytest.mark.parametrize("name", NAMES)
def test_two_texts_are_two_sequences(trained, name):
    tokenizer = trained[name]
    pair = tokenizer("the", "class")
    assert pair["input_ids"] == tokenizer("the")["input_ids"] + tokenizer("class")["input_ids"]
    assert list(pair) == ["input_ids", "attention_mask"]


@pytest.mark.parametrize("name", NAMES)
def test_padding_stands_on_the_right(trained, name):
    batch = trained[name](["the", "the class of words"], padding=True)
    assert batch["input_ids"][0][-1] == 0
    assert batch["attention_mask"][0][0] == 1
    assert batch["attention_mask"][0][-1] == 0


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_written_in_a_text_can_be_plain_text(trained, name):
    tokenizer = trained[name]
    assert tokenizer(SPECIAL_TEXT, add_special_tokens=False)["input_ids"].count(1) == 1
    plain = tokenizer(SPECIAL_TEXT, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    assert backend.encode(SPECIAL_TEXT, add_special_tokens=False).ids == plain
    assert not set(plain) & {0, 1, 2, 3}
    text = tokenizer.decode(plain, skip_special_tokens=True)
    assert text.replace(" ", "") == SPECIAL_TEXT.replace(" ", "")


def test_no_text_teaches_the_name_of_a_special_token():
    # Markup is full of `<s>`, which must not be learned as a token: it would get the id of the special one.
    texts = ["<s>x</s><pad><unk>"] * 99
    tokenizer = train_byte_level(texts, vocab_size=999)
    ids = tokenizer(texts[0], split_special_tokens=True, add_special_tokens=False)["input_ids"]
    assert not set(ids) & {0, 1, 2, 3}
    assert tokenizer.decode(ids, skip_special_tokens=True) == texts[0]


def test_bytes_restore_every_text(trained):
    tokenizer = trained["byte_level"]
    texts = [
        *mixed_strings(1000, seed=4),
        "a , b . c 's n't !",
        " leading",
        "trailing \n",
        "ሀ𒀀",
        "".join(map(chr, range(256))),
    ]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_every_byte_is_in_the_smallest_vocabulary():
    tokenizer = train_byte_level(["the class"], vocab_size=260)
    assert len(vocabulary(tokenizer)) == 260
    assert len(tokenizer("ሀé", add_special_tokens=False)["input_ids"]) == len("ሀé".encode())
    for vocab_size in (-1, 0, 259):
        with pytest.raises(ValueError, match=rf"`vocab_size` \({vocab_size}\) must be at least 260:"):
            train_byte_level(["the class"], vocab_size=vocab_size)


def test_frequent_words_become_tokens_of_bytes():
    texts = ["often often often seldom seldom"]
    found = {n: train_byte_level(texts, vocab_size=299, min_frequency=n).tokenize(" often seldom") for n in (1, 2, 3)}
    assert found[1] == ["Ġoften", "Ġseldom"]
    # " often" occurs twice, as the first one has no space before it, and " seldom" twice.
    assert found[2] == ["Ġoften", "Ġseldom"]
    assert found[3] == [*"Ġ", "often", *"Ġseldom"]


def test_a_small_corpus_gives_a_smaller_vocabulary_and_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        tokenizer = train_byte_level(iter(["the class the class"]), vocab_size=999)
    assert f"{len(tokenizer)} tokens instead of 999" in caplog.text
    caplog.clear()
    assert len(train_byte_level(["the class the class"], vocab_size=len(tokenizer))) == len(tokenizer)
    assert caplog.text == ""


def test_characters_stand_by_frequency_then_code_point():
    tokenizer = train_characters(["bab\n", "b a", "éא\U0001f600"])
    # b three times, a twice, the others once.
    assert vocabulary(tokenizer)[4:] == ["b", "a", "\n", " ", "é", "א", "\U0001f600"]
    assert tokenizer("ab\n")["input_ids"] == [5, 4, 6, 2]


def test_unseen_and_rare_characters_are_unknown():
    tokenizer = train_characters(["aab"], min_frequency=2)
    assert tokenizer("abaxx")["input_ids"] == [4, 3, 4, 3, 3, 2]


def test_characters_restore_every_text_of_known_ones():
    texts = mixed_strings(1000, seed=5)
    tokenizer = train_characters(texts)
    for text in [*texts, "  a  , d .\n\n c \t"]:
        assert decode(tokenizer, text) == text
        assert len(tokenizer(text)["input_ids"]) == len(text) + 1


def test_more_characters_than_a_trainer_takes_by_default():
    characters = [chr(code) for code in range(0x3400, 0x3400 + 31_000)]
    assert len(train_characters(["".join(characters)])) == 31_004


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A dog, running.", ["a", "dog", ",", "running", "."]),
        ("DE WITH LONG-LEGGED", ["de", "with", "long-legged"]),
        ("well-known-to-all ex- -post a--b", ["well-known-to-all", "ex", "-", "-", "post", "a", "-", "-", "b"]),
        ("don't 'quote' it’s", ["don't", "'", "quote", "'", "it’s"]),
        ("wait...  what\t?!\n", ["wait", ".", ".", ".", "what", "?", "!"]),
        ("U+1C81 3 x_y", ["u", "+", "1c81", "3", "x_y"]),
        ("中文 שלום 😀", ["中文", "שלום", "😀"]),
    ],
)
def test_words(text, words):
    tokenizer = train_words([text])
    assert tokenizer.tokenize(text) == words
    assert decode(tokenizer, text) == " ".join(words)
    assert set(vocabulary(tokenizer)[4:]) == set(words)


def test_lower_casing_is_an_option():
    assert train_words(["Hacía MÖCHTE"], lowercase=True).tokenize("Hacía MÖCHTE") == ["hacía", "möchte"]
    assert train_words(["Hacía MÖCHTE"], lowercase=False).tokenize("Hacía MÖCHTE hacía") == [
        "Hacía",
        "MÖCHTE",
        "<unk>",
    ]


@pytest.mark.parametrize("lowercase", [True, False])
def test_accents_typed_either_way_are_one_word(lowercase):
    composed = "café Ệ İ"
    decomposed = unicodedata.normalize("NFD", composed)
    tokenizer = train_words([decomposed], lowercase=lowercase)
    words = vocabulary(tokenizer)[4:]
    assert tokenizer(composed)["input_ids"] == tokenizer(decomposed)["input_ids"]
    assert len(words) == 3
    assert all(unicodedata.is_normalized("NFC", word) for word in words)


def test_a_small_letter_composes_where_its_capital_does_not():
    assert train_words(["J\u030c"]).tokenize("\u01f0 j\u030c J\u030c") == ["\u01f0"] * 3


@pytest.mark.parametrize("lowercase", [True, False])
def test_letters_that_only_look_alike_stay_what_they_are(lowercase):
    assert vocabulary(train_words(["ﬁ Å"], lowercase=lowercase))[4:] == ["å" if lowercase else "Å", "ﬁ"]


def test_words_stand_by_frequency_then_code_point_and_rare_ones_are_unknown():
    texts = ["a dog and a cat", "a cat and éa zebra"]
    assert vocabulary(train_words(texts))[4:] == ["a", "and", "cat", "dog", "zebra", "éa"]
    tokenizer = train_words(texts, min_frequency=2)
    assert vocabulary(tokenizer)[4:] == ["a", "and", "cat"]
    assert tokenizer("a dog, cat")["input_ids"] == [4, 3, 3, 6, 2]


@pytest.mark.parametrize("train", TRAINERS.values(), ids=NAMES)
def test_bad_input_is_refused(train):
    with pytest.raises(TypeError, match=r"`texts` must be .* not one string"):
        train("the class")
    for texts in ([], [""], iter(["", ""])):
        with pytest.raises(ValueError, match="`texts` holds no text"):
            train(texts)
    with pytest.raises(ValueError, match=r"`min_frequency` \(0\) must be"):
        train(["the class"], min_frequency=0)
    for length in (0, 1):
        with pytest.raises(ValueError, match=rf"`model_max_length` \({length}\) must be"):
            train(["the class"], model_max_length=length)


def test_a_vocabulary_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"no characters .* `min_frequency` \(3\) times"):
        train_characters(["aabb"], min_frequency=3)
    with pytest.raises(ValueError, match=r"no words .* `min_frequency` \(1\) times"):
        train_words([" \n"])
