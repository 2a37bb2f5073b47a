"""What a trace holds is what the model computed: compared with a computation of its own from the weights."""

import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

import regard
from regard.inspection.steps.trace import LETTERS, format_trace, trace_shapes
from regard.modeling import attention
from regard.modeling.attention import MultiHeadAttention

LENGTHS, TARGET_LENGTHS = (7, 4), (5, 3)
BACKBONE = {"model_type": "resnet", "embedding_size": 4, "hidden_sizes": [6], "depths": [1], "layer_type": "basic"}
BACKBONE |= {"out_features": ["stage1"]}
SMALL = {"num_attention_heads": 3, "intermediate_size": 20, "max_position_embeddings": 16}


def padded(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    real = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    return torch.randint(5, 40, real.shape).masked_fill(~real, 0), real.long()


def make(family: str, **fields) -> tuple:
    """A small model with random weights, not in evaluation, and padded inputs."""
    ids, mask = padded(LENGTHS)
    source = {"input_ids": ids, "attention_mask": mask}
    targets, target_mask = padded(TARGET_LENGTHS)
    target = {"decoder_input_ids": targets, "decoder_attention_mask": target_mask}
    if family == "bert":
        config = regard.RegardBertConfig(vocab_size=40, hidden_size=15, num_hidden_layers=2, **SMALL, **fields)
        model, inputs = regard.RegardBertForMaskedLM(config), source
    elif family == "decoder":
        config = regard.RegardDecoderConfig(vocab_size=40, hidden_size=15, num_hidden_layers=2, **SMALL, **fields)
        model, inputs = regard.RegardDecoderForCausalLM(config), source
    elif family == "transformer":
        sizes = {"hidden_size": 18, "num_hidden_layers": 1, "num_decoder_layers": 2}
        config = regard.RegardTransformerConfig(vocab_size=40, **sizes, **SMALL, **fields)
        model, inputs = regard.RegardTransformerForConditionalGeneration(config), source | target
    elif family == "recurrent":
        config = regard.RegardRecurrentConfig(vocab_size=40, hidden_size=14, num_hidden_layers=2, **fields)
        model, inputs = regard.RegardRecurrentForConditionalGeneration(config), source | target
    else:
        config = regard.RegardCaptionerConfig(
            vocab_size=40, hidden_size=12, backbone_config=BACKBONE, **SMALL, **fields
        )
        model = regard.RegardCaptionerForConditionalGeneration(config)
        inputs = {"pixel_values": torch.randn(2, 3, 20, 28), **target}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.train(), inputs


def expected_mask(layer: MultiHeadAttention, keys: torch.Tensor | None, queries: int, length: int) -> torch.Tensor:
    """Which keys a query may see, (B, 1, Q, K)."""
    seen = torch.ones(2, 1, queries, length, dtype=torch.bool)
    if keys is not None:
        seen &= keys.bool()[:, None, None, :]
    if layer.is_causal:
        seen &= torch.arange(length) <= torch.arange(queries)[:, None]
    return seen


def by_hand(layer: MultiHeadAttention, given: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> dict:
    """Every step from the layer's weights, with explicit sums; in float64."""
    width, heads = layer.output.in_features, layer.output.in_features // layer.head_dim
    if layer.is_cross_attention:
        weight = torch.cat([layer.query.weight, layer.key_value.weight]).double()
        bias = torch.cat([layer.query.bias, layer.key_value.bias]).double()
    else:
        weight, bias = layer.query_key_value.weight.double(), layer.query_key_value.bias.double()
    steps = {"input": given.double()}
    for place, (name, source) in enumerate((("query", given), ("key", memory), ("value", memory))):
        rows = slice(place * width, (place + 1) * width)
        steps[name] = torch.einsum("ble,oe->blo", source.double(), weight[rows]) + bias[rows]
        columns = [steps[name][..., head * width // heads : (head + 1) * width // heads] for head in range(heads)]
        steps[f"{name} heads"] = torch.stack(columns, dim=1)
    steps["scores"] = torch.einsum("bhqd,bhkd->bhqk", steps["query heads"], steps["key heads"])
    steps["scaled"] = steps["scores"] / math.sqrt(width / heads)
    powers = steps["scaled"].exp() * mask
    steps["weights"] = powers / powers.sum(-1, keepdim=True)
    steps["context"] = torch.einsum("bhqk,bhkd->bhqd", steps["weights"], steps["value heads"])
    steps["merged"] = torch.cat([steps["context"][:, head] for head in range(heads)], dim=-1)
    steps["output"] = steps["merged"] @ layer.output.weight.double().T + layer.output.bias.double()
    return steps


def compare(trace, expected: dict, mask: torch.Tensor) -> None:
    for name, value in expected.items():
        assert_close(trace[name].double(), value, atol=2e-5, rtol=2e-5, msg=lambda text, name=name: f"{name}: {text}")
    mask = mask.expand_as(trace["weights"])
    lowest = torch.finfo(torch.float32).min
    assert torch.equal(trace["masked"] == lowest, ~mask)
    scored = expected.get("scaled", expected["scores"])
    assert_close(trace["masked"][mask].double(), scored[mask], atol=2e-5, rtol=2e-5)
    assert bool((trace["weights"][~mask] == 0).all())
    assert_close(trace["weights"].sum(-1), torch.ones(trace["weights"].shape[:-1]))


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("family", ["bert", "decoder", "transformer"])
def test_each_step_of_multi_head_attention(family, layer, kernel):
    model, inputs = make(family)
    model.set_attn_implementation(kernel)
    traces = trace_shapes(model, inputs, layer)
    kinds = {
        ("transformer", 0): ["self-attention", "self-attention", "cross-attention"],
        ("transformer", 1): ["self-attention", "cross-attention"],
    }
    assert [trace.kind for trace in traces] == kinds.get((family, layer), ["self-attention"])
    outputs = model.eval()(**inputs, output_attentions=True, output_hidden_states=True)
    for trace in traces:
        module = model.get_submodule(trace.layer)
        assert module.layer_idx == layer
        decoding = family == "transformer" and ".decoder." in trace.layer
        cross = trace.kind == "cross-attention"
        # What the model itself returns of its hidden states and weights.
        if family == "bert":
            assert torch.equal(trace["input"], outputs.hidden_states[layer])
        name = "cross_" if cross else "decoder_" if decoding else "encoder_" if family == "transformer" else ""
        assert torch.equal(trace["weights"], outputs[f"{name}attentions"][layer])
        memory = outputs.encoder_last_hidden_state if cross else trace["input"]
        if cross:
            assert torch.equal(trace["memory"], memory)
        real = inputs["decoder_attention_mask"] if decoding and not cross else inputs["attention_mask"]
        mask = expected_mask(module, real, trace["input"].shape[1], memory.shape[1])
        compare(trace, by_hand(module, trace["input"], memory, mask), mask)


def alignment_by_hand(alignment, query: torch.Tensor, states: torch.Tensor, mask: torch.Tensor) -> dict:
    weights = {name: value.double() for name, value in alignment.named_parameters()}
    query, states = query.double(), states.double()
    steps = {"query state": query, "states": states, "projected keys": states}
    name = type(alignment).__name__
    if name == "AdditiveAlignment":
        steps["projected keys"] = states @ weights["key.weight"].T
        steps["projected query"] = query @ weights["query.weight"].T + weights["query.bias"]
        keys = [torch.tanh(steps["projected query"][:, 0] + key) for key in steps["projected keys"].unbind(1)]
        steps["matched"] = torch.stack(keys, dim=1).unsqueeze(1)
        steps["scores"] = torch.einsum("bqka,a->bqk", steps["matched"], weights["score.weight"][0])
    else:
        if name == "BilinearAlignment":
            steps["projected keys"] = states @ weights["key.weight"].T
        steps["scores"] = torch.einsum("bqe,bke->bqk", query, steps["projected keys"])
    if name == "ScaledDotAlignment":
        steps["scaled"] = steps["scores"] / math.sqrt(query.shape[-1])
    powers = steps.get("scaled", steps["scores"]).exp() * mask
    steps["weights"] = powers / powers.sum(-1, keepdim=True)
    steps["context"] = torch.einsum("bqk,bkc->bqc", steps["weights"], states)
    return steps


@pytest.mark.parametrize("alignment", ["dot", "scaled_dot", "bilinear", "additive"])
@pytest.mark.parametrize("family", ["recurrent", "captioner"])
def test_each_step_of_an_alignment(family, alignment):
    model, inputs = make(family, alignment=alignment)
    traces = trace_shapes(model, inputs)
    model.eval()
    outputs = model(**inputs, output_attentions=True, output_hidden_states=True)
    assert [trace.call for trace in traces] == list(range(max(TARGET_LENGTHS)))
    for trace in traces:
        assert alignment.replace("_", "") in trace.kind.lower()
        # Where someone looks at its sums, additive alignment makes them, which rounds otherwise.
        equal = partial(torch.testing.assert_close, atol=1e-6 if alignment == "additive" else 0, rtol=0)
        equal(trace["weights"], outputs.cross_attentions[0][:, 0, trace.call : trace.call + 1])
        equal(trace["states"], outputs.encoder_last_hidden_state)
        if trace.call:
            # The state that the last step left.
            equal(trace["query state"][:, 0], outputs.decoder_hidden_states[-1][:, trace.call - 1])
        mask = torch.ones(2, 1, trace["states"].shape[1], dtype=torch.bool)
        if family == "recurrent":
            mask = inputs["attention_mask"].bool().unsqueeze(1)
        own = model.get_submodule(trace.layer).alignment
        compare(trace, alignment_by_hand(own, trace["query state"], trace["states"], mask), mask)


def test_calls_are_counted_for_each_layer():
    model, inputs = make("transformer")
    traces = trace_shapes(model, inputs)
    assert len({trace.layer for trace in traces}) == 3
    assert [trace.call for trace in traces] == [0, 0, 0]


def test_where_a_captioner_looks():
    model, inputs = make("captioner", decoder_type="transformer")
    traces = trace_shapes(model, inputs)
    assert [trace.kind for trace in traces] == ["self-attention", "spatial attention"]
    trace = traces[1]
    assert trace.sizes["P"] == trace.sizes["Y"] * trace.sizes["X"] == trace["weights"].shape[-1] == 35
    module = model.get_submodule(trace.layer)
    mask = expected_mask(module, None, 5, 35)
    compare(trace, by_hand(module, trace["input"], trace["memory"], mask), mask)
    # The memory is the feature map, place by place.
    features = model.encoder.projection(trace["feature map"].flatten(2).transpose(1, 2))
    assert_close(trace["memory"], features)


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("bert", {}, {"B": 2, "H": 3, "Q": 7, "K": 7, "D": 5, "E": 15}),
        ("decoder", {}, {"B": 2, "H": 3, "Q": 7, "K": 7, "D": 5, "E": 15}),
        ("transformer", {}, {"B": 2, "H": 3, "Q": 5, "K": 7, "D": 6, "E": 18}),
        ("recurrent", {"alignment": "additive"}, {"B": 2, "Q": 1, "K": 7, "E": 14, "C": 14, "A": 14}),
        ("recurrent", {"alignment": "bilinear", "encoder_hidden_size": 4}, {"B": 2, "Q": 1, "K": 7, "E": 14, "C": 8}),
        ("captioner", {}, {"B": 2, "Q": 1, "P": 35, "E": 12, "A": 12, "F": 6, "Y": 5, "X": 7}),
    ],
)
def test_shapes_are_what_their_letters_say(family, fields, expected):
    model, inputs = make(family, **fields)
    trace = trace_shapes(model, inputs)[-1]
    assert trace.sizes == expected
    for step in trace.steps:
        assert tuple(step.tensor.shape) == tuple(expected[letter] for letter in step.letters.split()), step.name
        assert not step.tensor.requires_grad


def state_of(model) -> tuple:
    modules = list(model.modules())
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules]
    modes = [module.training for module in modules]
    functions = [getattr(attention, name) for name in ("dot_scores", "normalize", "combine")]
    return hooks, modes, functions, model.config._attn_implementation


@pytest.mark.parametrize("family", ["bert", "transformer", "recurrent", "captioner"])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(family, fails):
    model, inputs = make(family)
    # A part that is in evaluation stays there.
    next(module for module in model.modules() if isinstance(module, torch.nn.Dropout)).eval()
    # At the first time that a model is asked for its weights, transformers hooks in its own recorders, for good.
    model(**inputs, output_attentions=True)
    before = state_of(model)
    if fails:
        name = "input_ids" if family == "bert" else "decoder_input_ids"
        with pytest.raises(ValueError, match="vocab_size"):
            trace_shapes(model, {**inputs, name: inputs[name] + 40})

        def refuse(*_):
            raise RuntimeError("in the midst of it")

        module = model.get_submodule(trace_shapes(model, inputs)[0].layer)
        inner = module.output if isinstance(module, MultiHeadAttention) else module.cells[0]
        handle = inner.register_forward_hook(refuse)
        with pytest.raises(RuntimeError, match="in the midst"):
            trace_shapes(model, inputs)
        handle.remove()
    else:
        trace_shapes(model, inputs)
    assert state_of(model) == before


def test_tracing_changes_no_result():
    model, inputs = make("transformer")
    before = model.eval()(**inputs, output_attentions=True)
    inside = trace_shapes(model, inputs, 1)
    after = model(**inputs, output_attentions=True)
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(inside[-1]["weights"], after.cross_attentions[1])


def test_a_query_that_sees_nothing():
    model, inputs = make("bert")
    inputs["attention_mask"][1] = 0
    (trace,) = trace_shapes(model, inputs)
    assert bool((trace["weights"][1] == 0).all())
    assert bool((trace["context"][1] == 0).all())
    assert "hidden: 147 of 294" in format_trace(trace)


def test_what_cannot_be_traced():
    model, inputs = make("bert")
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=rf"^`layer` \({layer}\) must be at least 0 and less than 2"):
            trace_shapes(model, inputs, layer)
    model, inputs = make("recurrent", alignment="none")
    with pytest.raises(ValueError, match=r"^`model` is a RegardRecurrentForConditionalGeneration without attention"):
        trace_shapes(model, inputs)
    model, inputs = make("recurrent")
    with pytest.raises(ValueError, match=r"^`layer` \(1\) must be at least 0 and less than 1"):
        trace_shapes(model, inputs, 1)


def test_the_table():
    model, inputs = make("bert")
    (trace,) = trace_shapes(model, inputs)
    lines = format_trace(trace).splitlines()
    assert lines[0] == "bert.encoder.blocks.0.self_attention: self-attention"
    legend = [f"  {letter} = {size}, {LETTERS[letter]}" for letter, size in trace.sizes.items()]
    assert lines[1 : 1 + len(legend)] == legend
    header, *rows = lines[1 + len(legend) :]
    assert len(rows) == len(trace.steps)
    for row, step in zip(rows, trace.steps, strict=True):
        assert row.index(f" {step.letters}  ") + 1 == header.index("letters")
        assert " × ".join(map(str, step.tensor.shape)) == row[header.index("shape") :].split("  ")[0]
        numbers = [float(number) for number in row[header.index("min") - 8 : header.index("max") + 3].split()[-3:]]
        seen = step.tensor[step.tensor > torch.finfo(torch.float32).min]
        expected = [float(value) for value in (seen.min(), seen.mean(), seen.max())]
        assert numbers == pytest.approx(expected, rel=6e-3, abs=1e-9)
