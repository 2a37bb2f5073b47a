"""Recurrent layers in training on a CPU next to PyTorch's, and products that share a matrix next to a loop."""

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from regard.modeling.cpu import rnn
from regard.modeling.cpu.rnn import (
    GRU,
    LSTM,
    GRUCell,
    LSTMCell,
    ReadingOrder,
    cell_products,
    reading_orders,
    shared_product,
    shares_products,
)

LENGTHS = [3, 6, 2, 5, 3]
MASK = torch.arange(6) < torch.tensor(LENGTHS).unsqueeze(1)
LAYERS = {GRU: nn.GRU, LSTM: nn.LSTM}
CELLS = {GRUCell: nn.GRUCell, LSTMCell: nn.LSTMCell}
every_layer = pytest.mark.parametrize("kind", LAYERS)
every_cell = pytest.mark.parametrize("kind", CELLS)


def gradients(loss: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, tensors))


def same(actual, expected, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.fixture
def products(monkeypatch) -> list:
    """The shapes of the matrices that products are made for."""
    made = []
    make = rnn.shared_product
    monkeypatch.setattr(rnn, "shared_product", lambda *args: made.append(tuple(args[0].shape)) or make(*args))
    return made


def read_alone(stock: nn.RNNBase, rows: torch.Tensor, reverse: bool) -> torch.Tensor:
    """The states of each row by itself, and zeros behind it."""
    states = []
    for row, length in zip(rows, LENGTHS, strict=True):
        tokens = row[:length].flip(0) if reverse else row[:length]
        read = stock(tokens.unsqueeze(0))[0][0]
        states.append(read.flip(0) if reverse else read)
    return nn.utils.rnn.pad_sequence(states, batch_first=True)


@every_layer
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_rows_of_unequal_lengths_are_each_read_alone(kind, training, products):
    layer = kind(7, 3).train(training)
    stock = LAYERS[kind](7, 3, batch_first=True)
    stock.load_state_dict(layer.state_dict())
    rows = torch.randn(5, 6, 7, requires_grad=True)
    orders = reading_orders(MASK, layer, rows)
    assert [order.step_sizes for order in orders] == [[5, 5, 4, 2, 2, 1] if training else None] * 2
    for order, reverse in zip(orders, (False, True), strict=True):
        products.clear()
        read = layer(rows, order).masked_fill(~MASK.unsqueeze(-1), 0.0)
        assert products == ([(3, 9 if kind is GRU else 12)] if training else [])
        assert read.shape == (5, 6, 3)
        expected = read_alone(stock, rows, reverse)
        same(read, expected)
        weights = torch.randn_like(read)
        same(
            gradients((read * weights).sum(), rows, *layer.parameters()),
            gradients((expected * weights).sum(), rows, *stock.parameters()),
        )


@every_layer
def test_in_training_nothing_is_read_behind_a_row(kind):
    layer, rows = kind(7, 3), torch.randn(5, 6, 7)
    for order in reading_orders(MASK, layer, rows):
        assert sorted(order.places.tolist()) == MASK.flatten().nonzero().flatten().tolist()
        assert (layer(rows, order)[~MASK] == 0).all()


@every_layer
def test_in_evaluation_a_layer_is_pytorchs(kind):
    layer, inputs = kind(7, 3).eval(), torch.randn(5, 6, 7)
    stock = LAYERS[kind](7, 3)
    stock.load_state_dict(layer.state_dict())
    order, _ = reading_orders(torch.ones(5, 6, dtype=torch.bool), layer, inputs)
    assert layer(inputs, order).equal(stock(inputs.transpose(0, 1))[0].transpose(0, 1))


@every_cell
def test_a_cell_is_pytorchs(kind, products):
    cell, stock = kind(7, 3), CELLS[kind](7, 3)
    stock.load_state_dict(cell.state_dict())
    inputs = torch.randn(4, 5, 7, requires_grad=True)
    first = torch.randn(2, 5, 3, requires_grad=True)

    def run(cell, *products):
        state = first[0] if "GRU" in kind.__name__ else (first[0], first[1])
        states = []
        for step in inputs:
            state = cell(step, state, *products)
            states.extend([state] if isinstance(state, torch.Tensor) else state)
        return torch.stack(states)

    actual, expected = run(cell, cell_products(cell)), run(stock)
    assert products == [(7, 9), (3, 9)] if kind is GRUCell else [(7, 12), (3, 12)]
    same(actual, expected)
    assert run(cell).equal(expected)
    weights = torch.randn_like(actual)
    same(
        gradients((actual * weights).sum(), inputs, first, *cell.parameters()),
        gradients((expected * weights).sum(), inputs, first, *stock.parameters()),
    )


def loop(matrix: torch.Tensor, bias: torch.Tensor | None, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Each product depends on the one before."""
    total, carried = torch.zeros(()), 0.0
    for number, each in enumerate(inputs):
        carried = (each + carried) @ matrix + (0.0 if bias is None else bias)
        total = total + (carried.sin() * (number + 1)).sum()
        carried = carried.mean()
    return total


def shared_loop(matrix: torch.Tensor, bias: torch.Tensor | None, inputs: list[torch.Tensor]) -> torch.Tensor:
    product = shared_product(matrix, bias)
    total, carried = torch.zeros(()), 0.0
    for number, each in enumerate(inputs):
        carried = product(each + carried)
        total = total + (carried.sin() * (number + 1)).sum()
        carried = carried.mean()
    return total


@pytest.mark.parametrize(("batch", "biased"), [((), True), ((), False), ((5,), False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_gradient_is_that_of_the_loop(batch, biased, dtype):
    matrix = torch.randn(*batch, 7, 3, dtype=dtype, requires_grad=True)
    bias = torch.randn(3, dtype=dtype, requires_grad=True) if biased else None
    inputs = [torch.randn(*batch, rows, 7, dtype=dtype, requires_grad=True) for rows in (4, 2, 1)]
    wanted = [each for each in (matrix, bias, *inputs) if each is not None]
    actual, expected = shared_loop(matrix, bias, inputs), loop(matrix, bias, inputs)
    same(actual, expected, 1e-5)
    same(gradients(actual, *wanted), gradients(expected, *wanted), 1e-5)


@pytest.mark.parametrize("frozen", itertools.product([True, False], repeat=3), ids=str)
def test_what_is_frozen_gets_no_gradient(frozen):
    tensors = [torch.randn(7, 3), torch.randn(3), torch.randn(4, 7)]
    for tensor, is_frozen in zip(tensors, frozen, strict=True):
        tensor.requires_grad_(not is_frozen)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    matrix, bias, input = tensors
    actual, expected = (run(matrix, bias, [input, 2 * input]) for run in (shared_loop, loop))
    assert actual.requires_grad == bool(wanted)
    if wanted:
        same(gradients(actual, *wanted), gradients(expected, *wanted), 1e-5)


def test_a_pass_that_ends_before_the_matrix_leaves_nothing_to_the_next():
    matrix = torch.randn(7, 3, requires_grad=True)
    inputs = [torch.randn(4, 7, requires_grad=True) for _ in range(3)]
    (expected,) = gradients(loop(matrix, None, inputs), matrix)
    total = shared_loop(matrix, None, inputs)
    torch.autograd.grad(total, inputs[0], retain_graph=True)
    for _ in range(2):
        (actual,) = torch.autograd.grad(total, matrix, retain_graph=True)
        same(actual, expected, 1e-5)


def test_products_that_do_not_count_add_nothing():
    matrix = torch.randn(7, 3, requires_grad=True)
    product = shared_product(matrix)
    first, second = torch.randn(4, 7), torch.randn(2, 7)
    product(second)
    (actual,) = gradients(product(first).square().sum(), matrix)
    (expected,) = gradients((first @ matrix).square().sum(), matrix)
    same(actual, expected, 1e-5)


def test_nothing_outlives_its_graph():
    """Without waiting for the garbage collector."""
    gc.disable()
    try:
        matrix, input = torch.randn(7, 3, requires_grad=True), torch.randn(4, 7)
        kept = weakref.ref(input)
        product = shared_product(matrix)
        result = product(input).sum()
        result.backward(retain_graph=True)
        del input
        assert kept() is not None
        del product, result
        assert kept() is None
    finally:
        gc.enable()


def test_where_products_are_shared():
    module, tensor = nn.Linear(7, 3), torch.randn(4, 7)
    assert shares_products(module, tensor)
    assert not shares_products(module, tensor.to("meta"))
    assert not shares_products(nn.Linear(7, 3, device="meta"), tensor)
    with torch.no_grad():
        assert not shares_products(module, tensor)
    with torch.autocast("cpu", torch.bfloat16):
        assert not shares_products(module, tensor)
    assert not shares_products(module.eval(), tensor)
    assert cell_products(GRUCell(7, 3).eval()) is None


@every_cell
def test_a_cell_whose_weights_are_made_before_each_step_shares_none(kind):
    cell = kind(7, 3)
    prune.random_unstructured(cell, "weight_hh", amount=0.5)
    assert cell_products(cell) is None
    prune.remove(cell, "weight_hh")
    assert cell_products(cell) is not None


@every_layer
def test_a_pruned_layer_reads_with_the_weights_that_are_left(kind):
    layer = kind(7, 3)
    prune.random_unstructured(layer, "weight_hh_l0", amount=0.5)
    inputs = torch.randn(5, 6, 7)
    order, _ = reading_orders(torch.ones(5, 6, dtype=torch.bool), layer, inputs)
    assert order.step_sizes is not None
    for _ in range(2):
        read = layer(inputs, order)
        with torch.no_grad():
            # All rows are equally long, so the order is the same without sizes.
            same(read, layer(inputs, ReadingOrder(order.places, None)))
            layer.weight_hh_l0_orig.mul_(2)
        read.sum().backward()
