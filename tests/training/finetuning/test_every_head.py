"""In DistributedDataParallel every weight of every model gets a gradient, and the one that it gets in one process."""

from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from regard.configuration.bert import RegardBertConfig
from regard.configuration.captioner import RegardCaptionerConfig
from regard.configuration.decoder import RegardDecoderConfig
from regard.configuration.recurrent import ALIGNMENT_NAMES, RegardRecurrentConfig
from regard.configuration.transformer import RegardTransformerConfig
from regard.modeling.bert_pretraining import (
    RegardBertForMaskedLM,
    RegardBertForNextSentencePrediction,
    RegardBertForPreTraining,
)
from regard.modeling.bert_tasks import (
    RegardBertForMultipleChoice,
    RegardBertForQuestionAnswering,
    RegardBertForSequenceClassification,
    RegardBertForTokenClassification,
)
from regard.modeling.captioner import RegardCaptionerForConditionalGeneration
from regard.modeling.decoder import RegardDecoderForCausalLM
from regard.modeling.recurrent import RegardRecurrentForConditionalGeneration
from regard.modeling.transformer import RegardTransformerForConditionalGeneration
from tests.training.loop.test_distributed import free_port

B, L, V = 4, 7, 37
SIZES = {
    "vocab_size": V,
    "hidden_size": 12,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
BLOCKS = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20, "max_position_embeddings": L}


def ids(*shape: int, below: int = V) -> torch.Tensor:
    return torch.randint(3, below, shape) if below > 3 else torch.randint(below, shape)


def bert(model_class, **labels) -> tuple:
    return model_class(RegardBertConfig(**SIZES, **BLOCKS, num_labels=3)), {"input_ids": ids(B, L), **labels}


def seq2seq(model_class, config) -> tuple:
    return model_class(config), {"input_ids": ids(B, L), "labels": ids(B, L - 2)}


def recurrent(**fields) -> tuple:
    given = {name: value for name, value in SIZES.items() if not name.startswith("attention")}
    return seq2seq(RegardRecurrentForConditionalGeneration, RegardRecurrentConfig(**given, **fields))


def captioner(**fields) -> tuple:
    model = RegardCaptionerForConditionalGeneration(RegardCaptionerConfig(**SIZES, **BLOCKS, **fields))
    # Statistics of batch normalisation are another test's.
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.0
            module.train = lambda mode=True, module=module: module
            module.training = False
    return model, {"pixel_values": torch.randn(B, 3, 24, 24), "labels": ids(B, L - 1)}


def with_adapters() -> tuple:
    peft = pytest.importorskip("peft")
    model, batch = bert(RegardBertForSequenceClassification, labels=ids(B, below=3))
    targets = ["query_key_value", "output", "up"]
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", target_modules=targets, r=2))
    # PEFT says nothing of a target that no module is called by, where another is found.
    adapted = {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted == set(targets)
    return model, batch


MODELS = {
    "pretraining": lambda: bert(
        RegardBertForPreTraining, labels=ids(B, L), next_sentence_label=ids(B, below=2), predicted_only=True
    ),
    "masked": lambda: bert(RegardBertForMaskedLM, labels=ids(B, L)),
    "next sentence": lambda: bert(RegardBertForNextSentencePrediction, labels=ids(B, below=2)),
    "sequences": lambda: bert(RegardBertForSequenceClassification, labels=ids(B, below=3)),
    "tokens": lambda: bert(RegardBertForTokenClassification, labels=ids(B, L, below=3)),
    "questions": lambda: bert(
        RegardBertForQuestionAnswering, start_positions=ids(B, below=3), end_positions=ids(B, below=3)
    ),
    "choices": lambda: (
        RegardBertForMultipleChoice(RegardBertConfig(**SIZES, **BLOCKS)),
        {"input_ids": ids(B, 3, L), "labels": ids(B, below=3)},
    ),
    "adapters": with_adapters,
    "decoder": lambda: (
        RegardDecoderForCausalLM(RegardDecoderConfig(**SIZES, **BLOCKS)),
        {"input_ids": (given := ids(B, L)), "labels": given},
    ),
    "transformer": lambda: seq2seq(
        RegardTransformerForConditionalGeneration, RegardTransformerConfig(**SIZES, **BLOCKS)
    ),
    **{f"recurrent {name}": lambda name=name: recurrent(alignment=name) for name in ALIGNMENT_NAMES},
    "recurrent lstm": lambda: recurrent(rnn_type="lstm", num_hidden_layers=2),
    "captioner": lambda: captioner(),
    "captioner none": lambda: captioner(alignment="none"),
    "captioner frozen": lambda: captioner(freeze_backbone=True),
    "captioner transformer": lambda: captioner(decoder_type="transformer"),
}


def gradients(name: str, rank: int | None) -> dict[str, torch.Tensor]:
    """Of two steps, the second of which DistributedDataParallel refuses if weights lacked one in the first."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    if rank is not None:
        half = slice(rank * B // 2, (rank + 1) * B // 2)
        batch = {key: value[half] if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
        model = DistributedDataParallel(model)
    for _ in range(2):
        model.zero_grad()
        model(**batch).loss.backward()
    plain = model if rank is None else model.module
    return {key: weight.grad for key, weight in plain.named_parameters() if weight.requires_grad}


def _process(rank: int, port: int, told) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for name in MODELS:
        try:
            found = gradients(name, rank)
            result = {key: None if value is None else value.numpy() for key, value in found.items()}
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        if rank == 0:
            told.put((name, result))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def in_two() -> dict[str, dict]:
    """The gradients of each model in two processes, or what went wrong."""
    context = get_context("fork")
    told, port = context.Queue(), free_port()
    processes = [context.Process(target=_process, args=(rank, port, told)) for rank in range(2)]
    for process in processes:
        process.start()
    results = dict(told.get(timeout=120) for _ in MODELS)
    for process in processes:
        process.join()
    return results


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_two_processes_are_those_of_one(in_two, name):
    expected = gradients(name, None)
    assert not isinstance(in_two[name], str), in_two[name]
    assert in_two[name].keys() == expected.keys()
    for key, gradient in expected.items():
        assert gradient is not None, key
        assert torch.allclose(torch.from_numpy(in_two[name][key]), gradient, rtol=1e-4, atol=1e-6), key
