import io
import json
import logging
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.utils import LoggerType
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from regard.training.families.bert import BertSettings
from regard.training.loop import loop
from regard.training.loop.launch import make_accelerator
from regard.training.loop.loop import Loop, make_optimizer, steps_per_epoch
from regard.training.loop.schedule import learning_rate_factor

# No schedule, no decay, no dropout: what is left is the gradient.
PLAIN = {
    "dropout": 0.0,
    "warmup": 0.0,
    "schedule": "constant",
    "weight_decay": 0.0,
    "evaluate_every": 0,
    "log_every": 1,
}


@pytest.fixture
def plain_descent(monkeypatch):
    """Replaces AdamW by plain gradient descent, so that an update is the gradient times the learning rate."""
    monkeypatch.setattr(loop, "make_optimizer", lambda model, settings: torch.optim.SGD(model.parameters(), lr=1))


@pytest.fixture
def snapshots(monkeypatch):
    """The weights before the first step and after each, as vectors."""
    taken = []
    whole = Loop._step

    def flat(model) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    def watched(self, *args):
        if not taken:
            taken.append(flat(self.model))
        result = whole(self, *args)
        taken.append(flat(self.model))
        return result

    monkeypatch.setattr(Loop, "_step", watched)
    return taken


def train_records(history_of, folder) -> list[dict]:
    return [values for _, kind, values in history_of(folder) if kind == "train"]


# Accumulation


@pytest.mark.parametrize("next_sentence", [True, False])
def test_parts_of_a_batch_add_up_to_it(pretrain, tmp_path, plain_descent, snapshots, history_of, next_sentence):
    settings = {**PLAIN, "steps": 2, "learning_rate": 1.0, "clip": 0.0, "next_sentence": next_sentence}
    found = {}
    for parts in (1, 4, 12):
        snapshots.clear()
        results = pretrain(tmp_path / str(parts), accumulation=parts, **settings)
        found[parts] = torch.stack(snapshots), train_records(history_of, tmp_path / str(parts)), results["tokens"]
    weights, records, tokens = found.pop(1)
    assert (weights[1] - weights[0]).abs().max() > 1e-3
    for other_weights, other_records, other_tokens in found.values():
        assert torch.allclose(other_weights, weights, rtol=0, atol=1e-6)
        assert other_tokens == tokens
        for record, expected in zip(other_records, records, strict=True):
            assert record == pytest.approx(expected, abs=1e-5)


def test_every_example_is_in_one_part_whoever_computes_it():
    settings = SimpleNamespace(batch_size=12, accumulation=2, workers=0)

    def parts(process: int, processes: int, first_step: int) -> list[range]:
        device = SimpleNamespace(type="cpu")
        accelerator = SimpleNamespace(process_index=process, num_processes=processes, device=device)
        objective = SimpleNamespace(collate=list)
        stub = SimpleNamespace(settings=settings, accelerator=accelerator, objective=objective)
        return list(Loop._loader(stub, range(100), first_step, steps=5, workers=0))

    for processes in (1, 2, 3):
        for first_step in (0, 3):
            shares = [parts(process, processes, first_step) for process in range(processes)]
            for step in range(5 - first_step):
                batch = [index for share in shares for part in share[2 * step : 2 * step + 2] for index in part]
                start = (first_step + step) * 12
                assert sorted(batch) == list(range(start, start + 12))
            assert {len(share) for share in shares} == {2 * (5 - first_step)}


# The optimizer


def test_matrices_decay_and_vectors_do_not():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3))
    model[1].weight.requires_grad = False
    optimizer = make_optimizer(model, BertSettings(weight_decay=0.5, learning_rate=0.25))
    decay = {id(parameter): group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    assert decay == {
        id(model[0].weight): 0.5,
        **{id(parameter): 0.0 for parameter in (model[1].bias, model[2].weight, model[2].bias)},
    }
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}


def test_decay_is_decoupled():
    # With no gradient AdamW shrinks the weights by the rate times the decay, where L2 in the loss would be normalised.
    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()
    optimizer = make_optimizer(model, BertSettings(weight_decay=0.5, learning_rate=0.25))
    model(torch.zeros(1, 4)).sum().mul(0).backward()
    optimizer.step()
    assert torch.allclose(model.weight, before * (1 - 0.25 * 0.5))


def test_a_gradient_is_clipped(pretrain, tmp_path, plain_descent, snapshots, history_of):
    def steps_and_norms(clip: float) -> tuple[torch.Tensor, list[float]]:
        snapshots.clear()
        pretrain(tmp_path / str(clip), **PLAIN, steps=3, learning_rate=1.0, clip=clip)
        steps = torch.stack(snapshots).diff(dim=0).norm(dim=1)
        return steps, [record["gradient_norm"] for record in train_records(history_of, tmp_path / str(clip))]

    steps, norms = steps_and_norms(0.05)
    assert min(norms) > 0.1
    assert steps.tolist() == pytest.approx([0.05] * 3, rel=1e-3)
    steps, norms = steps_and_norms(0.0)
    assert steps.tolist() == pytest.approx(norms, rel=1e-3)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_follows_the_schedule(pretrain, tmp_path, history_of, snapshots, schedule):
    settings = {"warmup": 0.4, "schedule": schedule, "learning_rate": 0.01, "log_every": 1}
    pretrain(tmp_path / "run", steps=10, **settings)
    rates = [record["learning_rate"] for record in train_records(history_of, tmp_path / "run")]
    assert rates == [0.01 * learning_rate_factor(step / 10, 0.4, schedule) for step in range(10)]
    # The first step is at the foot of the warm-up.
    moved = torch.stack(snapshots).diff(dim=0).norm(dim=1)
    assert moved[0] == 0
    assert moved[1] > 0


# How long a run lasts


@pytest.mark.parametrize("epochs", [0.5, 1.0, 2.5])
def test_passes_over_the_data(pretrain, tmp_path, epochs):
    results = pretrain(tmp_path / "run", epochs=epochs, evaluate_every=0)
    steps = round(results["data"]["examples"] / 12 - 0.5)  # of the first epoch
    done = results["epoch"] + results["step_in_epoch"] / steps
    assert done == pytest.approx(epochs, abs=1 / steps)
    assert done >= epochs


@pytest.fixture
def clock(monkeypatch):
    """A clock that shows one second more each time it is read."""
    clock = SimpleNamespace(seconds=0.0)

    def read() -> float:
        clock.seconds += 1
        return clock.seconds

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=read))
    return clock


def test_minutes_end_a_run_and_steer_its_learning_rate(pretrain, tmp_path, clock, history_of, caplog):
    with caplog.at_level(logging.INFO, logger="regard"):
        results = pretrain(tmp_path / "run", minutes=0.5, warmup=0.2, learning_rate=0.01, log_every=1)
    assert any("can't be repeated to the bit" in message for message in caplog.messages)
    assert 30 <= results["seconds"] < 40
    assert 5 < results["step"] < 40
    rates = [record["learning_rate"] for record in train_records(history_of, tmp_path / "run")]
    assert rates[0] < max(rates)
    assert rates[-1] < 0.2 * max(rates)


def test_only_minutes_cannot_be_repeated(pretrain, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="regard"):
        pretrain(tmp_path / "run", steps=1)
    assert not any("repeated" in message for message in caplog.messages)


def test_time_before_a_checkpoint_counts(pretrain, tmp_path, clock, monkeypatch):
    whole = Loop._step

    def until(self, *args):
        if self.progress.step == 6:
            raise KeyboardInterrupt
        return whole(self, *args)

    settings = {"minutes": 1.0, "save_every": 2, "evaluate_every": 0, "log_every": 100}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_step", until)
        with pytest.raises(KeyboardInterrupt):
            pretrain(tmp_path / "run", **settings)
    clock.seconds = 1e6  # another process, whose clock began elsewhere
    results = pretrain(tmp_path / "run", resume=True, **settings)
    straight = pretrain(tmp_path / "straight", **settings)
    assert 60 <= results["seconds"] < 65
    assert results["step"] == pytest.approx(straight["step"], abs=3)


def test_too_few_examples():
    assert steps_per_epoch(range(25), 12) == 2
    with pytest.raises(ValueError, match=r"makes 11 examples, fewer than one batch \(`batch_size` 12\)"):
        steps_per_epoch(range(11), 12)


# What the accelerator is asked for


def test_a_batch_that_cannot_be_shared_out(tmp_path):
    settings = BertSettings(batch_size=10, accumulation=4, log_with=["none"])
    with pytest.raises(ValueError, match=r"`batch_size` \(10\) must be a multiple of 4: 1 processes times"):
        make_accelerator(settings, tmp_path)


@pytest.mark.parametrize("trackers", [["nonsense"], ["tensorboard", "nonsense"]])
def test_an_unknown_tracker(tmp_path, trackers):
    with pytest.raises(ValueError, match="nonsense"):
        make_accelerator(BertSettings(log_with=trackers), tmp_path)


@pytest.mark.filterwarnings("ignore:.*no supported trackers")
@pytest.mark.parametrize("trackers", [["wandb"], ["tensorboard", "wandb"]])
def test_a_tracker_that_is_not_installed(tmp_path, trackers, monkeypatch):
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [LoggerType.TENSORBOARD])
    with pytest.raises(ValueError, match=r"`log_with` \('wandb'\) is a tracker that is not installed"):
        make_accelerator(BertSettings(log_with=trackers), tmp_path)


# Evaluation and records


def test_evaluation_is_of_all_that_is_held_out(pretrain, tmp_path, history_of):
    """However it is cut into batches, and with dropout off."""
    settings = {"steps": 1, "warmup": 1.0, "dropout": 0.5}  # at a rate of 0
    found = [pretrain(tmp_path / str(size), batch_size=size, **settings)["metrics"] for size in (1, 5, 7, 30)]
    assert found[0]["masked_loss"] > 0
    for metrics in found[1:]:
        assert metrics == pytest.approx(found[0], rel=1e-5)


def test_evaluation_of_some_batches(pretrain, tmp_path):
    settings = {"steps": 1, "warmup": 1.0, "batch_size": 4}
    whole = pretrain(tmp_path / "whole", **settings)
    part = pretrain(tmp_path / "part", evaluation_batches=2, **settings)
    more = pretrain(tmp_path / "more", evaluation_batches=1_000, **settings)
    assert part["metrics"] != whole["metrics"]
    # Two batches are 8 pairs.
    assert part["metrics"]["next_sentence_accuracy"] * 8 == round(part["metrics"]["next_sentence_accuracy"] * 8)
    assert more["metrics"] == whole["metrics"]


def test_what_is_recorded(pretrain, tmp_path, history_of):
    results = pretrain(tmp_path / "run", steps=6, log_every=2, evaluate_every=3)
    raw = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert [record["step"] for record in raw if record["kind"] == "train"] == [2, 4, 6]
    assert [record["step"] for record in raw if record["kind"] == "evaluation"] == [3, 6]
    assert all(record["tokens_per_second"] > 0 for record in raw if record["kind"] == "train")
    step, kind, metrics = history_of(tmp_path / "run")[-1]
    assert (step, kind, metrics) == (6, "evaluation", results["metrics"])
    assert all(math.isfinite(value) for _, _, values in history_of(tmp_path / "run") for value in values.values())


def test_the_logged_loss_is_the_mean_since_the_last(pretrain, tmp_path, history_of):
    pretrain(tmp_path / "each", steps=6, log_every=1)
    pretrain(tmp_path / "third", steps=6, log_every=3)
    each = [record["loss"] for record in train_records(history_of, tmp_path / "each")]
    third = [record["loss"] for record in train_records(history_of, tmp_path / "third")]
    assert third == pytest.approx([np.mean(each[:3]), np.mean(each[3:])])


def test_tensorboard_reads_the_log(pretrain, tmp_path, history_of):
    pretrain(tmp_path / "run", steps=4, log_every=2, evaluate_every=3, log_with=["tensorboard"])
    folder = next((tmp_path / "run" / "logs").rglob("events.out*")).parent
    events = EventAccumulator(str(folder)).Reload()
    logged = {
        (event.step, tag): event.value
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
        if not tag.endswith("tokens_per_second")
    }
    recorded = {
        (step, f"{kind}/{name}"): value
        for step, kind, values in history_of(tmp_path / "run")
        for name, value in values.items()
    }
    assert logged == pytest.approx(recorded, rel=1e-6)
    assert "train/tokens_per_second" in events.Tags()["scalars"]


def test_trackers_are_closed_however_a_run_ends(pretrain, tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr("accelerate.Accelerator.end_training", lambda self: ended.append(self.trackers))
    pretrain(tmp_path / "one", steps=1)
    monkeypatch.setattr(Loop, "_step", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pretrain(tmp_path / "other", steps=1, log_with=["tensorboard"])
    assert [len(trackers) for trackers in ended] == [0, 1]


def test_no_tracker_writes_nothing(pretrain, tmp_path):
    pretrain(tmp_path / "run", steps=2, log_every=1)
    assert not (tmp_path / "run" / "logs").exists()
    assert not list(tmp_path.rglob("events.out*"))


def test_the_progress_bar(pretrain, tmp_path, monkeypatch):
    """Where someone watches it tells the share done, the time left, the loss and the speed; elsewhere it is silent."""
    screen = io.StringIO()
    whole = loop.tqdm
    monkeypatch.setattr(loop, "tqdm", lambda **options: whole(file=screen, **options))
    pretrain(tmp_path / "silent", steps=2, log_every=1)
    assert screen.getvalue() == ""
    monkeypatch.setattr(loop, "tqdm", lambda **options: whole(**{**options, "file": screen, "disable": False}))
    pretrain(tmp_path / "watched", steps=4, log_every=1)
    frames = screen.getvalue().split("\r")
    assert re.fullmatch(r" 75% .* \d\d:\d\d < \d\d:\d\d.* step 4, loss \d\.\d{3}, [\d,]+ tokens/s *", frames[-2])
    assert frames[-1].startswith("100% ")


def test_tokens_are_counted_without_padding(pretrain, tmp_path, monkeypatch):
    seen = []
    whole = Loop._step

    def watched(self, batches, share):
        seen.append(sum(int(batch["cu_seq_lens_q"][-1]) for batch in batches))
        lengths = [length for batch in batches for length in batch["cu_seq_lens_q"].diff().tolist()]
        assert sum(lengths) < max(lengths) * len(lengths)
        return whole(self, batches, share)

    monkeypatch.setattr(Loop, "_step", watched)
    assert pretrain(tmp_path / "run", steps=3, accumulation=2)["tokens"] == sum(seen)
