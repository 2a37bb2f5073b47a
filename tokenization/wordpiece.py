"""WordPiece tokenizers: transformers' own `BertTokenizer` with a vocabulary trained on a corpus."""

from __future__ import annotations

import logging
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import WordPieceTrainer
from transformers import BertTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

# The share of a text's characters that a vocabulary must be able to spell, before all other aims.
_LEAST_COVERAGE = 0.99


def train_wordpiece(
    texts: Iterable[str],
    *,
    vocab_size: int = 8192,
    lowercase: bool = True,
    strip_accents: bool = False,
    min_frequency: int = 2,
    character_coverage: float = 0.99999,
    model_max_length: int = 512,
) -> BertTokenizer:
    """Trains a WordPiece vocabulary and returns a stock `BertTokenizer` with it.

    `AutoTokenizer` loads the saved tokenizer without this package. The ids are `[PAD]` 0,
    `[UNK]` 1, `[CLS]` 2, `[SEP]` 3, `[MASK]` 4, then the characters, the most frequent first, then longer
    pieces in the order learned. The same texts give the same vocabulary in every process.

    Characters are kept, the most frequent first, until they cover `character_coverage` of the text. Once 99%
    is covered they may take no more than half of the vocabulary, so that rare ones do not crowd out the
    words; places that longer pieces leave free go to the next characters. A kept character can both
    start and continue a word, so a word is unknown only if it contains a character that was not kept, or is
    longer than 100 characters.

    The WordPiece model: Schuster and Nakajima (2012), "Japanese and Korean voice search". Its use in BERT:
    Devlin et al. (2019), https://arxiv.org/abs/1810.04805. As always in the `tokenizers` library, the pair of
    pieces merged next is the most frequent one, not the one that raises the likelihood most.

    Args:
        texts: the corpus; read once, in batches.
        vocab_size: the largest number of pieces, special tokens included; if a corpus yields fewer, that is logged.
        lowercase: whether texts are lower-cased.
        strip_accents: whether accents are removed; stock BERT does so if it lower-cases.
        min_frequency: how often two pieces must be neighbors to be merged into one.
        character_coverage: the share of the text's characters to keep, above 0 and at most 1.
        model_max_length: the model's longest sequence, in tokens; saved with the tokenizer.

    Raises:
        TypeError: if `texts` is one string.
        ValueError: if `texts` contains no words, if `vocab_size` is too small for its characters, or if a
            setting is out of range.
    """
    if not 0 < character_coverage <= 1:
        raise ValueError(f"`character_coverage` ({character_coverage}) must be above 0 and at most 1")
    if min_frequency < 1:
        raise ValueError(f"`min_frequency` ({min_frequency}) must be at least 1")

    # An untrained tokenizer of the returned class, so that training splits text as the trained one does.
    backend = BertTokenizer(do_lower_case=lowercase, strip_accents=strip_accents).backend_tokenizer
    words = _count_words(backend, texts)
    if not words:
        raise ValueError("`texts` holds no words to train a tokenizer on")
    alphabet, left_out = _choose_alphabet(backend, words, vocab_size, character_coverage)
    vocabulary = dict.fromkeys(_learn_pieces(words, alphabet, vocab_size, min_frequency))
    for pieces in left_out:
        missing = [piece for piece in pieces if piece not in vocabulary]
        if len(vocabulary) + len(missing) > vocab_size:
            break
        vocabulary.update(dict.fromkeys(missing))
    else:
        if len(vocabulary) < vocab_size:
            logger.warning(
                "The texts yield %d word pieces instead of %d (`min_frequency` %d).",
                len(vocabulary),
                vocab_size,
                min_frequency,
            )
    return BertTokenizer(
        vocab={piece: index for index, piece in enumerate(vocabulary)},
        do_lower_case=lowercase,
        strip_accents=strip_accents,
        model_max_length=model_max_length,
    )


def _batches(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Groups texts into lists of about `characters` characters each."""
    if isinstance(texts, str):
        raise TypeError("`texts` must be an iterable of strings, not one string")
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _count_words(backend: Tokenizer, texts: Iterable[str]) -> Counter[str]:
    """Counts the words of the texts as `backend` splits them, leaving out those too long for its model.

    Such words become `[UNK]` with any vocabulary, and the trainer's time is quadratic in a word's length.
    """
    words: Counter[str] = Counter()
    for batch in _batches(texts, 10_000_000):
        # Splitting is slow, and runs of text between spaces repeat, so each is split once.
        runs: Counter[str] = Counter()
        for text in batch:
            runs.update(backend.normalizer.normalize_str(text).split())
        for run, count in runs.items():
            for word, _ in backend.pre_tokenizer.pre_tokenize_str(run):
                if len(word) <= backend.model.max_input_chars_per_word:
                    words[word] += count
    return words


def _choose_alphabet(
    backend: Tokenizer, words: Counter[str], vocab_size: int, coverage: float
) -> tuple[list[str], list[list[str]]]:
    """The pieces of the characters that `train_wordpiece` keeps, and those of each character that it leaves out."""
    characters: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            characters[character] += count
    ranked = sorted(characters, key=lambda character: (-characters[character], character))
    spelled = [_character_pieces(backend, character) for character in ranked]

    room = vocab_size - len(SPECIAL_TOKENS)
    total = characters.total()
    least_coverage = min(_LEAST_COVERAGE, coverage)
    alphabet: dict[str, None] = {}
    covered = kept = 0
    for character, pieces in zip(ranked, spelled, strict=True):
        fits = len(alphabet) + len(pieces) <= room // 2
        if covered >= coverage * total or (covered >= least_coverage * total and not fits):
            break
        alphabet.update(dict.fromkeys(pieces))
        covered += characters[character]
        kept += 1
    if len(alphabet) > room:
        raise ValueError(
            f"`vocab_size` ({vocab_size}) must be at least {len(SPECIAL_TOKENS) + len(alphabet)}: "
            f"it takes so many pieces to spell {least_coverage:.0%} of the characters of `texts`"
        )
    return list(alphabet), spelled[kept:]


def _character_pieces(backend: Tokenizer, character: str) -> list[str]:
    """The pieces that spell a character at any place in a word, as one code point or decomposed (NFD)."""
    pieces = []
    for point in dict.fromkeys(character + unicodedata.normalize("NFD", character)):
        pieces.append(point)
        # Punctuation and Chinese characters are words of their own and never continue one.
        if len(backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str("a" + point))) == 1:
            pieces.append("##" + point)
    return pieces


def _learn_pieces(words: Counter[str], alphabet: list[str], vocab_size: int, min_frequency: int) -> list[str]:
    """The special tokens, the alphabet, and the pieces merged from it, in the order of their ids.

    The trainer breaks ties between equally frequent pairs by the ids of their pieces, but assigns the ids of
    continuing characters in the order of a hash table with a new seed each time. Special tokens get their ids
    in the given order, so the whole alphabet is passed among them.
    """
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[*SPECIAL_TOKENS, *alphabet],
        show_progress=False,
    )
    tokenizer = Tokenizer(WordPiece())
    tokenizer.pre_tokenizer = WhitespaceSplit()
    # The trainer would close the gap that an unknown character leaves, and learn a piece that does not occur.
    known = set(alphabet)
    spellable = {word: count for word, count in words.items() if known.issuperset(word)}
    tokenizer.train_from_iterator(_repeat(spellable), trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def _repeat(words: dict[str, int]) -> Iterator[str]:
    """Yields each word as often as it was counted, since the trainer counts the words of a text itself."""
    for word, count in words.items():
        for start in range(0, count, 1000):  # in short lines, to save memory
            yield f"{word} " * min(1000, count - start)


@dataclass(frozen=True)
class UnknownReport:
    """The share of a corpus that a tokenizer does not know.

    Args:
        tokens: number of tokens, without those that a tokenizer adds around a text.
        unknown: number of unknown tokens among them.
        examples: the most frequent words that became unknown, as written in the text, with their counts.
    """

    tokens: int
    unknown: int
    examples: tuple[tuple[str, int], ...]

    @property
    def share(self) -> float:
        """The share of tokens that are unknown; 0 for a corpus without tokens."""
        return self.unknown / max(self.tokens, 1)


def unknown_report(
    tokenizer: PreTrainedTokenizerFast, texts: Iterable[str], *, max_examples: int = 20
) -> UnknownReport:
    """Counts the tokens of a corpus, and the unknown ones among them.

    Args:
        tokenizer: any tokenizer with a `tokenizers` backend; it is not changed.
        texts: the corpus; read once, a batch at a time.
        max_examples: the largest number of examples; long words are cut to 100 characters.

    Raises:
        TypeError: if `texts` is one string.
    """
    # A copy, since the tokenizer keeps the truncation and padding of its last call.
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    unk = tokenizer.unk_token_id
    tokens = 0
    unknown: Counter[str] = Counter()
    for batch in _batches(texts, 1_000_000):
        for text, encoding in zip(batch, backend.encode_batch(batch, add_special_tokens=False), strict=True):
            ids = encoding.ids
            tokens += len(ids)
            if unk in ids:
                spans = (span for id_, span in zip(ids, encoding.offsets, strict=True) if id_ == unk)
                unknown.update(text[start:end][:100] for start, end in spans)
    examples = sorted(unknown.items(), key=lambda item: (-item[1], item[0]))[:max_examples]
    return UnknownReport(tokens=tokens, unknown=unknown.total(), examples=tuple(examples))


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Checks that a model has an embedding for every id of a tokenizer; it may have more.

    Args:
        tokenizer: the tokenizer, with any tokens added to it.
        vocab_size: number of the model's embeddings.

    Raises:
        ValueError: if the tokenizer's largest id is `vocab_size` or more.
    """
    # Not `len(tokenizer)`: added tokens may leave gaps between the ids.
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > vocab_size:
        raise ValueError(
            f"The tokenizer needs a `vocab_size` of at least {needed}, but the model has {vocab_size}: "
            f"call `model.resize_token_embeddings({needed})`, or set that `vocab_size` in its configuration"
        )
