"""Linear layers and dropout: the values and gradients of PyTorch's own, on whichever kernel they run."""

import contextlib
import copy
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from regard.modeling.block import FeedForward
from regard.modeling.cpu import Dropout, Linear, activated_linear, apply_dropout, fast_inference
from regard.modeling.cpu.linear import linear

STEPS = 2**16
# Elsewhere PyTorch's kernel serves always, and what is said of gradients and values holds all the same.
HAS_ONEDNN = torch.backends.mkldnn.is_available()
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="PyTorch was built without oneDNN")
# Of parts of itself that it still uses.
pytorch_warns = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft, an optional package, is not installed")


def runs_own_kernel(output: torch.Tensor) -> bool:
    return "OneDNN" in output.grad_fn.name()


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def gradients(output: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of a sum in which each element of the output has a weight of its own."""
    direction = torch.linspace(-1, 2, output.numel()).view(output.shape).to(output.dtype)
    return torch.autograd.grad((output * direction).sum(), inputs)


# What is multiplied: the makers of input (..., 7), weight (5, 7) and bias (5), and whether our kernel serves
OPERANDS = {
    "a row": (lambda: leaf(7), lambda: leaf(5, 7), lambda: leaf(5)),
    "rows": (lambda: leaf(13, 7), lambda: leaf(5, 7), lambda: leaf(5)),
    "batches": (lambda: leaf(3, 13, 7), lambda: leaf(5, 7), lambda: leaf(5)),
    "more dimensions": (lambda: leaf(2, 3, 1, 4, 7), lambda: leaf(5, 7), lambda: leaf(5)),
    "one to one": (lambda: leaf(1, 1), lambda: leaf(1, 1), lambda: leaf(1)),
    "no bias": (lambda: leaf(3, 13, 7), lambda: leaf(5, 7), lambda: None),
    "turned": (lambda: leaf(7, 13, 3).transpose(0, 2), lambda: leaf(7, 5).t(), lambda: leaf(5)),
    "with gaps": (lambda: leaf(13, 20)[::2, 3:17:2], lambda: leaf(9, 8)[4:, 1:], lambda: leaf(13)[1:11:2]),
    "expanded": (lambda: leaf(1, 7).expand(6, 7), lambda: leaf(5, 1).expand(5, 7), lambda: leaf(1).expand(5)),
    "a bias with gaps": (lambda: leaf(13, 7), lambda: leaf(5, 7), lambda: leaf(13)[1:11:2]),
    "an expanded bias": (lambda: leaf(13, 7), lambda: leaf(5, 7), lambda: leaf(1).expand(5)),
    "larger": (lambda: leaf(67, 129), lambda: leaf(131, 129), lambda: leaf(131)),
}


@pytest.mark.parametrize("operands", OPERANDS)
def test_a_linear_layer_computes_what_pytorch_does(operands):
    given = [make() for make in OPERANDS[operands]]
    output, expected = linear(*given), F.linear(*given)
    assert runs_own_kernel(output) == HAS_ONEDNN
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    inputs = [tensor for tensor in given if tensor is not None]
    torch.testing.assert_close(gradients(output, *inputs), gradients(expected, *inputs), atol=1e-4, rtol=1e-5)
    # The gradient of a sum is one number, expanded.
    ones, expected_ones = (torch.autograd.grad(each(*given).sum(), inputs) for each in (linear, F.linear))
    torch.testing.assert_close(ones, expected_ones, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    "shapes", [((0, 7), (5, 7)), ((3, 0, 7), (5, 7)), ((3, 7), (0, 7)), ((3, 0), (5, 0))], ids=str
)
def test_of_nothing_comes_what_pytorch_gives(shapes):
    input, weight = (leaf(*shape) for shape in shapes)
    bias = leaf(len(weight))
    output, expected = linear(input, weight, bias), F.linear(input, weight, bias)
    assert output.equal(expected)
    inputs = (input, weight, bias)
    torch.testing.assert_close(gradients(output, *inputs), gradients(expected, *inputs))


def test_gradients_of_gradients():
    """As of a penalty on the norm of the gradient; the third order too, since the second is made of such layers."""
    given = leaf(4, 3, 7), leaf(5, 7), leaf(5)
    results = []
    for each in (linear, F.linear):
        value = each(*given).tanh().square().mean()
        first = torch.autograd.grad(value, given, create_graph=True)
        second = torch.autograd.grad(sum(part.square().sum() for part in first), given, create_graph=True)
        third = torch.autograd.grad(sum(part.square().sum() for part in second), given)
        results.append((first, second, third))
    for ours, theirs in zip(*results, strict=True):
        assert max(gradient.abs().max() for gradient in theirs) > 1e-3
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2)], ids=str)
def test_what_is_frozen_gets_no_gradient(frozen):
    given = [leaf(4, 7), leaf(5, 7), leaf(5)]
    for place in frozen:
        given[place].requires_grad_(False)
    linear(*given).square().sum().backward()
    assert [tensor.grad is None for tensor in given] == [place in frozen for place in range(3)]
    assert not linear(*(tensor.detach() for tensor in given)).requires_grad


@contextlib.contextmanager
def without_onednn():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.backends.mkldnn, "enabled", False)
        yield


FALLBACKS = {
    "autocast": (torch.float32, lambda: torch.autocast("cpu", torch.bfloat16)),
    "double precision": (torch.float64, contextlib.nullcontext),
    "half precision": (torch.bfloat16, contextlib.nullcontext),
    "oneDNN turned off": (torch.float32, without_onednn),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_where_pytorchs_own_kernel_serves(case):
    dtype, context = FALLBACKS[case]
    given = [tensor.detach().to(dtype).requires_grad_() for tensor in (leaf(4, 7), leaf(5, 7), leaf(5))]
    with context():
        output, expected = linear(*given), F.linear(*given)
        assert not runs_own_kernel(output)
        assert output.dtype == expected.dtype
        assert output.equal(expected)
        torch.testing.assert_close(gradients(output, *given), gradients(expected, *given), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("input", "weight", "bias"),
    [
        ((3, 6), (5, 7), (5,)),
        ((3, 8), (5, 7), (5,)),
        ((3, 7), (5, 7), (4,)),
        ((), (5, 1), (5,)),
        ((3, 7), (2, 5, 7), ()),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_as_by_pytorch(input, weight, bias):
    given = [torch.randn(shape) for shape in (input, weight, bias)]
    with pytest.raises(RuntimeError) as refused:
        F.linear(*given)
    with pytest.raises(RuntimeError) as ours:
        linear(*given)
    assert str(ours.value) == str(refused.value)


@pytest.mark.parametrize("bias", [torch.ones(1), torch.ones(3, 5)], ids=["one number", "one for each row"])
def test_a_bias_of_another_shape_is_spread_as_by_pytorch(bias):
    input, weight = leaf(3, 7), leaf(5, 7)
    torch.testing.assert_close(linear(input, weight, bias), F.linear(input, weight, bias))


# The layer


@pytest.fixture
def net():
    """Layers in training, without dropout."""
    return nn.Sequential(Linear(7, 5), nn.Tanh(), Dropout(0.0), Linear(5, 3, bias=False))


def plain_copy(net: nn.Sequential) -> nn.Sequential:
    """The same with `nn.Linear`."""
    plain = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Dropout(0.0), nn.Linear(5, 3, bias=False))
    plain.load_state_dict(net.state_dict())
    return plain


def test_the_layer_is_bit_equal_to_pytorchs_in_evaluation(net):
    plain, input = plain_copy(net), torch.randn(64, 7)
    for training in (True, False):
        assert runs_own_kernel(net.train(training)(input)) == (training and HAS_ONEDNN)
        torch.testing.assert_close(net(input), plain(input))
    assert net(input).equal(plain(input))


def test_fast_inference_uses_the_kernel_of_training(net):
    net.eval()
    input = torch.randn(2**17, 7)
    with fast_inference():
        assert runs_own_kernel(net(input)) == HAS_ONEDNN
        # With little to multiply it would take longer.
        assert not runs_own_kernel(net(input[:64]))
        with fast_inference():
            pass
        assert runs_own_kernel(net(input)) == HAS_ONEDNN
        torch.testing.assert_close(net(input), plain_copy(net)(input))
        with torch.inference_mode():
            torch.testing.assert_close(net(input), plain_copy(net)(input))
    assert not runs_own_kernel(net(input))
    with pytest.raises(ZeroDivisionError), fast_inference():
        raise ZeroDivisionError
    assert not runs_own_kernel(net(input))


def test_the_layer_is_a_linear_layer_to_others(net):
    assert isinstance(net[0], nn.Linear)
    assert net.state_dict().keys() == {"0.weight", "0.bias", "3.weight"}
    assert copy.deepcopy(net)(torch.ones(7)).equal(net(torch.ones(7)))


@pytorch_warns
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_compiled_exported_and_traced_layers_are_the_same(net, training):
    net.train(training)
    net[2].p = 0.5
    input = torch.randn(4, 7)

    def operations(graph) -> set[str]:
        return {str(node.target) for node in graph.nodes if node.op == "call_function"}

    expected = {"aten.linear.default", *(["aten.dropout.default"] if training else [])}
    assert operations(torch.export.export(net, (input,)).graph) >= expected
    assert "aten::linear" in str(torch.jit.trace(net, input, check_trace=False).inlined_graph)
    net[2].p = 0.0
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with fast_inference():
        torch.testing.assert_close(compiled(input), net(input))
    parameters = list(net.parameters())
    torch.testing.assert_close(gradients(compiled(input), *parameters), gradients(net(input), *parameters))
    torch.testing.assert_close(torch.export.export(net, (input,)).module()(input), net(input))


@pytorch_warns
def test_function_transforms_go_through_the_layers(net):
    input, plain = torch.randn(4, 7), plain_copy(net)
    torch.testing.assert_close(torch.func.vmap(net)(input), plain(input))

    def loss(parameters, module, row):
        return torch.func.functional_call(module, parameters, (row,)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, None, 0), randomness="different")
    ours, theirs = (each(dict(module.named_parameters()), module, input) for module in (net, plain))
    torch.testing.assert_close(ours, theirs)
    _, derivative = torch.func.jvp(net, (input,), (torch.ones_like(input),))
    torch.testing.assert_close(derivative, torch.func.jvp(plain, (input,), (torch.ones_like(input),))[1])


# A linear layer after an activation

# Without parameters or chance; those with parameters are below.
ACTIVATIONS = ["gelu", "gelu_new", "relu", "silu", "tanh", "linear", "relu6"]


TRAINED = ["input weight bias", "input weight", "weight bias", "input", "weight", "bias"]
COMBINED = [("gelu", has_bias, trained) for has_bias in (True, False) for trained in TRAINED]
COMBINED += [(name, True, TRAINED[0]) for name in ACTIVATIONS[1:]]


@pytest.mark.parametrize(("name", "has_bias", "trained"), COMBINED)
def test_an_activation_and_a_layer_are_one_after_the_other(name, has_bias, trained):
    activation, layer, input = ACT2FN[name], Linear(7, 5, bias=has_bias), leaf(3, 4, 7)
    given = {"input": input, **dict(layer.named_parameters())}
    for argument, tensor in given.items():
        tensor.requires_grad_(argument in trained)
    trained = [tensor for tensor in given.values() if tensor.requires_grad]
    if not trained:
        assert not activated_linear(activation, input, layer).requires_grad
        return
    output = activated_linear(activation, input, layer)
    assert ("_ActivatedLinear" in output.grad_fn.name()) == HAS_ONEDNN
    expected = F.linear(activation(input), layer.weight, layer.bias)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients(output, *trained), gradients(expected, *trained), atol=1e-5, rtol=1e-5)
    layer.eval()
    assert activated_linear(activation, input, layer).equal(expected)


@needs_onednn
def test_what_the_activation_gives_is_not_kept():
    layer, input, kept = Linear(7, 5), leaf(3, 7), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        activated_linear(nn.GELU(), input, layer)
    assert len(kept) == 2
    assert kept[0] is input
    assert kept[1] is layer.weight


@pytest.mark.parametrize("name", ["prelu", "xielu"])
def test_an_activation_with_parameters_learns(name):
    activation, layer, input = ACT2FN[name], Linear(7, 5), torch.randn(3, 7)
    parameters = list(activation.parameters())
    ours = gradients(activated_linear(activation, input, layer), *parameters)
    theirs = gradients(F.linear(activation(input), layer.weight, layer.bias), *parameters)
    assert all((gradient != 0).any() for gradient in ours)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_what_hangs_on_a_layer_is_run():
    """Hooks see each call, and pruning, which makes the weight in a hook, follows what is learned."""
    activation, layer, input, seen = nn.ReLU(), Linear(7, 5), torch.rand(3, 7), []
    for register in (layer.register_forward_hook, layer.register_forward_pre_hook, layer.register_full_backward_hook):
        handle = register(lambda *given: seen.append(given[0]))
        activated_linear(activation, input.requires_grad_(), layer).sum().backward()
        handle.remove()
    assert seen == [layer] * 3
    prune.l1_unstructured(layer, "weight", amount=0.5)
    with torch.no_grad():
        layer.weight_orig.mul_(3)
    expected = F.linear(activation(input), layer.weight_orig * layer.weight_mask, layer.bias)
    torch.testing.assert_close(activated_linear(activation, input, layer), expected)


def feed_forward(**fields) -> FeedForward:
    config = PreTrainedConfig(hidden_size=7, intermediate_size=11, hidden_act="gelu", chunk_size_feed_forward=0)
    for name, value in fields.items():
        setattr(config, name, value)
    return FeedForward(config)


def plain_feed_forward(module: FeedForward, input: torch.Tensor) -> torch.Tensor:
    hidden = F.gelu(F.linear(input, module.up.weight, module.up.bias))
    return F.linear(hidden, module.down.weight, module.down.bias)


@pytest.mark.parametrize("chunk_size", [0, 2])
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["kept", "reentrant", "not reentrant"])
def test_feed_forward_layers_with_gradient_checkpointing(reentrant, chunk_size):
    module, input = feed_forward(chunk_size_feed_forward=chunk_size), leaf(3, 4, 7)
    inputs = [input, *module.parameters()]
    expected = gradients(plain_feed_forward(module, input), *inputs)
    output = module(input) if reentrant is None else checkpoint(module, input, use_reentrant=reentrant)
    direction = torch.linspace(-1, 2, output.numel()).view(output.shape)
    (output * direction).sum().backward()
    torch.testing.assert_close(tuple(tensor.grad for tensor in inputs), expected, atol=1e-5, rtol=1e-5)


@needs_peft
@pytest.mark.parametrize("targets", [["down"], ["up"], ["up", "down"]], ids=str)
def test_adapters_on_feed_forward_layers_learn(targets):
    from peft import LoraConfig, get_peft_model

    module, input = feed_forward(), leaf(3, 4, 7)
    adapted = get_peft_model(
        nn.ModuleDict({"block": module}),
        LoraConfig(r=2, lora_alpha=6, target_modules=targets, init_lora_weights=False),
    )
    wrapped = {name: adapted.get_submodule(f"base_model.model.block.{name}") for name in ("up", "down")}

    def layer(name: str, hidden: torch.Tensor) -> torch.Tensor:
        one = wrapped[name]
        if name not in targets:
            return F.linear(hidden, one.weight, one.bias)
        low, high = one.lora_A["default"].weight, one.lora_B["default"].weight
        return F.linear(hidden, one.base_layer.weight, one.base_layer.bias) + 3 * (hidden @ low.T @ high.T)

    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * len(targets)
    output, expected = module(input), layer("down", F.gelu(layer("up", input)))
    torch.testing.assert_close(output, expected)
    inputs = [input, *trained]
    torch.testing.assert_close(gradients(output, *inputs), gradients(expected, *inputs), atol=1e-5, rtol=1e-5)


# Dropout


def kept_and_scale(output: torch.Tensor) -> tuple[torch.Tensor, float]:
    """What was kept of ones, and what they became."""
    kept = output != 0
    (scale,) = output[kept].unique().tolist()
    return kept, scale


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_as_much_is_dropped_as_is_said(p):
    """Overall, at each of the four places that share a draw, and independently of the others there."""
    count = 200_003
    kept, scale = kept_and_scale(apply_dropout(torch.ones(count), p, True))
    steps = round((1 - p) * STEPS)
    # The share kept times the scale is one, but for the rounding of the scale.
    assert scale == torch.tensor(STEPS / steps).item()
    share = steps / STEPS

    def near(values: torch.Tensor, expected: float) -> bool:
        return abs(values.float().mean().item() - expected) < 5 * (expected * (1 - expected) / len(values)) ** 0.5

    assert near(kept, share)
    places = kept[: count // 4 * 4].view(-1, 4)
    for place in range(4):
        assert near(places[:, place], share)
        assert near(places[:-1, place] & places[1:, place], share**2)
        for other in range(place):
            assert near(places[:, place] & places[:, other], share**2)


def test_the_gradient_passes_where_the_value_did():
    input = torch.randn(13, 7, requires_grad=True)
    output = apply_dropout(input, 0.4, True)
    direction = torch.randn(13, 7)
    (gradient,) = torch.autograd.grad(output, input, direction, create_graph=True)
    kept = output != 0
    assert 0 < kept.sum() < 91
    scale = STEPS / round(0.6 * STEPS)
    torch.testing.assert_close(output, torch.where(kept, input * scale, 0.0))
    torch.testing.assert_close(gradient, torch.where(kept, direction * scale, 0.0))
    if output.device.type == "cpu":
        assert [tensor.dtype for tensor in output.grad_fn.saved_tensors] == [torch.bool]


def test_a_seed_gives_a_mask():
    def draw(seed: int, p: float = 0.3) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return [apply_dropout(torch.ones(13, 7), p, True) for _ in range(2)]

    first, second = draw(1)
    assert not first.equal(second)
    assert all(map(torch.equal, draw(1), (first, second)))
    assert not any(map(torch.equal, draw(2), (first, second)))
    # Probabilities are rounded to the nearest step.
    assert draw(1, 0.3 + 1e-6)[0].equal(first)
    assert not draw(1, 0.3 + 2 / STEPS)[0].equal(first)


def test_dropout_is_active_in_training_only():
    module, input = Dropout(0.5), torch.randn(13, 7)
    assert (module(input) == 0).any()
    assert module.eval()(input) is input
    assert apply_dropout(input, 0.5, False) is input
    assert isinstance(module, nn.Dropout)


@pytest.mark.parametrize(("p", "expected"), [(0, 1.0), (0.0, 1.0), (1e-9, 1.0), (1, 0.0), (1.0, 0.0)])
def test_all_or_nothing_is_kept(p, expected):
    input = torch.ones(13, 7, requires_grad=True)
    output = apply_dropout(input, p, True)
    torch.testing.assert_close(output, torch.full((13, 7), expected))
    torch.testing.assert_close(*torch.autograd.grad(output.sum(), input), torch.full((13, 7), expected))


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_a_share_that_is_none(p):
    with pytest.raises(ValueError, match="between 0 and 1"):
        apply_dropout(torch.ones(3), p, True)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3,), (5,), (13, 7), (3, 0, 2), (0,), (2, 3, 4, 5)], ids=str)
def test_any_number_of_elements(shape):
    input = torch.ones(shape, requires_grad=True)
    torch.manual_seed(1)
    outputs = torch.stack([apply_dropout(input, 0.5, True) for _ in range(20)])
    assert outputs.shape == (20, *shape)
    assert set(outputs.unique().tolist()) == ({0.0, 2.0} if input.numel() else set())
    outputs.sum().backward()
    torch.testing.assert_close(input.grad, outputs.detach().sum(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dropout_in_other_precisions_and_layouts(dtype):
    input = torch.randn(7, 13).to(dtype).t().requires_grad_()
    output = apply_dropout(input, 0.25, True)
    assert output.dtype == dtype
    kept = output != 0
    torch.testing.assert_close(output, torch.where(kept, input / 0.75, 0.0))
    torch.testing.assert_close(*torch.autograd.grad(output.sum(), input), torch.where(kept, 1 / 0.75, 0.0).to(dtype))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_keeps_the_mask(reentrant):
    input, net = leaf(13, 7), nn.Sequential(Linear(7, 7), Dropout(0.5), nn.Tanh(), Dropout(0.3))
    inputs, results = [input, *net.parameters()], []
    for run in (net, lambda given: checkpoint(net, given, use_reentrant=reentrant)):
        torch.manual_seed(3)
        output = run(input)
        # Chance goes on from where it was, not from where the second pass left it.
        after = torch.rand(5)
        output.square().sum().backward()
        results.append([output.detach(), after, *(tensor.grad.clone() for tensor in inputs)])
        for tensor in inputs:
            tensor.grad = None
    assert all(map(torch.equal, *results))
