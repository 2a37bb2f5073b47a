"""`regard inspect shapes`, `calculation`, `causality`, `order` and `heads`, from the command line."""

import re

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer, ResNetConfig

from regard.inspection.steps.trace import format_trace, trace_shapes
from regard.inspection.steps.worked_example import worked_calculation
from regard.tokenization.processor import make_captioner_processor
from regard.tokenization.words import train_words


@pytest.fixture(scope="session")
def captioner(tmp_path_factory):
    """An untrained captioner with its processor, and an image."""
    from regard import RegardCaptionerConfig, RegardCaptionerForConditionalGeneration

    folder = tmp_path_factory.mktemp("captioner")
    tokenizer = train_words(["a picture of snow", "a picture of noise"], model_max_length=8)
    processor = make_captioner_processor(tokenizer, image_size=32)
    backbone = ResNetConfig(embedding_size=4, hidden_sizes=[6], depths=[1], layer_type="basic")
    config = RegardCaptionerConfig(vocab_size=len(tokenizer), hidden_size=16, backbone_config=backbone)
    RegardCaptionerForConditionalGeneration(config).save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    pixels = np.random.default_rng(0).integers(256, size=(32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "image.png")
    return folder


def test_the_shapes_are_those_of_the_trace(command, decoder_folder):
    ended = command("inspect", "shapes", decoder_folder, "--text", "the river near the house")
    assert ended.code == 0, ended.err
    model = AutoModelForCausalLM.from_pretrained(decoder_folder / "model")
    inputs = AutoTokenizer.from_pretrained(decoder_folder / "model")("the river near the house", return_tensors="pt")
    (trace,) = trace_shapes(model, inputs)
    assert format_trace(trace) in ended.out
    first, *_ = ended.out.splitlines()
    # What a text hides, or would do to a terminal, is told and not done.
    shown = command("inspect", "shapes", decoder_folder, "--text", "a\tb\x1b[2J").out.splitlines()[0]
    assert "⇥" in shown
    assert "⟨001B⟩" in shown
    assert first.startswith("input_ids: ")
    assert first.count("|") == inputs["input_ids"].shape[1] - 1


def test_shapes_of_each_family(command, run_folder, trained, captioner):
    listed = command("inspect", "--help").out
    assert all(f"  {name} " in listed for name in ("shapes", "calculation", "causality", "order", "heads"))
    out = command("inspect", "shapes", run_folder).out
    assert "encoder.blocks.0.self_attention: self-attention" in out
    out = command("inspect", "shapes", trained("transformer"), "--text", "fish bank", "--target", "FISH").out
    kinds = re.findall(r"^\S+: ((?:self|cross)-attention)$", out, flags=re.MULTILINE)
    assert kinds == ["self-attention", "self-attention", "cross-attention"]
    assert "decoder_input_ids: " in out
    out = command("inspect", "shapes", trained("recurrent"), "--text", "fish bank", "--target", "FISH").out
    assert "AdditiveAlignment" in out
    steps = int(re.search(r"the first of (\d+) decoder steps", out)[1])
    assert steps == next(line for line in out.splitlines() if line.startswith("decoder_")).count("|") + 1
    # Without a target the model's own words are shown.
    assert "AdditiveAlignment" in command("inspect", "shapes", trained("recurrent"), "--text", "fish bank").out
    out = command("inspect", "shapes", captioner, "--image", captioner / "image.png", "--target", "a picture").out
    assert "spatial attention, AdditiveAlignment" in out
    assert "feature map" in out


def test_a_calculation(command):
    ended = command("inspect", "calculation", "--query", "1 0", "--keys", "1 0; 0 1", "--values", "2 0; 0 5")
    worked = worked_calculation([1, 0], [[1, 0], [0, 1]], [[2, 0], [0, 5]])
    assert ended.out == "\n".join(worked.lines) + "\n"
    given = ("--query", "1 2", "--keys", "1 0; 0 1", "--alignment", "additive")
    parameters = ("--query-matrix", "1 0", "--key-matrix", "0 1", "--vector", "-2")
    # tanh(1 + 0) · -2 and tanh(1 + 1) · -2
    out = command("inspect", "calculation", *given, *parameters).out
    assert "  v · tanh(W q + U k2) = (-2)·0.96403 = -1.9281" in out.splitlines()
    out = command("inspect", "calculation", *given[:4], "--alignment", "bilinear", "--matrix", "0 1; 1 0").out
    assert "  q · W k1 = 1·0 + 2·1 = 2" in out.splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--query", "1 x", "--keys", "1 0"), "`query` ('1 x') holds 'x', which is not a number"),
        (("--query", "1 0", "--keys", "1 0; 1"), "`keys` has rows of 1 and of 2 numbers: they must be equally long"),
        (("--query", "1 inf", "--keys", "1 0"), "`query` ([1.0, inf]) must hold finite numbers, at least one"),
        (
            ("--query", "1 0", "--keys", "1 0", "--alignment", "bilinear"),
            "`matrix` is missing: the alignment 'bilinear' needs it",
        ),
    ],
)
def test_a_calculation_that_cannot_be(refusal, arguments, message):
    assert refusal("inspect", "calculation", *arguments) == f"regard: {message}"


def test_causality(command, decoder_folder, run_folder, trained, captioner):
    out = command("inspect", "causality", decoder_folder, "--text", "the river near the house").out
    assert out.endswith("No output depends on a later token: all those gradients are exactly 0.\n")
    rows = [line.split() for line in out.splitlines()[1:-1]]
    assert all(float(row[-1]) == 0 < float(row[-2]) for row in rows)
    out = command("inspect", "causality", run_folder, "--text", "the river near the house").out
    assert re.search(r"Outputs depend on later tokens, by up to \S+: no mask hides the future\.\n$", out)
    for family in ("transformer", "recurrent"):
        assert "exactly 0" in command("inspect", "causality", trained(family), "--text", "a b", "--target", "A B").out
    image = ("--image", captioner / "image.png", "--target", "a picture")
    assert "exactly 0" in command("inspect", "causality", captioner, *image).out


def test_order(command, decoder_folder, run_folder, trained):
    text = ("--text", "the river near a stone house")
    for folder, verdict in (
        (run_folder, "makes no difference but for rounding"),
        (trained("transformer"), "makes no difference but for rounding"),
        (decoder_folder, "the causal mask tells it too"),
    ):
        out = command("inspect", "order", folder, *text).out
        assert verdict in out.splitlines()[-1]
        shown, permuted = (line[len("permuted: ") :].split(" | ") for line in out.splitlines()[:2])
        assert sorted(shown) == sorted(permuted)
        assert shown != permuted
    orders = [command("inspect", "order", run_folder, *text, "--seed", seed).out.splitlines()[1] for seed in range(2)]
    assert orders[0] != orders[1]


def test_heads(command, run_folder, corpus_folder, tmp_path):
    picture = tmp_path / "heads.png"
    ended = command("inspect", "heads", run_folder, "--text", "the river", "--text", "a house", "--output", picture)
    assert ended.code == 0, ended.err
    first, header, *rows, last = ended.out.splitlines()
    assert first.startswith("2 texts, ")
    assert header.split() == ["layer", "head", "mean", "distance", "most", "weight", "at"]
    assert [row.split()[:2] for row in rows] == [["0", "0"], ["0", "1"]]
    assert last == f"Drawn in {picture}"
    assert Image.open(picture).size
    options = ("--data", corpus_folder, "--documents", "3", "--output", picture)
    assert command("inspect", "heads", run_folder, *options).out.startswith("3 texts, ")


def test_what_is_refused(refusal, decoder_folder, run_folder, trained, captioner, tmp_path):
    assert "no folder here" in refusal("inspect", "shapes", "nowhere/at-all")
    assert "`layer` (5) must be at least 0 and less than 1" in refusal(
        "inspect", "shapes", decoder_folder, "--layer", "5"
    )
    assert "`text` is empty" in refusal("inspect", "shapes", decoder_folder, "--text", " ")
    assert "`target` is empty" in refusal("inspect", "shapes", trained("recurrent"), "--target", "")
    assert "`target` is given" in refusal("inspect", "causality", run_folder, "--target", "x")
    assert "must be left out" in refusal("inspect", "shapes", run_folder, "--image", captioner / "image.png")
    assert "must be the file of an image" in refusal("inspect", "shapes", captioner)
    assert "there is no such file" in refusal("inspect", "shapes", captioner, "--image", tmp_path / "none.png")
    assert "which reads no text" in refusal("inspect", "order", captioner)
    assert "no position embeddings" in refusal("inspect", "order", trained("recurrent"))
    for folder in (trained("recurrent"), captioner):
        assert "has no self-attention" in refusal("inspect", "heads", folder, "--text", "x")
    heads = ("inspect", "heads", run_folder, "--output", tmp_path / "heads.png", "--text")
    assert "`text` is empty" in refusal(*heads, "the river", "--text", " ")
    assert "is no text: it holds bytes that are not UTF-8" in refusal(*heads, "\udcff")
    seed = "`seed` (4294967296) must be at least 0 and less than 2**32"
    assert seed in refusal("inspect", "order", run_folder, "--seed", str(2**32))
    long = "river " * 99
    assert "> 32" in refusal("inspect", "shapes", run_folder, "--text", long)


def test_what_is_generated_takes_part_in_gradients(command, trained):
    # Tensors of inference mode would not.
    assert torch.is_grad_enabled()
    assert "exactly 0" in command("inspect", "causality", trained("transformer"), "--text", "fish bank").out
