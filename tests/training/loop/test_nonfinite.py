"""Losses and gradients that are not finite change no weights, and end the run unless they may be skipped."""

import json
import logging
import math

import pytest
import torch
from safetensors.torch import load_file

from regard.training.families.bert import BertObjective
from regard.training.loop.loop import Loop
from regard.training.loop.nonfinite import Place, StepWatch, nonfinite_weights
from regard.training.run.checkpoints import list_checkpoints
from regard.training.run.folder import load_results

SETTINGS = {"steps": 7, "save_every": 2, "evaluate_every": 0, "log_every": 3, "dropout": 0.2}


class Killed(BaseException):
    """What no code catches."""


def of_the_loss(model, loss):
    return loss * math.nan


def of_the_gradient(model, loss):
    # A root of zero: its slope is infinite, and zero times that is no number.
    return loss + (next(model.parameters()).flatten()[0] * 0).sqrt()


@pytest.fixture
def make_nonfinite(monkeypatch):
    """Spoils the given steps."""

    def spoil(steps, how=of_the_loss) -> None:
        now = [0]
        step, forward = Loop._step, BertObjective.forward

        def counted(self, *args):
            now[0] = self.progress.step + 1
            return step(self, *args)

        def spoilt(self, model, batch, **counts):
            output = forward(self, model, batch, **counts)
            if model.training and now[0] in steps:
                output.loss = how(model, output.loss)
            return output

        monkeypatch.setattr(Loop, "_step", counted)
        monkeypatch.setattr(BertObjective, "forward", spoilt)

    return spoil


@pytest.fixture
def states(monkeypatch):
    """Weights and optimizer state after each step."""
    taken = {}
    whole = Loop._step

    def watched(self, *args):
        result = whole(self, *args)
        weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        for state in self.optimizer.state.values():
            weights += [value.clone() for value in state.values()]
        taken[self.progress.step] = weights
        return result

    monkeypatch.setattr(Loop, "_step", watched)
    return taken


def same(one: list, other: list) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("how", [of_the_loss, of_the_gradient])
def test_it_ends_the_run_at_the_next_look(pretrain, tmp_path, make_nonfinite, states, how, accumulation, history_of):
    make_nonfinite([4], how)
    told = r"not finite at step 4 \(epoch 1, examples 0 to 11\): the last checkpoint is .*step-2\. .*`skip_nonfinite`"
    with pytest.raises(FloatingPointError, match=told):
        pretrain(tmp_path / "run", accumulation=accumulation, **SETTINGS)
    assert same(states[3], states[4])
    assert not same(states[2], states[3])
    # The save at the same step looks first.
    assert max(states) == 4
    checkpoints = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in checkpoints] == ["step-2"]
    assert not (tmp_path / "run" / "model").exists()


def test_what_is_saved_and_recorded_is_finite(pretrain, tmp_path, make_nonfinite):
    make_nonfinite([5, 6, 7])
    with pytest.raises(FloatingPointError, match=r"the last checkpoint is .*step-4"):
        pretrain(tmp_path / "run", **SETTINGS)
    for checkpoint in list_checkpoints(tmp_path / "run" / "checkpoints"):
        assert all(tensor.isfinite().all() for tensor in load_file(checkpoint / "model.safetensors").values())
    make_nonfinite([1])
    with pytest.raises(FloatingPointError, match="there is no checkpoint"):
        pretrain(tmp_path / "first", **SETTINGS)


@pytest.mark.parametrize("how", [of_the_loss, of_the_gradient])
def test_some_steps_may_be_skipped(pretrain, tmp_path, make_nonfinite, states, how, history_of, caplog):
    make_nonfinite([1, 4], how)
    results = pretrain(tmp_path / "run", skip_nonfinite=2, **SETTINGS)
    assert (results["step"], results["skipped_steps"]) == (7, 2)
    assert same(states[3], states[4])
    assert not same(states[4], states[5])
    records = history_of(tmp_path / "run")
    assert [values for _, kind, values in records if kind == "skipped"] == [
        {"epoch": 0, "first_example": 0, "last_example": 11},
        {"epoch": 1, "first_example": 0, "last_example": 11},
    ]
    assert [step for step, kind, _ in records if kind == "skipped"] == [1, 4]
    # The mean of the losses is of those that are.
    assert [math.isfinite(values["loss"]) for _, kind, values in records if kind == "train"] == [True, True]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [message.startswith("The loss or its gradient was not finite at step") for message in warned] == [True] * 2


def test_it_ends_the_run_before_an_evaluation(pretrain, tmp_path, make_nonfinite, history_of):
    make_nonfinite([1])
    with pytest.raises(FloatingPointError, match="not finite at step 1 "):
        pretrain(tmp_path / "run", **{**SETTINGS, "save_every": 0, "evaluate_every": 2, "log_every": 9})
    assert history_of(tmp_path / "run") == []


def test_one_more_ends_it(pretrain, tmp_path, make_nonfinite):
    make_nonfinite([1, 4, 6])
    with pytest.raises(FloatingPointError, match=r"not finite at step 6 \(.*\): the 3 such steps are more than"):
        pretrain(tmp_path / "run", skip_nonfinite=2, **SETTINGS)


def test_skipped_steps_are_counted_over_a_resumption(pretrain, tmp_path, make_nonfinite, weights_of, history_of):
    make_nonfinite([1, 4])
    straight = pretrain(tmp_path / "straight", skip_nonfinite=2, **SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        whole = Loop._step

        def until(self, *args):
            if self.progress.step == 3:
                raise Killed
            return whole(self, *args)

        patch.setattr(Loop, "_step", until)
        with pytest.raises(Killed):
            pretrain(tmp_path / "run", skip_nonfinite=2, **SETTINGS)
    results = pretrain(tmp_path / "run", resume=True, skip_nonfinite=2, **SETTINGS)
    assert results["skipped_steps"] == straight["skipped_steps"] == 2
    weights, expected = weights_of(tmp_path / "run"), weights_of(tmp_path / "straight")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    skipped = [
        [record for record in history_of(tmp_path / name) if record[1] == "skipped"] for name in ("run", "straight")
    ]
    assert skipped[0] == skipped[1]


def test_nothing_else_changes(pretrain, tmp_path, weights_of):
    pretrain(tmp_path / "none", **SETTINGS)
    pretrain(tmp_path / "some", skip_nonfinite=3, **SETTINGS)
    weights, expected = weights_of(tmp_path / "some"), weights_of(tmp_path / "none")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_weights_that_are_not_finite_are_not_saved(pretrain, tmp_path, monkeypatch):
    """A finite gradient can lead to them."""
    whole = Loop._step

    def overflowing(self, *args):
        result = whole(self, *args)
        if self.progress.step == 4:
            next(self.model.parameters()).data.view(-1)[3] = math.inf
        return result

    monkeypatch.setattr(Loop, "_step", overflowing)
    with pytest.raises(
        FloatingPointError, match=r"weights are not finite after step 4: the last checkpoint is .*step-2"
    ):
        pretrain(tmp_path / "run", **SETTINGS)
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-2"]
    with pytest.raises(FloatingPointError, match="weights are not finite"):
        pretrain(tmp_path / "other", **{**SETTINGS, "save_every": 0, "steps": 4})
    assert not (tmp_path / "other" / "model").exists()


def test_evaluations_that_are_not_finite(pretrain, tmp_path, monkeypatch, caplog, history_of):
    """They are told of; what is written is JSON all the same."""
    whole = BertObjective.metrics
    monkeypatch.setattr(BertObjective, "metrics", lambda self, sums: whole(self, sums) | {"masked_loss": math.inf})
    results = pretrain(tmp_path / "run", **{**SETTINGS, "steps": 2})
    assert results["metrics"]["masked_loss"] == math.inf
    assert "The held-out loss at step 2 is not finite." in caplog.messages

    def refuse(constant):
        raise AssertionError(constant)

    written = json.loads((tmp_path / "run" / "results.json").read_text(), parse_constant=refuse)
    assert written["metrics"]["masked_loss"] is None
    lines = (tmp_path / "run" / "history.jsonl").read_text().splitlines()
    assert json.loads(lines[-1], parse_constant=refuse)["masked_loss"] is None
    # As a number, a card can write it.
    assert math.isnan(load_results(tmp_path / "run")["metrics"]["masked_loss"])


def test_a_watch_looks_once():
    watch = StepWatch()
    assert watch.skipped_steps() == []
    places = [Place(step, 0, 0, 1) for step in range(1, 4)]
    for place, skipped in zip(places, [True, False, True], strict=True):
        watch.note(place, torch.tensor(skipped))
    assert watch.skipped_steps() == [places[0], places[2]]
    assert watch.skipped_steps() == []


def test_weights_are_looked_through():
    model = torch.nn.Linear(3, 2)
    assert nonfinite_weights(model) == 0
    model.bias.data[1] = math.nan
    model.weight.data[0, 2] = -math.inf
    assert nonfinite_weights(model) == 2
