"""The private names of torch: each still exists and does what a kernel needs of it."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.modeling.cpu import torch_private
from regard.modeling.cpu.torch_private import (
    ONEDNN_LINEAR,
    backward_pass_id,
    has_forward_pre_hooks,
    has_hooks,
    in_function_transform,
    onednn_linear,
)

MODELING = Path(torch_private.__file__).parents[1]
ADVICE = (
    "This torch has renamed or changed a private name. Look for the new name in torch's source and put it into "
    "modeling/cpu/torch_private.py, the only place where it is used; if there is none, remove the kernel that needs "
    "it, {kernel}: PyTorch's own operators then take its place."
)


def advice(kernel: str) -> str:
    return ADVICE.format(kernel=kernel)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")
def test_onednn_has_a_linear_operator():
    assert ONEDNN_LINEAR is not None, advice("`_OneDNNLinear` in linear.py")
    input, weight, bias = torch.randn(3, 7), torch.randn(5, 7), torch.randn(5)
    for given in (bias, None):
        expected = nn.functional.linear(input, weight, given)
        torch.testing.assert_close(onednn_linear(input, weight, given), expected, msg=advice("`_OneDNNLinear`"))


def test_function_transforms_are_seen():
    assert not in_function_transform(), advice("all of them: `can_use_cpu_kernels` in conditions.py")
    seen = []
    torch.func.vmap(lambda each: seen.append(in_function_transform()) or each)(torch.ones(3))
    assert seen == [True], advice("all of them: `can_use_cpu_kernels` in conditions.py")


def test_each_backward_pass_has_a_number():
    numbers, message = [], advice("`shared_product` in rnn.py")
    inputs = [torch.ones(2, requires_grad=True) for _ in range(2)]
    for each in inputs:
        each.register_hook(lambda gradient: numbers.append(backward_pass_id()))
    (inputs[0] * inputs[1]).sum().backward()
    (inputs[0] * 2).sum().backward()
    assert numbers[0] == numbers[1], message
    assert numbers[2] not in numbers[:2], message


def test_hooks_are_seen():
    message = advice("`activated_linear`, `vocabulary_loss` and `additive_scores`, which skip a layer's call")
    layer = nn.Linear(7, 5)
    assert not has_hooks(layer), message
    registrations = (
        layer.register_forward_hook,
        layer.register_forward_pre_hook,
        layer.register_full_backward_hook,
        layer.register_full_backward_pre_hook,
    )
    for register in registrations:
        handle = register(lambda *given: None)
        assert has_hooks(layer), message
        assert has_forward_pre_hooks(layer) == (register == layer.register_forward_pre_hook), message
        handle.remove()
        assert not has_hooks(layer), message


# The door: what the models may know of all this


def questions(path: Path) -> list[str]:
    """The places of a model file where it asks about devices, hooks or compilation, or reaches behind the door."""
    found, source = [], path.read_text(encoding="utf-8")
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            behind = (module == "cpu" and node.level == 1) or module.endswith("modeling.cpu")
            wrong = re.match(r"(.*\.)?cpu\.", module) or (
                behind and any(re.match(r"(is|can|has|suits|shares)_", each.name) for each in node.names)
            )
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            wrong = re.search(
                r"\bdevice\.type$|\.is_(cpu|cuda|mps|meta)$|\bis_(compiling|tracing|exporting)$|^torch\.(_C|ops)\b"
                r"|^torch\.backends\b|_hooks$",
                text,
            )
        else:
            continue
        if wrong:
            found.append(f"{path.name}:{node.lineno}: {lines[node.lineno - 1].strip()}")
    return sorted(set(found))


def test_no_model_asks_about_devices_or_hooks():
    paths = sorted(MODELING.glob("*.py"))
    assert len(paths) > 10
    assert [question for path in paths for question in questions(path)] == []


@pytest.mark.parametrize(
    "source",
    [
        "if x.device.type == 'cpu':\n    pass",
        "from .cpu.linear import Linear",
        "from .cpu import Linear, is_unhooked",
        "from ..modeling.cpu.rnn import GRU",
        "y = torch.compiler.is_compiling()",
        "y = torch._C._current_graph_task_id()",
        "y = torch.ops.aten.add(x, x)",
        "y = layer._forward_hooks",
        "y = x.is_cuda",
    ],
)
def test_questions_are_found(source, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(source)
    assert len(questions(path)) == 1


def test_private_names_are_used_in_one_place():
    private = re.compile(r"torch\._C|torch\.ops\.mkldnn|\._\w+_hooks\b")
    users = {path.name for path in MODELING.rglob("*.py") if private.search(path.read_text(encoding="utf-8"))}
    assert users == {"torch_private.py"}
