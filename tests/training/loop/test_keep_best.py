"""The checkpoint of the best evaluation is kept, and its model is the final one."""

import logging

import pytest
import torch
from safetensors.torch import load_file

from regard.training.families.bert import BertObjective, BertSettings
from regard.training.loop.loop import Loop
from regard.training.loop.run_keeper import Keeper
from regard.training.run.checkpoints import list_checkpoints
from tests.support.thorough import slow_except

SETTINGS = {
    "steps": 9,
    "save_every": 3,
    "keep_last": 1,
    "evaluate_every": 2,
    "log_every": 1,
    "dropout": 0.2,
    "keep_best": True,
}


class Killed(BaseException):
    """What no code catches."""


@pytest.fixture
def losses_are(monkeypatch):
    """Sets what evaluations find, by step; at other steps it is 9."""
    now = {}
    whole, metrics = Loop.evaluate, BertObjective.metrics

    def evaluate(self):
        now["step"] = self.progress.step
        return whole(self)

    def set_to(**losses: float) -> None:
        def found(self, sums):
            return metrics(self, sums) | {"masked_loss": losses.get(f"at_{now['step']}", 9.0)}

        monkeypatch.setattr(Loop, "evaluate", evaluate)
        monkeypatch.setattr(BertObjective, "metrics", found)

    return set_to


@pytest.fixture
def weights_at(monkeypatch):
    """The weights after each step."""
    taken = {}
    whole = Loop._step

    def watched(self, *args):
        result = whole(self, *args)
        taken[self.progress.step] = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        return result

    monkeypatch.setattr(Loop, "_step", watched)
    return taken


def names_of(folder) -> list[str]:
    return [path.name for path in list_checkpoints(folder / "checkpoints")]


def same(folder, weights: dict) -> bool:
    model = load_file(folder / "model" / "model.safetensors")
    return torch.equal(model["bert.embeddings.word_embeddings.weight"], weights["bert.embeddings.tokens.weight"])


def test_the_best_is_kept_beside_the_last_and_is_the_final_model(pretrain, tmp_path, losses_are, weights_at, caplog):
    losses_are(at_2=5.0, at_4=3.0, at_6=3.0, at_8=4.0)
    with caplog.at_level(logging.INFO, logger="regard"):
        results = pretrain(tmp_path / "run", **SETTINGS)
    # Of equals the first.
    assert (results["best_step"], results["best_loss"], results["step"]) == (4, 3.0, 9)
    assert names_of(tmp_path / "run") == ["step-4", "step-9"]
    assert same(tmp_path / "run", weights_at[4])
    assert not same(tmp_path / "run", weights_at[9])
    assert any("best evaluation was that at step 4" in message for message in caplog.messages)


def test_without_it_the_last_is(pretrain, tmp_path, losses_are, weights_at):
    losses_are(at_2=5.0, at_4=3.0)
    results = pretrain(tmp_path / "run", **{**SETTINGS, "keep_best": False})
    assert (results["best_step"], results["best_loss"]) == (None, None)
    assert names_of(tmp_path / "run") == ["step-9"]
    assert same(tmp_path / "run", weights_at[9])


def test_the_last_evaluation_counts(pretrain, tmp_path, losses_are, weights_at):
    losses_are(at_2=5.0, at_9=2.0)
    results = pretrain(tmp_path / "run", **SETTINGS)
    assert (results["best_step"], results["metrics"]["masked_loss"]) == (9, 2.0)
    assert same(tmp_path / "run", weights_at[9])


def test_the_figures_are_those_of_the_best(pretrain, tmp_path, monkeypatch, history_of):
    """Here the loss rises by itself: the rate is far too high."""
    settings = {**SETTINGS, "learning_rate": 0.5, "warmup": 0.0, "schedule": "constant"}
    results = pretrain(tmp_path / "run", **settings)
    evaluations = {step: values for step, kind, values in history_of(tmp_path / "run") if kind == "evaluation"}
    best = min(evaluations, key=lambda step: evaluations[step]["masked_loss"])
    assert best < 9
    assert results["best_step"] == best
    assert results["metrics"] == evaluations[best]
    assert results["best_loss"] == results["metrics"]["masked_loss"]


RISING = {**SETTINGS, "learning_rate": 0.5, "warmup": 0.0, "schedule": "constant"}


@pytest.fixture(scope="module")
def straight(pretrain, tmp_path_factory):
    """A run that nothing disturbs: its folder and results."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, pretrain(folder, **RISING)


@pytest.mark.parametrize("step", slow_except([2, 5, 6], range(1, 10)))
def test_it_is_the_same_after_a_resumption(pretrain, straight, tmp_path, step, weights_of):
    with pytest.MonkeyPatch.context() as patch:
        whole = Loop._step

        def until(self, *args):
            result = whole(self, *args)
            if self.progress.step == step:
                raise Killed
            return result

        patch.setattr(Loop, "_step", until)
        with pytest.raises(Killed):
            pretrain(tmp_path / "run", **RISING)
    results = pretrain(tmp_path / "run", resume=True, **RISING)
    folder, whole_results = straight
    assert {**results, "seconds": 0} == {**whole_results, "seconds": 0}
    weights, expected = weights_of(tmp_path / "run"), weights_of(folder)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert names_of(tmp_path / "run") == names_of(folder)


def test_a_best_checkpoint_that_is_damaged(pretrain, tmp_path, losses_are, weights_at, caplog):
    losses_are(at_4=3.0)
    with pytest.MonkeyPatch.context() as patch:
        whole = Keeper.load_best

        def damaged(self):
            (self.checkpoints / "step-4" / "model.safetensors").write_bytes(b"")
            return whole(self)

        patch.setattr(Keeper, "load_best", damaged)
        results = pretrain(tmp_path / "run", **SETTINGS)
    assert results["best_step"] is None
    assert same(tmp_path / "run", weights_at[9])
    assert "There is no whole checkpoint of step 4" in caplog.text


def test_an_evaluation_that_is_not_finite_is_never_the_best(pretrain, tmp_path, losses_are):
    losses_are(at_2=float("nan"), at_4=float("-inf"), at_6=8.0)
    assert pretrain(tmp_path / "run", **SETTINGS)["best_step"] == 6


def test_it_needs_evaluations():
    with pytest.raises(ValueError, match=r"`keep_best` needs evaluations .* `evaluate_every` must be more than 0"):
        BertSettings(keep_best=True, evaluate_every=0)
