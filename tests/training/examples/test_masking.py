import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BertTokenizer, PreTrainedTokenizerFast

from regard.tokenization.wordpiece import train_wordpiece
from regard.training.examples.masking import IGNORED, Masking

SPECIALS = 5
PAD, UNK, CLS, SEP, MASK = range(SPECIALS)


def masking_of(vocab_size: int, **settings) -> Masking:
    """A masking whose special ids are the first five."""
    return Masking(MASK, np.arange(vocab_size) < SPECIALS, **settings)


def draw(masking: Masking, ids, rng=None, starts_word=None) -> tuple[np.ndarray, np.ndarray]:
    """Masks a sequence, and checks what must hold whatever is drawn."""
    ids = np.asarray(ids, dtype=np.int32)
    before = ids.copy()
    starts_word = np.ones(len(ids), dtype=bool) if starts_word is None else np.asarray(starts_word)
    shown, labels = masking(ids, starts_word, rng or np.random.default_rng(0))
    chosen = labels != IGNORED
    assert (ids == before).all()
    assert (labels[chosen] == ids[chosen]).all()
    assert (shown[~chosen] == ids[~chosen]).all()
    assert not masking.special[ids[chosen]].any()
    return shown, labels


def test_rate_and_fates():
    masking = masking_of(30_000)
    rng = np.random.default_rng(0)
    ids = rng.integers(SPECIALS, 30_000, (2_000, 100))
    drawn = [draw(masking, row, rng) for row in ids]
    shown, labels = (np.stack(part) for part in zip(*drawn, strict=True))
    chosen = labels != IGNORED
    assert chosen.mean() == pytest.approx(0.15, abs=0.003)
    assert (shown == MASK)[chosen].mean() == pytest.approx(0.8, abs=0.01)
    assert (shown == ids)[chosen].mean() == pytest.approx(0.1, abs=0.01)
    assert ((shown != MASK) & (shown != ids))[chosen].mean() == pytest.approx(0.1, abs=0.01)
    # Every place is as likely as another, and so is every ordinary id.
    assert chosen.mean(0).min() > 0.12
    assert chosen.mean(0).max() < 0.18
    randoms = shown[chosen & (shown != MASK) & (shown != ids)]
    assert randoms.mean() == pytest.approx(15_000, rel=0.05)


@pytest.mark.parametrize(("length", "rate"), [(7, 0.3), (13, 0.15), (3, 0.5)])
def test_the_rate_holds_for_short_sequences_too(length, rate):
    masking, rng = masking_of(20, rate=rate), np.random.default_rng(0)
    numbers = [(draw(masking, [6] * length, rng)[1] != IGNORED).sum() for _ in range(4_000)]
    assert np.mean(numbers) == pytest.approx(rate * length, rel=0.05)
    assert set(numbers) <= {int(rate * length), int(rate * length) + 1}


@pytest.mark.parametrize("whole_words", [False, True])
def test_at_least_one_is_chosen(whole_words):
    masking, rng = masking_of(20, rate=0.01, whole_words=whole_words), np.random.default_rng(0)
    for length in (1, 2, 5):
        for starts_word in (True, False):
            starts = [True, *[starts_word] * length, True]
            labels = draw(masking, [CLS, *[6] * length, SEP], rng, starts)[1]
            assert (labels != IGNORED).any()


@pytest.mark.parametrize("whole_words", [False, True])
def test_special_tokens_are_never_chosen(whole_words):
    ids = [CLS, 7, UNK, 8, 9, SEP, 10, MASK, 11, SEP, PAD, PAD]
    shown, labels = draw(masking_of(20, rate=1.0, mask_share=1.0, random_share=0.0, whole_words=whole_words), ids)
    assert labels.tolist() == [id_ if id_ >= SPECIALS else IGNORED for id_ in ids]
    assert shown.tolist() == [MASK if id_ >= SPECIALS else id_ for id_ in ids]


@pytest.mark.parametrize("whole_words", [False, True])
def test_nothing_but_special_tokens(whole_words):
    _, labels = draw(masking_of(20, rate=1.0, whole_words=whole_words), [CLS, UNK, SEP, PAD])
    assert (labels == IGNORED).all()


def test_random_tokens_are_never_special():
    masking = masking_of(16, rate=1.0, mask_share=0.0, random_share=1.0)
    shown, labels = draw(masking, np.full(400, 9))
    assert (labels == 9).all()
    assert set(shown.tolist()) == set(range(SPECIALS, 16))


@pytest.mark.parametrize(
    ("shares", "expected"), [((1.0, 0.0), {MASK}), ((0.0, 0.0), {9}), ((0.0, 1.0), set(range(5, 16)))]
)
def test_shares_of_the_fates(shares, expected):
    masking = masking_of(16, rate=0.5, mask_share=shares[0], random_share=shares[1])
    shown, labels = draw(masking, np.full(400, 9))
    assert (labels != IGNORED).sum() == 200
    assert set(shown[labels != IGNORED].tolist()) == expected


def test_masks_come_from_the_generator_alone():
    masking, ids = masking_of(50), np.arange(5, 45)
    first, again, other = (draw(masking, ids, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


# Whole words


def test_words_are_chosen_whole_and_the_rate_is_kept():
    rng = np.random.default_rng(0)
    masking = masking_of(50, rate=0.3, whole_words=True)
    numbers = []
    for _ in range(500):
        starts = rng.random(40) < 0.6
        ids = rng.integers(SPECIALS, 50, 40)
        ids[[0, 20, 39]] = CLS, SEP, SEP
        chosen = draw(masking, ids, rng, starts)[1] != IGNORED
        begins = starts | (np.arange(40) % 20 <= 1)  # what follows a special token begins a word too
        for word in np.split(np.arange(40), np.flatnonzero(begins)):
            ordinary = [place for place in word if place not in (0, 20, 39)]
            assert len({chosen[place] for place in ordinary}) <= 1
        numbers.append(chosen.sum())
    assert np.mean(numbers) / 37 == pytest.approx(0.3, abs=0.01)
    assert max(numbers) <= 12  # of 37, rounded up


def test_words_are_not_joined_across_a_separator():
    # Neither the piece before the separator nor the one after it begins a word.
    ids, starts = [CLS, 7, 8, SEP, 9, SEP], [True, True, False, True, False, True]
    masking, rng = masking_of(20, rate=0.3, whole_words=True), np.random.default_rng(0)
    chosen = {tuple(np.flatnonzero(draw(masking, ids, rng, starts)[1] != IGNORED)) for _ in range(50)}
    assert chosen == {(4,)}  # the only word with no more than one piece
    masking = masking_of(20, rate=0.6, whole_words=True)
    chosen = {tuple(np.flatnonzero(draw(masking, ids, rng, starts)[1] != IGNORED)) for _ in range(50)}
    assert chosen == {(1, 2), (4,)}


def test_single_pieces_are_chosen_without_whole_words():
    ids, starts = [CLS, 7, 8, SEP], [True, True, False, True]
    rng = np.random.default_rng(0)
    chosen = {tuple(np.flatnonzero(draw(masking_of(20, rate=0.5), ids, rng, starts)[1] != IGNORED)) for _ in range(50)}
    assert chosen == {(1,), (2,)}


# Settings


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"mask_share": 0.95}, r"`mask_share` \(0.95\) and `random_share` \(0.1\)"),
        ({"mask_share": -0.1}, r"`mask_share` \(-0.1\)"),
        ({"random_share": -0.1}, r"`random_share` \(-0.1\)"),
    ],
)
def test_shares_out_of_range(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        masking_of(20, **settings)


def test_a_vocabulary_of_special_tokens():
    with pytest.raises(ValueError, match="only special tokens"):
        masking_of(SPECIALS)


def word_pieces() -> BertTokenizer:
    return train_wordpiece(["unbelievable tokens are believable, and unbelieved"] * 3, vocab_size=60)


def byte_pieces() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=275,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(["unbelievable tokens are believable"], trainer)
    names = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@pytest.mark.parametrize("tokenizer", [word_pieces(), byte_pieces()], ids=["word pieces", "bytes"])
def test_special_tokens_of_a_tokenizer(tokenizer):
    masking = Masking.from_tokenizer(tokenizer, rate=0.4, whole_words=True)
    assert masking.mask_id == tokenizer.mask_token_id
    assert (masking.rate, masking.whole_words) == (0.4, True)
    assert np.flatnonzero(masking.special).tolist() == sorted(tokenizer.all_special_ids)
    assert len(masking.special) == len(tokenizer)


def test_ids_without_a_token_are_never_drawn():
    # Added tokens may leave gaps between the ids.
    vocabulary = {**{f"[{name}]": id_ for id_, name in enumerate("PAD UNK CLS SEP MASK".split())}, "a": 5, "b": 9}
    masking = Masking.from_tokenizer(BertTokenizer(vocab=vocabulary), rate=1.0, mask_share=0.0, random_share=1.0)
    shown, _ = draw(masking, np.full(200, 9))
    assert set(shown.tolist()) == {5, 9}


def test_a_tokenizer_without_a_mask():
    tokenizer = byte_pieces()
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match=r"no mask token: set `tokenizer\.mask_token`"):
        Masking.from_tokenizer(tokenizer)
