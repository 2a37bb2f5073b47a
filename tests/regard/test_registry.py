"""A sixth family needs its own files and one entry in the registry: here the files are this one."""

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import transformers
from huggingface_hub import ModelCard
from huggingface_hub.dataclasses import strict

import regard
from regard.commands import app
from regard.commands.generate import generate_text
from regard.commands.inspect_faithfulness import held_out_rows
from regard.configuration.decoder import RegardDecoderConfig
from regard.families.decoder import FAMILY as DECODER
from regard.families.family import Family
from regard.families.registry import FAMILIES
from regard.loading import for_generation, for_prediction, for_steps, load_network
from regard.modeling.decoder import RegardDecoderForCausalLM, RegardDecoderModel
from regard.registration import register_family
from regard.sharing.export import export_model
from regard.sharing.hub import check_folder
from regard.training.families.decoder import DecoderRecipe, DecoderSettings
from regard.training.planning.plan import plan_training
from regard.training.run.settings import option


@strict
class RegardTinyConfig(RegardDecoderConfig):
    model_type: ClassVar[str] = "regard_tiny"


class RegardTinyModel(RegardDecoderModel):
    config_class = RegardTinyConfig


class RegardTinyForCausalLM(RegardDecoderForCausalLM):
    config_class = RegardTinyConfig


@dataclass
class TinySettings(DecoderSettings):
    planned: ClassVar[tuple[str, ...]] = (*DecoderSettings.planned, "loudness")

    loudness: float = option(0.5, "How loud the family is.")


class TinyRecipe(DecoderRecipe):
    name = "tiny"

    def make_model(self, settings, processor=None):
        return RegardTinyForCausalLM(
            RegardTinyConfig(**self.make_config(settings, processor).to_diff_dict() | {"model_type": "regard_tiny"})
        )

    def load_model(self, settings, path):
        return RegardTinyForCausalLM.from_pretrained(path, use_safetensors=True)


TINY = Family(
    name="tiny",
    help="Train a tiny model: as small as can be.",
    config=RegardTinyConfig,
    models={"AutoModel": RegardTinyModel, "AutoModelForCausalLM": RegardTinyForCausalLM},
    settings=TinySettings,
    recipe=TinyRecipe(),
    card=DECODER.card._replace(title="Tiny"),
)


@pytest.fixture(scope="module")
def registered():
    """The sixth family, registered; all that registering changes is put back."""
    with pytest.MonkeyPatch.context() as patch:
        mappings = [transformers.AutoModel._model_mapping, transformers.AutoModelForCausalLM._model_mapping]
        for mapping in (transformers.CONFIG_MAPPING, *mappings):
            patch.setattr(mapping, "_extra_content", dict(mapping._extra_content))
        for group in (app.train_app, app.plan_app):
            patch.setattr(group, "registered_commands", list(group.registered_commands))
        patch.setitem(FAMILIES, "tiny", TINY)
        register_family(TINY)
        app.add_family(TINY)
        yield TINY


@pytest.fixture(scope="module")
def run(registered, tiny_decoder, tmp_path_factory):
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("sixth") / "run"
    regard.train_tiny(folder, {**tiny_decoder, "steps": 2})
    return folder


def test_the_command_line_knows_it(registered, command, flags, tiny_decoder, tmp_path):
    assert "tiny         Train a tiny model\n" in command("train", "--help").out
    assert "Plan a run of `regard train tiny`" in command("plan", "--help").out
    for group in ("train", "plan"):
        text = " ".join(command(group, "tiny", "--help").out.split())
        assert "--loudness <float> How loud the family is. [default: 0.5]" in text
    line = flags(tiny_decoder, steps=2, loudness=0.25)
    ended = command("train", "tiny", *line, "--output", tmp_path / "run")
    assert ended.code == 0, ended.err
    assert "Trained for 2 steps" in ended.out
    assert "transformers.AutoModelForCausalLM.from_pretrained" in ended.out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["family"], results["settings"]["loudness"]) == ("tiny", 0.25)


def test_the_auto_classes_know_it(run):
    assert type(transformers.AutoConfig.from_pretrained(run / "model")) is RegardTinyConfig
    assert type(transformers.AutoModel.from_pretrained(run / "model")) is RegardTinyModel
    assert type(transformers.AutoModelForCausalLM.from_pretrained(run / "model")) is RegardTinyForCausalLM


def test_the_package_has_its_names(registered):
    assert regard.RegardTinyConfig is RegardTinyConfig
    assert regard.RegardTinyForCausalLM is RegardTinyForCausalLM
    assert {"RegardTinyModel", "train_tiny"} <= set(dir(regard))
    with pytest.raises(AttributeError, match="no attribute 'train_large'"):
        _ = regard.train_large


def test_it_has_a_card(run):
    card = ModelCard.load(run / "model" / "README.md")
    assert card.data.tags == ["regard", "regard_tiny"]
    assert card.data.pipeline_tag == "text-generation"
    assert "\n# Tiny\n" in card.text
    assert "perplexity per token" in card.text


def test_it_is_planned(run):
    made = plan_training("tiny", {"config": {"hidden_size": 16, "num_attention_heads": 2}, "max_length": 8})
    assert (made.family, made.architecture) == ("tiny", "RegardTinyForCausalLM")
    batch, tokens = TINY.recipe.synthetic_batch(TinySettings(max_length=8), RegardTinyConfig(vocab_size=50), 3)
    assert batch["input_ids"].shape == (3, 8)
    assert tokens == 24


def test_it_generates_and_is_evaluated(run, command):
    assert generate_text("The river", run, seed=0, max_new_tokens=3).startswith("The river")
    results = json.loads((run / "results.json").read_text())
    assert regard.evaluate_model(run)["metrics"] == pytest.approx(results["metrics"], rel=1e-6)


def test_it_is_looked_into(run, command, corpus_folder):
    for choose in (for_generation, for_prediction, for_steps):
        network, _ = load_network(run, choose)
        assert type(network) is RegardTinyForCausalLM
    assert held_out_rows(run, None, network).num_rows == 2
    assert held_out_rows(run / "model", corpus_folder, network).num_rows == 10
    assert command("inspect", "causality", run, "--text", "the river").code == 0


def test_it_is_shared(run, tmp_path):
    assert check_folder(run / "model") == "regard_tiny"
    with pytest.raises(ValueError, match="is a regard_tiny, which has no stock architecture"):
        export_model(run / "model", tmp_path / "stock")
