"""What the tests of the decoder share: tiny runs and models, and figures of one."""

import collections

import datasets
import torch
from torch import nn

from regard.modeling.decoder import RegardDecoderForCausalLM
from regard.training.examples.text_chunks import ChunkExamples
from regard.training.examples.tokenized import tokenize_texts
from regard.training.families.decoder import DECODER, DecoderObjective, DecoderSettings

TINY_MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}
TINY = {
    "vocab_size": 300,
    "config": TINY_MODEL,
    "max_length": 24,
    "batch_size": 12,
    "validation": "0.25",
    "log_with": ["none"],
}


def chunks_of(texts: list[str], tokenizer, length: int = 24) -> ChunkExamples:
    return ChunkExamples(tokenize_texts(datasets.Dataset.from_dict({"text": texts}), tokenizer), length)


def make_model(tokenizer, **fields) -> RegardDecoderForCausalLM:
    settings = DecoderSettings(config={**TINY_MODEL, "num_hidden_layers": 2, **fields}, dropout=0.0, max_length=2)
    return RegardDecoderForCausalLM(DECODER.make_config(settings, tokenizer)).eval()


@torch.no_grad()
def figures(task: DecoderObjective, model: nn.Module, batch_size: int = 4) -> tuple[dict, dict]:
    """The sums and the metrics of the held-out chunks, in batches of some size."""
    examples = task.held_out()
    sums: collections.Counter = collections.Counter()
    for start in range(0, len(examples), batch_size):
        stop = min(start + batch_size, len(examples))
        batch = task.collate([examples[index] for index in range(start, stop)])
        sums.update({name: float(value) for name, value in task.sums(task.forward(model, batch), batch).items()})
    return sums, task.metrics(sums)
