import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from regard.modeling.cpu import without_row_padding
from regard.training.families.bert import BertObjective
from regard.training.families.decoder import DecoderObjective
from regard.training.families.recipes import TRAINABLE
from regard.training.families.seq2seq_objective import Seq2SeqObjective
from regard.training.loop.launch import make_accelerator
from regard.training.loop.loop import Loop
from regard.training.loop.schedule import Budget
from regard.training.planning import plan as planning
from regard.training.planning import trial_step
from regard.training.planning.flops import FlopCount
from regard.training.planning.memory_tracker import MemoryTracker
from regard.training.planning.plan import plan_training
from regard.training.planning.trial_step import TrialStep
from regard.training.run.settings import make_settings
from tests.support.thorough import slow_except

SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 56}
GIVEN = {
    "bert": {"vocab_size": 501, "max_length": 31, "config": SIZES},
    "decoder": {"vocab_size": 301, "max_length": 37, "config": SIZES},
    "transformer": {"max_length": 19, "config": {**SIZES, "vocab_size": 97}},
    "recurrent": {"max_length": 13, "config": {"hidden_size": 26, "vocab_size": 97}},
    "captioner": {"max_length": 7, "image_size": 40, "config": {"hidden_size": 28, "vocab_size": 97}},
}
BATCH = 12


def given(family: str, **changes) -> dict:
    return {**GIVEN[family], "batch_size": BATCH, "log_with": ["none"], **changes}


def settings_of(family: str, **changes):
    settings = make_settings(TRAINABLE[family].settings_class, given(family, **changes))
    # As the plan has it, since there is no tokenizer here that would tell.
    if "vocab_size" in GIVEN[family]:
        settings.config = {"vocab_size": settings.vocab_size, **settings.config}
    return settings


@pytest.fixture
def extrapolated(monkeypatch):
    """Has plans try out as few examples as can be."""
    monkeypatch.setattr(planning, "_OPERATIONS", 1)


# Parameters


@pytest.mark.parametrize("family", TRAINABLE)
def test_parameters_are_those_of_the_model(family):
    model = TRAINABLE[family].make_model(settings_of(family))
    counted = plan_training(family, given(family)).parameters
    unique = {id(parameter): parameter.numel() for parameter in model.parameters()}
    assert counted.total == counted.trainable == sum(unique.values())
    assert counted.embeddings + counted.backbone + counted.blocks + counted.heads == counted.total
    assert (counted.backbone > 0) == (family == "captioner")
    assert min(counted.embeddings, counted.blocks) > 0


def test_parameters_of_each_part_of_a_bert():
    counted = plan_training("bert", given("bert")).parameters
    width, inner, layers, vocabulary = 24, 56, 3, 501
    assert counted.embeddings == (vocabulary + 512 + 2 + 2) * width
    block = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    assert counted.blocks == layers * block
    # The pooler and the transform with its norm, the bias of the tied output layer, and the two classes.
    assert counted.heads == 2 * (width * width + width) + 2 * width + vocabulary + 2 * width + 2


def test_an_output_layer_of_its_own_is_a_head():
    config = {**GIVEN["decoder"]["config"], "tie_word_embeddings": False}
    tied, own = (plan_training("decoder", given("decoder", **more)).parameters for more in ({}, {"config": config}))
    assert (tied.heads, own.heads) == (0, 24 * 301)
    assert own.embeddings == tied.embeddings


def test_a_frozen_backbone_has_no_gradients():
    made = plan_training("captioner", given("captioner", freeze_backbone=True))
    assert made.parameters.trainable == made.parameters.total - made.parameters.backbone
    assert made.memory.gradients == 4 * made.parameters.trainable
    assert made.memory.optimizer == 8 * made.parameters.trainable
    assert made.memory.weights >= 4 * made.parameters.total


# Memory


def allocated_peak(call) -> int:
    """The most that PyTorch's allocator gave out during a call beyond what it had at its beginning."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def measured_peak(family: str, folder, **changes) -> int:
    """The most memory in a step of the real loop, with what it had before.

    The batches are so small that what fills them up would be a good part of them.
    """
    settings = settings_of(family, **changes)
    model = TRAINABLE[family].make_model(settings).train()
    task = SimpleNamespace(
        tokens=lambda batch: 1,
        counts=lambda batch: {"num_items_in_batch": 99},
        forward=lambda model, batch, **counts: model(**batch, **counts),
    )
    loop = Loop(task, model, settings, Budget(steps=1), folder, make_accelerator(settings, folder))
    part = settings.batch_size // settings.accumulation
    batches = [
        TRAINABLE[family].synthetic_batch(settings, model.config, part)[0] for _ in range(settings.accumulation)
    ]
    with without_row_padding():
        return _measured(loop, model, batches)


def _measured(loop: Loop, model, batches) -> int:
    loop._step(batches, 0.5)
    kept = [*model.parameters(), *model.buffers()]
    kept += [moment for state in loop.optimizer.state.values() for moment in state.values()]
    return sum(tensor.nbytes for tensor in kept) + allocated_peak(lambda: loop._step(batches, 0.5))


VARIED = [(family, {}) for family in TRAINABLE]
VARIED += [(family, change) for family in TRAINABLE for change in ({"precision": "bf16"}, {"accumulation": 2})]


# Of the changes one with each kind of model: a stack of blocks and a recurrent one.
@pytest.mark.parametrize(("family", "changes"), slow_except([*VARIED[:6], VARIED[-3]], VARIED), ids=str)
def test_the_peak_is_that_of_training(family, changes, extrapolated, tmp_path):
    expected = measured_peak(family, tmp_path, **changes)
    assert plan_training(family, given(family, **changes)).memory.peak == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        # Gradients of the embeddings weigh most, or scores of the vocabulary, in parts.
        ("bert", {"vocab_size": 30011, "batch_size": 4}),
        ("bert", {"vocab_size": 50021, "batch_size": 64}),
        ("decoder", {"dropout": 0.1, "batch_size": 1}),
        ("recurrent", {"rnn_type": "lstm", "alignment": "none"}),
        ("captioner", {"decoder_type": "transformer", "freeze_backbone": True}),
    ],
)
def test_the_peak_of_other_models_is_that_of_training(family, changes, tmp_path):
    expected = measured_peak(family, tmp_path, **changes)
    assert plan_training(family, given(family, **changes)).memory.peak == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("family", TRAINABLE)
def test_activations_grow_with_the_batch(family, extrapolated):
    tried = TrialStep(TRAINABLE[family], settings_of(family)).run(BATCH)
    made = plan_training(family, given(family))
    assert made.memory.activations == pytest.approx(tried.saved, rel=1e-3)
    assert made.flops_per_token == pytest.approx(tried.flops / tried.tokens, rel=1e-9)
    more = plan_training(family, given(family, batch_size=10 * BATCH))
    assert more.memory.activations == pytest.approx(10 * made.memory.activations, rel=0.2)


def test_activations_are_the_tensors_saved():
    size, rows = 5, 3
    layers = nn.Sequential(nn.Linear(size, 7), nn.Tanh(), nn.Linear(7, 1))
    memory = MemoryTracker(torch.device("cpu"), without=layers.parameters())
    with memory, torch.autograd.graph.saved_tensors_hooks(memory.save, memory.load):
        loss = layers(torch.ones(rows, size)).sum()
        # The input, and what tanh gives, which it and the second layer read.
        assert memory.saved == 4 * rows * (size + 7)
        assert memory.bytes == memory.saved + loss.nbytes
        loss.backward()
    assert memory.saved == 0
    assert memory.bytes == loss.nbytes + sum(each.grad.nbytes for each in layers.parameters())


def test_parts_of_a_batch_take_less_than_the_whole():
    whole, parts = (plan_training("bert", given("bert", accumulation=number)) for number in (1, 4))
    assert (whole.examples, parts.examples) == (12, 3)
    assert parts.memory.activations < whole.memory.activations / 2
    assert parts.memory.peak < whole.memory.peak
    assert parts.tokens_per_step == whole.tokens_per_step == 12 * 31


def test_half_precision_halves_activations_and_no_weights():
    full, half = (plan_training("decoder", given("decoder", precision=name)).memory for name in ("no", "bf16"))
    assert half.weights == full.weights
    assert half.optimizer == full.optimizer
    assert half.activations < 0.9 * full.activations


def test_several_devices_exchange_gradients_in_buckets(tmp_path):
    one, four = (plan_training("decoder", given("decoder"), devices=number) for number in (1, 4))
    assert (one.memory.communication, four.examples) == (0, 3)
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(four.memory, name) == getattr(one.memory, name)
    model = TRAINABLE["decoder"].make_model(settings_of("decoder"))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        # To bring the weights in step takes memory too, for a moment.
        kept = allocated_peak(lambda: nn.parallel.DistributedDataParallel(model, init_sync=False))
    finally:
        torch.distributed.destroy_process_group()
    assert four.memory.communication == pytest.approx(kept, rel=0.1)


def test_sharding_shares_out_what_the_model_needs():
    deep = given("decoder", config={**SIZES, "num_hidden_layers": 12})
    whole, sharded = (
        plan_training("decoder", {**deep, "sharding": name}, devices=6).memory for name in ("none", "fsdp")
    )
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(sharded, name) == pytest.approx(getattr(whole, name) / 6, abs=2)
    assert sharded.activations == whole.activations
    assert 0 < sharded.communication < whole.communication
    assert sharded.peak < whole.peak
    alone = plan_training("decoder", {**deep, "sharding": "fsdp"}).memory
    assert alone == plan_training("decoder", deep).memory


@pytest.mark.parametrize(("precision", "size"), [("no", 4), ("bf16", 2)])
def test_what_is_whole_at_once_when_sharded(precision, size):
    """All that is in no block, and one block, each with its gradients; and the block that is fetched meanwhile."""
    made = plan_training("decoder", given("decoder", sharding="fsdp", precision=precision), devices=2)
    block = made.parameters.blocks // SIZES["num_hidden_layers"]
    rest = made.parameters.total - SIZES["num_hidden_layers"] * block
    assert made.memory.communication == pytest.approx(size * (2 * rest + 3 * block), rel=0.01)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the memory of an accelerator is another")
def test_weights_and_gradients_must_fit(monkeypatch):
    needed = 8 * plan_training("decoder", given("decoder")).parameters.total
    for room, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(planning.os, "sysconf", lambda name, room=room: room if name == "SC_PHYS_PAGES" else 1)
        model = TRAINABLE["decoder"].make_model(settings_of("decoder"))
        if fits:
            planning._require_room(model)
        else:
            with pytest.raises(ValueError, match="can't be tried out here"):
                planning._require_room(model)


# Operations


def bert_formula(length: int, predicted: int) -> float:
    """Operations of a row: a product counts three times, forward and for both gradients."""
    width, inner, layers, vocabulary, last = 24, 56, 3, 501, predicted + 1
    queries = (layers - 1) * length + last
    return 3 * (
        6 * width**2 * layers * length
        + (2 * width**2 + 4 * width * inner + 4 * width * length) * queries
        + (2 * width**2 + 2 * width * vocabulary) * predicted
        + 2 * width**2
        + 4 * width
    )


@pytest.mark.parametrize(("length", "predicted"), [(31, 4), (64, 9), (111, 16)])
def test_operations_of_a_bert(length, predicted):
    made = plan_training("bert", given("bert", max_length=length))
    assert made.flops_per_token == pytest.approx(bert_formula(length, predicted) / length, rel=0.01)


@pytest.mark.parametrize(("dropout", "attention"), [(0.1, 3), (0.0, 3.5)])
def test_operations_of_a_decoder(dropout, attention):
    width, inner, layers, vocabulary, length = 24, 56, 3, 301, 37
    made = plan_training("decoder", given("decoder", dropout=dropout))
    # A fused kernel computes the scores once more on its way back.
    expected = 3 * (layers * (8 * width**2 + 4 * width * inner) + 2 * width * vocabulary)
    expected += layers * attention * 4 * width * length
    assert made.flops_per_token == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("family", ["transformer", "recurrent", "captioner"])
def test_operations_are_those_that_torch_counts(family):
    """In float64, where every product is one that its own counter knows."""
    # The sums of additive alignment are products or not, by the kernel.
    changes = {"alignment": "scaled_dot"} if family == "recurrent" else {}
    settings = settings_of(family, **changes)
    model = TRAINABLE[family].make_model(settings).double().train()
    if family == "transformer":
        model.set_attn_implementation("eager")
    batch, tokens = TRAINABLE[family].synthetic_batch(settings, model.config, 4)
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    changes |= {"dropout": 1e-3} if family == "transformer" else {}
    own = plan_training(family, given(family, **changes))
    # The counter does not know an LSTM's kernel, which the captioner's decoder does not use.
    assert own.flops_per_token == pytest.approx(counter.get_total_flops() / tokens, rel=0.01)


def test_operations_of_recurrent_kernels():
    inputs = torch.randn(3, 40, 11, requires_grad=True)
    lstm = nn.LSTM(11, 13, batch_first=True)
    counts = []
    for fused in (True, False):
        with torch.backends.mkldnn.flags(enabled=fused), FlopCount() as count:
            lstm(inputs)[0].sum().backward()
        counts.append(count.flops)
    # Step by step there is no gradient of the first state.
    assert counts[0] == 3 * 2 * 3 * 40 * 4 * 13 * (11 + 13)
    assert counts[1] == pytest.approx(counts[0], rel=1 / 40)


# Batches


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("bert", BertObjective),
        ("decoder", DecoderObjective),
        ("recurrent", Seq2SeqObjective),
        ("captioner", Seq2SeqObjective),
    ],
)
def test_tokens_are_counted_as_in_training(family, task):
    settings = settings_of(family)
    config = TRAINABLE[family].make_model(settings).config
    batch, tokens = TRAINABLE[family].synthetic_batch(settings, config, 5)
    assert tokens == task.tokens(None, batch)
    assert plan_training(family, given(family)).tokens_per_step * 5 == tokens * BATCH


@pytest.mark.parametrize(("rate", "number"), [(0.15, 4), (0.4, 11), (0.001, 1)])
def test_so_many_tokens_are_predicted(rate, number):
    settings = settings_of("bert", mask_rate=rate)
    batch, _ = TRAINABLE["bert"].synthetic_batch(settings, TRAINABLE["bert"].make_model(settings).config, 6)
    assert len(batch["predicted_positions"]) == 6 * number


# The vocabulary


def test_the_vocabulary():
    def vocabulary(family: str, **changes) -> tuple[int, tuple[str, ...]]:
        made = plan_training(family, {"max_length": 9, "batch_size": 2, **changes})
        return made.vocab_size, made.notes

    assert vocabulary("bert", vocab_size=333) == (333, ())
    assert vocabulary("bert", vocab_size=333, config={"vocab_size": 222}) == (222, ())
    assert vocabulary("recurrent", units="pieces", vocab_size=333) == (333, ())
    assert vocabulary("recurrent", config={"vocab_size": 222}) == (222, ())
    for family in ("transformer", "captioner"):
        size, (note,) = vocabulary(family)
        assert f"{size:,} tokens is assumed" in note
    assert "`compile`" in vocabulary("bert", compile=True)[1][0]


def test_the_vocabulary_of_a_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    made = plan_training("bert", given("bert", tokenizer=str(tmp_path)))
    assert (made.vocab_size, made.notes) == (len(tokenizer), ())


# Time


def test_time():
    made = plan_training("decoder", given("decoder"), devices=3, speed=2000, tokens=6e6, efficiency=0.5)
    assert (made.tokens, made.speed, made.measured) == (6_000_000, 2000, False)
    assert made.seconds == pytest.approx(6e6 / (3 * 2000 * 0.5))
    assert made.steps == math.ceil(6e6 / (BATCH * 37))
    assert made.flops == pytest.approx(6e6 * made.flops_per_token)
    untimed = plan_training("decoder", given("decoder", steps=7))
    assert (untimed.speed, untimed.seconds) == (None, None)
    assert (untimed.steps, untimed.tokens) == (7, 7 * BATCH * 37)
    assert plan_training("decoder", given("decoder")).tokens == 10**9


def test_the_speed_is_that_of_whole_steps(monkeypatch):
    """By a clock of its own, which a forward pass moves on by 2 seconds and an optimizer's step by 3."""
    monkeypatch.setattr(trial_step, "SECONDS", 0)
    now = [0.0]
    monkeypatch.setattr(trial_step, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    step = torch.optim.AdamW.step

    def timed_step(optimizer, *arguments):
        now[0] += 3
        return step(optimizer, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", timed_step)
    made = TrialStep(TRAINABLE["decoder"], settings_of("decoder", accumulation=4))
    before = made.model.lm_head.weight.detach().clone()

    def move_on(*arguments):
        now[0] += 2

    made.model.register_forward_pre_hook(move_on)
    assert made.measure_speed(3) == pytest.approx(BATCH * 37 / (4 * 2 + 3))
    assert not torch.equal(made.model.lm_head.weight, before)


def test_a_measured_plan(monkeypatch):
    monkeypatch.setattr(trial_step, "SECONDS", 0)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    made = plan_training("bert", given("bert"), measure=True, tokens=1e6)
    assert made.measured
    assert made.seconds == pytest.approx(1e6 / made.speed)
    # Chance is the caller's.
    assert torch.equal(torch.rand(2), expected)


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, r"`devices` \(0\) must be at least 1"),
        ({"devices": 5}, r"`batch_size` \(12\) must be a multiple of 5: 5 devices times `accumulation` \(1\)"),
        ({"tokens": 0}, r"`tokens` \(0\) must be more than 0"),
        ({"tokens": math.nan}, r"`tokens` \(nan\) must be more than 0"),
        ({"speed": -1.0}, r"`speed` \(-1\) must be more than 0"),
        ({"speed": 5.0, "measure": True}, r"`speed` \(5\) is given, and `measure` asks"),
        ({"efficiency": 1.5}, r"`efficiency` \(1.5\) must be more than 0 and at most 1"),
    ],
)
def test_arguments_that_will_not_do(options, message):
    with pytest.raises(ValueError, match=message):
        plan_training("bert", given("bert"), **options)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bert", {"size": "huge"}, r"`size` \('huge'\) must be one of"),
        ("bert", {"batch": 3}, r"there is no setting `batch`: did you mean `batch_size`\?"),
        ("bert", {"max_length": 4}, r"`max_length` \(4\) must be at least 5: 3 special tokens and 2"),
        ("decoder", {"max_length": 1}, r"`max_length` \(1\) must be at least 2"),
        ("decoder", {"config": {"hidden_size": 31, "num_attention_heads": 2}}, r"`hidden_size` \(31\) must be a mul"),
        ("decoder", {"config": {"hidden_size": 2**17}}, r"parameters can't be tried out here: it needs [\d,.]+ GiB"),
        ("captioner", {"image_size": 0}, r"`image_size` \(0\) must be at least 1"),
    ],
)
def test_settings_that_will_not_do(family, changes, message):
    with pytest.raises(ValueError, match=message):
        plan_training(family, given(family, **changes))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator has float16")
def test_float16_needs_an_accelerator():
    with pytest.raises(ValueError, match=r"`precision` \('fp16'\) needs an accelerator"):
        plan_training("bert", given("bert", precision="fp16"))
