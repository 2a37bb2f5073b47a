"""One step of BERT's pretraining: regard's, on a packed batch, and that of stock transformers, on a padded one.

Both start from the same weights and step through the same batches in the same order: forward, backward, and a fused
AdamW, in float32, with the same dropout. Stock BERT has its default attention, and what transformers' collators give:
a batch padded to its longest row, with a mask. Tokens are counted without padding.

Operations are those of matrix products, a multiplication and an addition counted as two, three times those of the
forward pass. With width E, feed-forward width F and vocabulary V, a token's are, in a layer, 4 E² for key and value,
4 E² for query and output, 4 E F for the feed-forward layer and 4 E for each token it attends to; in the head
2 E² + 2 E V; and 2 E² for each row's pooler. Each side is counted what its way of computing needs: stock all of this
at every position, padding included; regard the last layer's query, output, attention and feed-forward at the predicted
positions and the first of each row alone, and the head at the predicted ones.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from .compare import Case
from .sides import Side, Work

TITLE = "Pretraining step of BERT"

MINI = {
    "vocab_size": 30522,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
BASE = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
TINY = {
    "vocab_size": 1000,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "rows": 4,
    "length": 48,
}
FULL = {"rows": 16, "length": 128, "data": "full", "batches": 2, "dropout": 0.1}

# The share of the positions that are predicted, of those that are no special tokens.
MASK_RATE = 0.15
PAD, CLS, SEP, MASK, SPECIALS = 0, 2, 3, 4, 5
# A dropout that drops nothing, but has each side take the way that it takes with one.
HARDLY = 1e-12

CASES = {
    "mini-full": Case(
        "BERT-mini, 16 full rows of 128 tokens",
        MINI | FULL,
        quick=TINY,
        figures={"stock": {"speed": 3.5, "memory": 0.4}},
        share=0.8,
    ),
    "mini-ragged": Case(
        "BERT-mini, 16 rows as Python's documentation gives them, at most 128 tokens",
        MINI | FULL | {"data": "documents", "batches": 9},
        quick=TINY | {"documents": 40},
        beyond=("mini-full", 1.3),
    ),
    "mini-no-dropout": Case("BERT-mini, 16 full rows of 128 tokens, without dropout", MINI | FULL | {"dropout": 0.0}),
    "base-full": Case(
        "BERT-base, 4 full rows of 128 tokens",
        BASE | FULL | {"rows": 4},
        repetitions=7,
        figures={"stock": {"speed": 1.45, "memory": 0.7}},
        share=0.85,
    ),
}


def full_examples(parameters: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Pairs of random tokens, as long as may be."""
    from regard.training.examples.masking import Masking

    length, vocabulary = parameters["length"], parameters["vocab_size"]
    rng = np.random.default_rng(0)
    masking = Masking(MASK, np.arange(vocabulary) < SPECIALS, MASK_RATE)
    token_type_ids = (np.arange(length) > length // 2).astype(np.int64)
    examples = []
    for index in range(number):
        ids = rng.integers(SPECIALS, vocabulary, length)
        ids[0], ids[[length // 2, -1]] = CLS, SEP
        shown, labels = masking(ids, np.ones(length, dtype=np.bool_), rng)
        follows = {"next_sentence_label": index % 2}
        examples.append({"input_ids": shown, "token_type_ids": token_type_ids, "labels": labels, **follows})
    return examples


def document_examples(parameters: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """The first examples of an epoch of `regard train bert` on Python's own documentation."""
    from regard.training.examples.bert import BertExamples
    from regard.training.examples.masking import Masking
    from regard.training.examples.tokenized import tokenize_documents
    from regard.training.families.bert import BERT, BertSettings
    from regard.training.families.text_corpus import load_document_split

    settings = BertSettings(
        vocab_size=parameters["vocab_size"],
        max_length=parameters["length"],
        max_documents=parameters.get("documents"),
        mask_rate=MASK_RATE,
    )
    settings.check()
    documents, _ = load_document_split(settings)
    tokenizer = BERT.make_processor(settings, documents)
    masking = Masking.from_tokenizer(tokenizer, rate=MASK_RATE)
    corpus = tokenize_documents(documents, tokenizer)
    epoch = BertExamples(corpus, tokenizer, masking, settings.max_length, settings.seed).epoch(0)
    return [dict(epoch[index]) for index in range(number)]


def padded(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The batch that transformers' collators make: padded to the longest."""
    rows = [{name: torch.as_tensor(value) for name, value in example.items()} for example in examples]
    batch = {
        name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fill)
        for name, fill in (("input_ids", PAD), ("token_type_ids", 0), ("labels", -100))
    }
    masks = [torch.ones_like(row["input_ids"]) for row in rows]
    batch["attention_mask"] = pad_sequence(masks, batch_first=True)
    batch["next_sentence_label"] = torch.stack([row["next_sentence_label"] for row in rows])
    return batch


def write_inputs(parameters: dict[str, Any], folder: Path) -> None:
    """Writes a stock checkpoint, and each side's form of the same batches."""
    from transformers import BertConfig, BertForPreTraining

    from regard.training.examples.bert import BertCollator

    torch.manual_seed(0)
    sizes = {name: parameters[name] for name in MINI}
    dropout = parameters["dropout"]
    config = BertConfig(**sizes, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    model = BertForPreTraining(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases of 0 and norms of 1 would hide that a side leaves them out.
            parameter.add_(torch.randn_like(parameter), alpha=config.initializer_range)
    model.save_pretrained(folder / "model")
    rows, number = parameters["rows"], parameters["batches"]
    make = {"full": full_examples, "documents": document_examples}[parameters["data"]]
    examples = make(parameters, rows * number)
    batches = [examples[start : start + rows] for start in range(0, rows * number, rows)]
    torch.save([BertCollator()(batch) for batch in batches], folder / "regard.pt")
    torch.save([padded(batch) for batch in batches], folder / "stock.pt")


class PretrainingSide(Side):
    """A step of pretraining; what differs is the model and what it is given."""

    name: str

    def __init__(self, parameters: dict[str, Any], folder: Path) -> None:
        super().__init__(parameters, folder)
        self.batches = torch.load(folder / f"{self.name}.pt")
        self.model = self.load(parameters["dropout"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        torch.manual_seed(0)

    def model_class(self) -> Any:
        """Imports it, in the process of this side alone."""
        raise NotImplementedError

    def load(self, dropout: float) -> nn.Module:
        """The model, in training."""
        fields = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        return self.model_class().from_pretrained(self.folder / "model", **fields).train()

    def size(self, batch: dict[str, Any]) -> tuple[int, float]:
        """The tokens of a batch, and the operations that a step needs."""
        raise NotImplementedError

    def check(self) -> dict[str, Any]:
        """The loss and the norm of its gradient, in training, with nothing dropped."""
        model = self.load(min(self.parameters["dropout"], HARDLY))
        loss = model(**self.batches[0]).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        tokens, _ = self.size(self.batches[0])
        return {"loss": loss.item(), "gradient_norm": norm.item(), "tokens": tokens}

    def run(self, turn: int) -> Work:
        """One step."""
        batch = self.batches[turn % len(self.batches)]
        began = time.perf_counter()
        self.model(**batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Work(time.perf_counter() - began, *self.size(batch))

    def operations(
        self, rows: int, tokens: int, attended: int, last: int, last_attended: int, predicted: int
    ) -> float:
        """See the module; `last` are the positions that attend in the last layer, `attended` the pairs of tokens."""
        names = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
        width, inner, vocabulary, layers = (self.parameters[name] for name in names)
        # Positions, and pairs, added up over the layers; keys and values are needed at all positions.
        queries, pairs = (layers - 1) * tokens + last, (layers - 1) * attended + last_attended
        forward = (
            4 * width**2 * layers * tokens
            + (4 * width**2 + 4 * width * inner) * queries
            + 4 * width * pairs
            + (2 * width**2 + 2 * width * vocabulary) * predicted
            + 2 * width**2 * rows
        )
        return 3.0 * forward


class RegardPretraining(PretrainingSide):
    """`RegardBertForPreTraining` on the batch that `BertCollator` makes."""

    name = "regard"

    def model_class(self) -> Any:
        from regard.modeling.bert_pretraining import RegardBertForPreTraining

        return RegardBertForPreTraining

    def size(self, batch: dict[str, Any]) -> tuple[int, float]:
        ends, predicted = batch["cu_seq_lens_q"].long(), batch["predicted_positions"]
        lengths = ends.diff()
        # The first of each row leaves the last layer too.
        last = torch.bincount(torch.bucketize(predicted, ends[1:], right=True), minlength=len(lengths)) + 1
        tokens, attended = int(lengths.sum()), int((lengths**2).sum())
        last_attended = int((last * lengths).sum())
        operations = self.operations(len(lengths), tokens, attended, int(last.sum()), last_attended, len(predicted))
        return tokens, operations


class StockPretraining(PretrainingSide):
    """transformers' `BertForPreTraining` on a padded batch."""

    name = "stock"

    def model_class(self) -> Any:
        from transformers import BertForPreTraining

        return BertForPreTraining

    def size(self, batch: dict[str, Any]) -> tuple[int, float]:
        rows, length = batch["input_ids"].shape
        tokens, attended = rows * length, rows * length**2
        operations = self.operations(rows, tokens, attended, tokens, attended, tokens)
        return int(batch["attention_mask"].sum()), operations


SIDES = {"regard": RegardPretraining, "stock": StockPretraining}
