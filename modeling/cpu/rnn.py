"""Recurrent layers and cells: PyTorch's, but for CPUs in training.

Cho et al. (2014), https://arxiv.org/abs/1406.1078; Hochreiter and Schmidhuber (1997),
https://doi.org/10.1162/neco.1997.9.8.1735

All steps of a recurrent network multiply by the same matrices. Autograd makes a matrix's gradient at every step, and
adds it to those of the others; here it is one product of what all steps gave. And the products are those of `linear`.

Dimension letters: B batch, R rows of a product, K and N sides of a matrix, P tokens of all rows, E width of the input,
H width of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .linear import can_use_cpu_kernels, linear

Product = Callable[[Tensor], Tensor]


def shares_products(module: nn.Module, *tensors: Tensor) -> bool:
    """Whether a module, now and with these tensors, may use `shared_product`."""
    return (
        module.training
        and torch.is_grad_enabled()
        and can_use_cpu_kernels(*tensors, *module.parameters())
        and not torch.is_autocast_enabled("cpu")
    )


class _Factors:
    """Of a matrix's gradient in one backward pass: each product's input, and the gradient of what it gave."""

    def __init__(self) -> None:
        self._pass = -1
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def add(self, input: Tensor, gradient: Tensor) -> None:
        number = torch._C._current_graph_task_id()
        if number != self._pass:
            # Any that are there are of a pass that ended before it came to the matrix.
            self._pass, self._pairs = number, []
        self._pairs.append((input, gradient))

    def take(self) -> tuple[Tensor, Tensor]:
        pairs, self._pairs = self._pairs, []
        inputs, gradients = zip(*pairs, strict=True)
        return torch.cat(inputs, dim=-2), torch.cat(gradients, dim=-2)


def _multiply(input: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(input, matrix.mT, bias) if matrix.dim() == 2 else torch.matmul(input, matrix)


class _Shared(torch.autograd.Function):
    """Gives the matrix to all products, so that its own gradient is made after theirs."""

    @staticmethod
    def forward(ctx: Any, factors: _Factors, matrix: Tensor, bias: Tensor | None) -> Tensor:
        ctx.factors = factors
        ctx.set_materialize_grads(False)
        return matrix.view_as(matrix)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: None) -> tuple[Tensor | None, ...]:
        inputs, gradients = ctx.factors.take()
        _, of_matrix, of_bias = ctx.needs_input_grad
        return (
            None,
            _multiply(gradients.mT, inputs).mT if of_matrix else None,
            gradients.sum(dim=0) if of_bias else None,
        )


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, factors: _Factors, input: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, matrix)
        ctx.factors = factors
        return _multiply(input, matrix, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, matrix = ctx.saved_tensors
        _, of_input, of_matrix, _ = ctx.needs_input_grad
        if of_matrix:
            ctx.factors.add(input, gradient)
        return None, _multiply(gradient, matrix.mT) if of_input else None, None, None


def shared_product(matrix: Tensor, bias: Tensor | None = None) -> Product:
    """What multiplies any number of inputs by one matrix, and adds a bias.

    Args:
        matrix: (K, N) for inputs (R, K), or (B, K, N) for inputs (B, R, K).
        bias: (N), if the matrix is (K, N).
    """
    factors = _Factors()
    shared = _Shared.apply(factors, matrix, bias)
    constant = None if bias is None else bias.detach()
    return lambda input: _Product.apply(factors, input, shared, constant)


def _gru_step(of_input: Tensor, of_state: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    width = hidden.shape[-1]
    gates, candidate = of_input.split([2 * width, width], dim=-1)
    gates_of_state, candidate_of_state = of_state.split([2 * width, width], dim=-1)
    reset, update = torch.sigmoid(gates + gates_of_state).chunk(2, dim=-1)
    candidate = torch.tanh(torch.addcmul(candidate, reset, candidate_of_state))
    return (torch.lerp(candidate, hidden, update),)


def _lstm_step(of_input: Tensor, of_state: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, ...]:
    enter, forget, candidate, leave = (of_input + of_state).chunk(4, dim=-1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(candidate)
    return torch.sigmoid(leave) * torch.tanh(cell), cell


class CellProducts(NamedTuple):
    """The products of a cell with its input and with its state."""

    of_input: Product
    of_state: Product


def cell_products(cell: Any) -> CellProducts | None:
    """The products for all steps of a cell; None if each has to make its own."""
    # What is called before a step may change the weights.
    if cell._forward_pre_hooks or not shares_products(cell):
        return None
    return CellProducts(
        shared_product(cell.weight_ih.t(), cell.bias_ih), shared_product(cell.weight_hh.t(), cell.bias_hh)
    )


class GRUCell(nn.GRUCell):
    """`nn.GRUCell`, which can share its products with other steps."""

    def forward(self, input: Tensor, hx: Tensor, products: CellProducts | None = None) -> Tensor:  # type: ignore[override]
        """See `nn.GRUCell`; `products` are those of `cell_products`."""
        if products is None:
            return super().forward(input, hx)
        return _gru_step(products.of_input(input), products.of_state(hx), hx)[0]


class LSTMCell(nn.LSTMCell):
    """`nn.LSTMCell`, which can share its products with other steps."""

    def forward(  # type: ignore[override]
        self, input: Tensor, hx: tuple[Tensor, Tensor], products: CellProducts | None = None
    ) -> tuple[Tensor, ...]:
        """See `nn.LSTMCell`; `products` are those of `cell_products`."""
        if products is None:
            return super().forward(input, hx)
        return _lstm_step(products.of_input(input), products.of_state(hx[0]), *hx)


def _read(rnn: Any, step: Callable[..., tuple[Tensor, ...]], parts: int, inputs: Tensor, sizes: list[int]) -> Tensor:
    of_state = shared_product(rnn.weight_hh_l0.t(), rnn.bias_hh_l0)
    state = (inputs.new_zeros(sizes[0], rnn.hidden_size),) * parts
    states = []
    for of_input in linear(inputs, rnn.weight_ih_l0, rnn.bias_ih_l0).split(sizes):
        if len(of_input) < len(state[0]):
            state = tuple(part[: len(of_input)] for part in state)
        state = step(of_input, of_state(state[0]), *state)
        states.append(state[0])
    return torch.cat(states)


class GRU(nn.GRU):
    """`nn.GRU` of one layer and direction, which can read rows of unequal lengths without padding."""

    def forward(self, input: Tensor, sizes: list[int] | None = None) -> Tensor:  # type: ignore[override]
        """Reads its input from the state zero on.

        Args:
            input: (P, E), the first tokens of all rows, then the second ones, and so on.
            sizes: the number of rows at each step, the rows that end first being last; only if the layer
                `shares_products`. None: all rows are equally long, and the input is (length, B, E).

        Returns:
            The state after each token, in the shape of the input.
        """
        return super().forward(input)[0] if sizes is None else _read(self, _gru_step, 1, input, sizes)


class LSTM(nn.LSTM):
    """`nn.LSTM` of one layer and direction, which can read rows of unequal lengths without padding."""

    def forward(self, input: Tensor, sizes: list[int] | None = None) -> Tensor:  # type: ignore[override]
        """See `GRU.forward`."""
        return super().forward(input)[0] if sizes is None else _read(self, _lstm_step, 2, input, sizes)
