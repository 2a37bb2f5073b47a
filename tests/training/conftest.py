"""A corpus that is quick to learn, tokenizers for it, and tiny runs on it."""

import json
import random
from pathlib import Path

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TOPICS = ["river stone water fish bank", "house door garden wall roof", "piano violin concert string tune"]
FILLERS = "the a of under near beside quickly slowly unbelievable yesterday".split()


def make_texts(number: int, sentences: int, seed: int = 0) -> list[str]:
    """Documents that each keep to one topic, so that next sentences can be told from random ones."""
    rng = random.Random(seed)
    texts = []
    for document in range(number):
        words = [*TOPICS[document % len(TOPICS)].split() * 2, *FILLERS]
        made = [" ".join(rng.choices(words, k=rng.randint(4, 12))).capitalize() + "." for _ in range(sentences)]
        texts.append(" ".join(made))
    return texts


def write_texts(folder: Path, texts: list[str]) -> str:
    folder.mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory) -> str:
    """Twelve documents of about 80 tokens, as text files."""
    return write_texts(tmp_path_factory.mktemp("texts") / "corpus", make_texts(12, 8))


@pytest.fixture(scope="session")
def tokenizer():
    """A vocabulary that splits most words into several pieces."""
    from regard.tokenization.wordpiece import train_wordpiece

    return train_wordpiece(make_texts(12, 8), vocab_size=90, model_max_length=64)


@pytest.fixture(scope="session")
def byte_tokenizer():
    """A byte-level tokenizer with BERT's special tokens; a piece that starts a word starts with a space."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(names.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(make_texts(12, 8), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@pytest.fixture
def corpus_of(tokenizer):
    """Makes a tokenised corpus of texts."""
    from regard.training.examples.tokenized import tokenize_documents

    def make(texts: list[str], by=tokenizer):
        return tokenize_documents(datasets.Dataset.from_dict({"text": texts}), by, word_starts=True)

    return make


@pytest.fixture
def examples_of(corpus_of, tokenizer):
    """Makes `BertExamples` of texts; `masked` holds the settings of the masking."""
    from regard.training.examples.bert import BertExamples
    from regard.training.examples.masking import Masking

    def make(texts: list[str], by=tokenizer, masked: dict | None = None, **settings) -> BertExamples:
        masking = Masking.from_tokenizer(by, **(masked or {}))
        return BertExamples(corpus_of(texts, by), by, masking, **{"max_length": 32, **settings})

    return make


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return make_texts(12, 8)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in, with a cache of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    return tmp_path / "data"


# Runs

TINY = {
    "vocab_size": 120,
    "config": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
    },
    "max_length": 32,
    "batch_size": 12,
    "validation": "0.25",
    "log_with": ["none"],
}


@pytest.fixture(scope="session")
def pretrain(corpus_folder):
    """Runs a tiny pretraining in a folder; what is given goes before the tiny settings."""
    from regard.training.families.bert import BERT
    from regard.training.families.train import train

    def run(folder: Path, resume: bool = False, accept_changes: bool = False, **given) -> dict:
        settings = {**TINY, "data": [corpus_folder], **given}
        return train(BERT, folder, settings, resume=resume, accept_changes=accept_changes)

    return run


@pytest.fixture(scope="session")
def weights_of():
    """Reads the weights of a run's model."""

    def read(folder: Path) -> dict:
        return load_file(folder / "model" / "model.safetensors")

    return read


@pytest.fixture(scope="session")
def history_of():
    """Reads what a run recorded, without what depends on the clock: (step, kind, figures)."""

    def read(folder: Path) -> list[tuple[int, str, dict]]:
        records = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        for record in records:
            record.pop("tokens_per_second", None)
        return [(record.pop("step"), record.pop("kind"), record) for record in records]

    return read


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    # A model this small is slower with more, and many times slower where other work waits for the cores.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _fresh_accelerator():
    # Accelerate keeps the precision of a process's first run, and refuses another.
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


# Runs on pairs

TINY_PAIRS = {
    "data": ["dates:en_US,de"],
    "max_pairs": 60,
    "max_dates": 2,
    "max_length": 90,
    "steps": 3,
    "batch_size": 8,
    "evaluation_batches": 1,
    "log_with": ["none"],
}
TINY_MODELS = {
    "transformer": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48},
    "recurrent": {"hidden_size": 32},
}


@pytest.fixture(scope="session")
def train_pairs():
    """Runs a tiny training on pairs in a folder; what is given goes before the tiny settings."""
    from regard.training.families.recipes import TRAINABLE
    from regard.training.families.train import train

    def run(family: str, folder: Path, resume: bool = False, **given) -> dict:
        settings = {**TINY_PAIRS, **given, "config": {**TINY_MODELS[family], **given.get("config", {})}}
        return train(TRAINABLE[family], folder, settings, resume=resume)

    return run


@pytest.fixture
def write_pairs(tmp_path):
    """Writes pairs into a file with the columns `source` and `target`, or others, and names it."""

    def write(name: str, pairs: list[tuple[str, str]], columns: tuple[str, str] = ("source", "target")) -> str:
        lines = [json.dumps(dict(zip(columns, pair, strict=True)), ensure_ascii=False) for pair in pairs]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        return str(tmp_path / f"{name}.jsonl")

    return write


# Runs of the decoder


@pytest.fixture(scope="module")
def train_decoder(corpus_folder):
    """Runs a tiny training in a folder; what is given goes before the tiny settings."""
    from regard.training.families.decoder import DECODER
    from regard.training.families.train import train
    from tests.support.decoding import TINY

    def run(folder, resume: bool = False, **given) -> dict:
        AcceleratorState._reset_state(reset_partial_state=True)
        return train(DECODER, folder, {**TINY, "data": [corpus_folder], **given}, resume=resume)

    return run


# Runs on images


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> str:
    """A folder of twenty images of all kinds."""
    from tests.support.captions import CAPTIONS, write_images

    return write_images(tmp_path_factory.mktemp("images") / "images", CAPTIONS)


@pytest.fixture(scope="session")
def caption(images):
    """Runs a tiny training in a folder; what is given goes before the tiny settings."""
    from regard.training.families.captioner import CAPTIONER
    from regard.training.families.train import train
    from tests.support.captions import TINY

    def run(folder, resume: bool = False, **given) -> dict:
        return train(CAPTIONER, folder, {**TINY, "data": [images], **given}, resume=resume)

    return run
