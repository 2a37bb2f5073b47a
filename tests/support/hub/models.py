"""Tiny models of every family with what belongs to them, to push and to pull."""

import hashlib

import torch
import transformers

from regard.tokenization.byte_level import train_byte_level
from regard.tokenization.characters import train_characters
from regard.tokenization.generative import save_tokenizer
from regard.tokenization.processor import make_captioner_processor
from regard.tokenization.wordpiece import train_wordpiece
from regard.tokenization.words import train_words
from tests.support.families import FAMILIES

TEXTS = ["a red cat sat on a mat", "a blue dog, sitting on a red mat"]
# The Auto class, a tokenizer, and configuration fields.
TINY = {
    "regard_bert": (
        "AutoModelForMaskedLM",
        lambda: train_wordpiece(TEXTS, vocab_size=41),
        {"num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 22},
    ),
    "regard_decoder": (
        "AutoModelForCausalLM",
        lambda: train_byte_level(TEXTS, vocab_size=270),
        {"num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 26},
    ),
    "regard_transformer": (
        "AutoModelForSeq2SeqLM",
        lambda: train_byte_level(TEXTS, vocab_size=265),
        {"num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 23},
    ),
    "regard_recurrent": (
        "AutoModelForSeq2SeqLM",
        lambda: train_characters(TEXTS),
        {"num_hidden_layers": 2, "encoder_hidden_size": 5},
    ),
    "regard_captioner": ("AutoModelForImageTextToText", lambda: train_words(TEXTS), {"num_hidden_layers": 1}),
}


def make_model(model_type, seed=0, **fields):
    """A model of random weights, and its tokenizer or processor."""
    auto_class, make_tokenizer, sizes = TINY[model_type]
    tokenizer = make_tokenizer()
    config_class = next(each for each in FAMILIES if each.model_type == model_type)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 18, "initializer_range": 0.5, **sizes, **fields}
    torch.manual_seed(seed)
    model = FAMILIES[config_class][auto_class](config_class(**sizes)).eval()
    # Away from the zeros and ones that a model begins with, and may be left with where weights go missing.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, make_captioner_processor(tokenizer, (40, 24)) if model_type == "regard_captioner" else tokenizer


def save_model(folder, model, processor, **options):
    model.save_pretrained(folder, **options)
    if hasattr(processor, "image_processor"):
        processor.save_pretrained(folder)
        processor = processor.tokenizer
    save_tokenizer(processor, folder)
    return folder


def fingerprint(model, processor):
    """What must be the same after a push and a pull: every bit of the weights, and ids, and how to generate."""
    weights = {
        name: (
            tensor.dtype,
            tuple(tensor.shape),
            hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).digest(),
        )
        for name, tensor in model.state_dict().items()
        if tensor.dim()
    }
    head = model.get_output_embeddings()
    text = "a blue <extra> cat, sitting"
    tokenizer = getattr(processor, "tokenizer", processor)
    generation = model.generation_config.to_dict() if model.can_generate() else {}
    return {
        "class": type(model).__name__,
        "weights": weights,
        "tied": head is not None and head.weight is model.get_input_embeddings().weight,
        "ids": tokenizer(text)["input_ids"],
        "generation": {name: value for name, value in generation.items() if name != "_from_model_config"},
    }


def pull(repo_id, model_type, cache, **options):
    """The fingerprint of what a client has from the Hub."""
    options["cache_dir"] = cache
    model = getattr(transformers, TINY[model_type][0]).from_pretrained(repo_id, dtype="auto", **options)
    kind = "AutoProcessor" if model_type == "regard_captioner" else "AutoTokenizer"
    return fingerprint(model, getattr(transformers, kind).from_pretrained(repo_id, **options))
