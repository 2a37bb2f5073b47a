"""Vectors of sentences from a BERT: `regard.encode_texts`, stock transformers, and ONNX Runtime.

The sentences are those of Python's own documentation in a random order, so that a batch of 32 has the mix of lengths
that text has. From text to vector, tokenising included: the mean over a sentence's tokens. All have the same weights.
Stock BERT and ONNX Runtime get batches padded to their longest sentence, with a mask; stock BERT attends with "sdpa",
in inference mode; ONNX Runtime has what `torch.onnx.export` makes of it, and all of its own optimisations, the model's
and the session's. In the cases where all sentences are there at once, ours gets them in one call, and the others take
them from the shortest to the longest, 32 at a time.

Operations are those of matrix products, a multiplication and an addition counted as two: with width E and feed-forward
width F, in a layer 8 E² + 4 E F for each token, and 4 E for each token that it attends to; padding counts as tokens on
the sides that compute it.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .compare import Case
from .pretraining import BASE, MINI, TINY
from .sides import Side, Work

TITLE = "Sentence encoding with BERT"

FIGURES = {"stock": {"speed": 2.0}, "onnxruntime": {"speed": 1.0}}
SIZE = 32
# Texts are taken anew in each turn until there are no more; a turn has so many batches of them.
TEXTS = {"texts": 2048, "batches": 8, "together": False}
QUICK = TINY | {"texts": 2 * SIZE, "batches": 1, "documents": 40}
NAMES = ("input_ids", "attention_mask", "token_type_ids")

CASES = {
    "mini": Case("BERT-mini, 32 sentences a call", MINI | TEXTS, quick=QUICK, units="sentences", figures=FIGURES),
    "mini-together": Case(
        "BERT-mini, 256 sentences at once",
        MINI | TEXTS | {"together": True},
        quick=QUICK | {"batches": 2},
        units="sentences",
        figures=FIGURES,
    ),
    "base": Case("BERT-base, 32 sentences a call", BASE | TEXTS | {"batches": 2}, units="sentences", figures=FIGURES),
    "base-together": Case(
        "BERT-base, 256 sentences at once",
        BASE | TEXTS | {"together": True},
        units="sentences",
        warm_up=1,
        repetitions=3,
        figures=FIGURES,
    ),
}


class MeanPooled(nn.Module):
    """A stock encoder and the mean over each row's tokens: what stock BERT runs, and what is exported of it."""

    def __init__(self, folder: Path) -> None:
        from transformers import BertModel

        super().__init__()
        self.encoder = BertModel.from_pretrained(folder, add_pooling_layer=False, attn_implementation="sdpa").eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """A padded batch (B, L) gives its vectors (B, E)."""
        hidden_states = self.encoder(input_ids, attention_mask, token_type_ids).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden_states.dtype)
        return (hidden_states * mask).sum(1) / mask.sum(1)


def write_inputs(parameters: dict[str, Any], folder: Path) -> None:
    """Writes the sentences, the tokenizer, a stock checkpoint and, where it can be made, its export."""
    from transformers import BertConfig, BertModel

    from regard.training.examples.sentences import split_sentences
    from regard.training.families.bert import BERT, BertSettings
    from regard.training.families.text_corpus import load_document_split

    settings = BertSettings(vocab_size=parameters["vocab_size"], max_documents=parameters.get("documents"))
    documents, _ = load_document_split(settings)
    BERT.make_processor(settings, documents).save_pretrained(folder / "tokenizer")
    sentences = [sentence for text in documents["text"] for sentence in split_sentences(text)]
    order = np.random.default_rng(0).permutation(len(sentences))[: parameters["texts"]]
    (folder / "texts.json").write_text(json.dumps([sentences[place] for place in order]), encoding="utf-8")

    torch.manual_seed(0)
    model = BertModel(BertConfig(**{name: parameters[name] for name in MINI}), add_pooling_layer=False)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases of 0 and norms of 1 would hide that a side leaves them out.
            parameter.add_(torch.randn_like(parameter), alpha=model.config.initializer_range)
    model.save_pretrained(folder / "model")
    if not ONNXRuntimeEncoding.missing():
        _export(folder)


def _export(folder: Path) -> None:
    dynamic = {name: dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC) for name in NAMES}
    batch = tuple(torch.ones(3, 7, dtype=torch.long) for _ in NAMES)
    with torch.inference_mode():
        torch.onnx.export(
            MeanPooled(folder / "model"),
            batch,
            folder / "model.onnx",
            input_names=NAMES,
            output_names=["vectors"],
            dynamic_shapes=dynamic,
            dynamo=True,
            verbose=False,
        )


class EncodingSide(Side):
    """Encodes batches of texts; what differs is how."""

    padded: bool

    def __init__(self, parameters: dict[str, Any], folder: Path) -> None:
        from transformers import AutoTokenizer

        super().__init__(parameters, folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self.texts = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
        self.lengths = dict(zip(self.texts, map(len, self.tokenizer(self.texts)["input_ids"]), strict=True))

    def encode(self, texts: list[str]) -> Tensor | np.ndarray:
        """Vectors of texts that are encoded together, (texts, E)."""
        raise NotImplementedError

    def batches(self, texts: list[str]) -> Iterator[list[str]]:
        """The texts that are encoded together."""
        if self.parameters["together"]:
            texts = sorted(texts, key=len)
        return (texts[start : start + SIZE] for start in range(0, len(texts), SIZE))

    def check(self) -> dict[str, Any]:
        """Some coordinates of the vectors of the first texts; all would make the results' files large."""
        return {"vectors": self.encode(self.texts[:SIZE])[:, ::64].tolist()}

    def run(self, turn: int) -> Work:
        """Encodes the turn's texts."""
        number = SIZE * self.parameters["batches"]
        start = turn * number % len(self.texts)
        texts = self.texts[start : start + number]
        began = time.perf_counter()
        for batch in self.batches(texts):
            self.encode(batch)
        seconds = time.perf_counter() - began
        return Work(seconds, len(texts), sum(map(self.operations, self.batches(texts))))

    def operations(self, texts: list[str]) -> float:
        """See the module."""
        lengths = np.array([self.lengths[text] for text in texts])
        if self.padded:
            lengths[:] = lengths.max()
        names = ("hidden_size", "intermediate_size", "num_hidden_layers")
        width, inner, layers = (self.parameters[name] for name in names)
        of_tokens, of_pairs = 8 * width**2 + 4 * width * inner, 4 * width
        return float(layers * (of_tokens * lengths.sum() + of_pairs * (lengths**2).sum()))


class RegardEncoding(EncodingSide):
    """`regard.encode_texts`."""

    padded = False

    def __init__(self, parameters: dict[str, Any], folder: Path) -> None:
        from regard import RegardBertModel

        super().__init__(parameters, folder)
        self.model = RegardBertModel.from_pretrained(folder / "model", add_pooling_layer=False)

    def batches(self, texts: list[str]) -> Iterator[list[str]]:
        """All of them, which it sorts and cuts into batches itself."""
        return iter([texts]) if self.parameters["together"] else super().batches(texts)

    def encode(self, texts: list[str]) -> Tensor:
        """See `EncodingSide`."""
        from regard import encode_texts

        return encode_texts(self.model, self.tokenizer, texts)


class StockEncoding(EncodingSide):
    """transformers' `BertModel` on a padded batch."""

    padded = True

    def __init__(self, parameters: dict[str, Any], folder: Path) -> None:
        super().__init__(parameters, folder)
        self.model = MeanPooled(folder / "model")

    @torch.inference_mode()
    def encode(self, texts: list[str]) -> Tensor:
        """See `EncodingSide`."""
        return self.model(**self.tokenizer(texts, truncation=True, padding=True, return_tensors="pt"))


class ONNXRuntimeEncoding(EncodingSide):
    """ONNX Runtime on the exported model and a padded batch."""

    padded = True
    needs = ("onnx", "onnxscript", "onnxruntime")

    def __init__(self, parameters: dict[str, Any], folder: Path) -> None:
        from onnxruntime import InferenceSession, SessionOptions

        super().__init__(parameters, folder)
        options = SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])

    def encode(self, texts: list[str]) -> np.ndarray:
        """See `EncodingSide`."""
        batch = self.tokenizer(texts, truncation=True, padding=True, return_tensors="np")
        (vectors,) = self.session.run(None, {name: batch[name] for name in NAMES})
        return vectors


SIDES = {"regard": RegardEncoding, "stock": StockEncoding, "onnxruntime": ONNXRuntimeEncoding}
