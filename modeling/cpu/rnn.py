"""Recurrent layers and cells like PyTorch's, but on CPUs they train without padding and with fewer products.

Cho et al. (2014), https://arxiv.org/abs/1406.1078; Hochreiter and Schmidhuber (1997),
https://doi.org/10.1162/neco.1997.9.8.1735

All steps of a recurrent network multiply by the same matrices. Autograd computes a matrix's gradient at every step and
adds it to those of the other steps; here the gradient is one product of the inputs and gradients of all steps. The
function `linear` computes the products.

Dimension letters: B batch, L length, R rows of a product, K and N sides of a matrix, P tokens of all rows, E width of
the input, H width of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .kernel_choice import can_use_cpu_kernels
from .linear import linear
from .torch_private import backward_pass_id, has_forward_pre_hooks

Product = Callable[[Tensor], Tensor]


def shares_products(module: nn.Module, *tensors: Tensor) -> bool:
    """Returns whether a module, in its present mode and with these tensors, may use `shared_product`."""
    return (
        module.training
        and torch.is_grad_enabled()
        and can_use_cpu_kernels(*tensors, *module.parameters())
        and not torch.is_autocast_enabled("cpu")
    )


class _Factors:
    """The factors of a matrix's gradient in one backward pass: the input and the output's gradient of each product."""

    def __init__(self) -> None:
        self._pass = -1
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def add(self, input: Tensor, gradient: Tensor) -> None:
        number = backward_pass_id()
        if number != self._pass:
            # The remaining factors belong to an earlier pass that ended before it reached the matrix.
            self._pass, self._pairs = number, []
        self._pairs.append((input, gradient))

    def take(self) -> tuple[Tensor, Tensor]:
        pairs, self._pairs = self._pairs, []
        inputs, gradients = zip(*pairs, strict=True)
        return torch.cat(inputs, dim=-2), torch.cat(gradients, dim=-2)


def _multiply(input: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(input, matrix.mT, bias) if matrix.dim() == 2 else torch.matmul(input, matrix)


class _Shared(torch.autograd.Function):
    """Passes the matrix to all products, so that its own gradient is computed after theirs."""

    @staticmethod
    def forward(ctx: Any, factors: _Factors, matrix: Tensor, bias: Tensor | None) -> Tensor:
        ctx.factors = factors
        ctx.set_materialize_grads(False)
        return matrix.view_as(matrix)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: None) -> tuple[Tensor | None, ...]:
        inputs, gradients = ctx.factors.take()
        _, needs_matrix, needs_bias = ctx.needs_input_grad
        return (
            None,
            _multiply(gradients.mT, inputs).mT if needs_matrix else None,
            gradients.sum(dim=0) if needs_bias else None,
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
        _, needs_input, needs_matrix, _ = ctx.needs_input_grad
        if needs_matrix:
            ctx.factors.add(input, gradient)
        return None, _multiply(gradient, matrix.mT) if needs_input else None, None, None


def shared_product(matrix: Tensor, bias: Tensor | None = None) -> Product:
    """Returns a function that multiplies any number of inputs by one matrix, and adds a bias.

    Args:
        matrix: (K, N) for inputs (R, K), or (B, K, N) for inputs (B, R, K).
        bias: (N), only if the matrix is (K, N).
    """
    factors = _Factors()
    shared = _Shared.apply(factors, matrix, bias)
    constant = None if bias is None else bias.detach()
    return lambda input: _Product.apply(factors, input, shared, constant)


def _gru_step(from_input: Tensor, from_state: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    width = hidden.shape[-1]
    gates, candidate = from_input.split([2 * width, width], dim=-1)
    state_gates, state_candidate = from_state.split([2 * width, width], dim=-1)
    reset, update = torch.sigmoid(gates + state_gates).chunk(2, dim=-1)
    candidate = torch.tanh(torch.addcmul(candidate, reset, state_candidate))
    return (torch.lerp(candidate, hidden, update),)


def _lstm_step(from_input: Tensor, from_state: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, ...]:
    enter, forget, candidate, leave = (from_input + from_state).chunk(4, dim=-1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(candidate)
    return torch.sigmoid(leave) * torch.tanh(cell), cell


class CellProducts(NamedTuple):
    """The products of a cell's weights with its input and with its state."""

    with_input: Product
    with_state: Product


class StepProducts(NamedTuple):
    """The products that all steps of a decoder share.

    Attributes:
        memory: multiplies attention weights by the memory that is attended to.
        cells: the products of each cell; None for a cell that computes its own.
    """

    memory: Product
    cells: list[CellProducts | None]


def share_step_products(step: nn.Module, cells: Iterable[nn.Module], memory: Tensor) -> StepProducts | None:
    """Makes the products that all steps of a decoder share.

    Args:
        step: module that computes one step.
        cells: the recurrent cells among the modules of `step`.
        memory: the states that the decoder attends to, (B, K, E).

    Returns:
        The products; None if each step has to compute its own.
    """
    if not shares_products(step, memory):
        return None
    return StepProducts(shared_product(memory), [cell_products(cell) for cell in cells])


def cell_products(cell: Any) -> CellProducts | None:
    """Makes the products that all steps of a cell share; None if each step has to compute its own."""
    # A hook that runs before each step may change the weights.
    if has_forward_pre_hooks(cell) or not shares_products(cell):
        return None
    return CellProducts(
        shared_product(cell.weight_ih.t(), cell.bias_ih), shared_product(cell.weight_hh.t(), cell.bias_hh)
    )


class GRUCell(nn.GRUCell):
    """`nn.GRUCell` that can share its products with other steps."""

    def forward(self, input: Tensor, hx: Tensor, products: CellProducts | None = None) -> Tensor:  # type: ignore[override]
        """Computes the next state, as `nn.GRUCell` does; `products` are those of `share_step_products`."""
        if products is None:
            return super().forward(input, hx)
        return _gru_step(products.with_input(input), products.with_state(hx), hx)[0]


class LSTMCell(nn.LSTMCell):
    """`nn.LSTMCell` that can share its products with other steps."""

    def forward(  # type: ignore[override]
        self, input: Tensor, hx: tuple[Tensor, Tensor], products: CellProducts | None = None
    ) -> tuple[Tensor, ...]:
        """Computes the next state, as `nn.LSTMCell` does; `products` are those of `share_step_products`."""
        if products is None:
            return super().forward(input, hx)
        return _lstm_step(products.with_input(input), products.with_state(hx[0]), *hx)


class ReadingOrder(NamedTuple):
    """The order in which a recurrent layer reads the tokens of a batch (B, L).

    Attributes:
        places: indices of the tokens in the flattened batch, (P,): the first token of each row, then the second token
            of each row, and so on.
        step_sizes: number of rows that each step reads, with the longest rows first; None if each step reads all rows,
            and padding is read last.
    """

    places: Tensor
    step_sizes: list[int] | None


def reading_orders(mask: Tensor, module: nn.Module, inputs: Tensor) -> tuple[ReadingOrder, ReadingOrder]:
    """The orders from left to right and from right to left in which every token is read before any padding.

    If the layers can read rows of unequal lengths, padding is skipped; otherwise it is read last, so that it does not
    influence the state of any token.

    Args:
        mask: True for tokens, False for padding, (B, L).
        module: module with the recurrent layers.
        inputs: inputs of the first recurrent layer.
    """
    rows, length = mask.shape
    places = torch.arange(length, device=mask.device)
    firsts = torch.arange(rows, device=mask.device).unsqueeze(1) * length
    orders = [torch.where(mask, keys, length).argsort(dim=1) + firsts for keys in (places, -places)]  # two (B, L)
    if not shares_products(module, inputs):
        forward, backward = (ReadingOrder(order.t().flatten(), None) for order in orders)
        return forward, backward
    lengths, longest_first = mask.sum(dim=1).sort(descending=True)
    is_read = places[: int(lengths[0])].unsqueeze(1) < lengths  # (longest, B)
    sizes = is_read.sum(dim=1).tolist()
    forward, backward = (ReadingOrder(each[longest_first].t()[: len(is_read)][is_read], sizes) for each in orders)
    return forward, backward


class _OrderedRNN(nn.RNNBase):
    """A recurrent layer that reads a batch in a given order."""

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor
    _step: ClassVar[Callable[..., tuple[Tensor, ...]]]
    _state_parts: ClassVar[int]

    def forward(self, input: Tensor, order: ReadingOrder) -> Tensor:
        """Reads a batch, starting with a state of zeros.

        Args:
            input: (B, L, E).
            order: one of the two orders of `reading_orders`.

        Returns:
            The state after each token, (B, L, H), with zeros where nothing is read.
        """
        rows, length = input.shape[:2]
        tokens = input.flatten(0, 1).index_select(0, order.places)
        if order.step_sizes is None:
            states = super().forward(tokens.unflatten(0, (length, rows)))[0].flatten(0, 1)
        else:
            states = self._read(tokens, order.step_sizes)
        every = states.new_zeros(rows * length, self.hidden_size).index_copy(0, order.places, states)
        return every.unflatten(0, (rows, length))

    def _read(self, tokens: Tensor, step_sizes: list[int]) -> Tensor:
        state_product = shared_product(self.weight_hh_l0.t(), self.bias_hh_l0)
        state = (tokens.new_zeros(step_sizes[0], self.hidden_size),) * self._state_parts
        states = []
        for from_input in linear(tokens, self.weight_ih_l0, self.bias_ih_l0).split(step_sizes):
            if len(from_input) < len(state[0]):
                state = tuple(part[: len(from_input)] for part in state)
            state = type(self)._step(from_input, state_product(state[0]), *state)
            states.append(state[0])
        return torch.cat(states)


class GRU(_OrderedRNN, nn.GRU):  # type: ignore[misc]
    """`nn.GRU` with one layer and direction that reads a padded batch in a given order."""

    _step, _state_parts = staticmethod(_gru_step), 1


class LSTM(_OrderedRNN, nn.LSTM):  # type: ignore[misc]
    """`nn.LSTM` with one layer and direction that reads a padded batch in a given order."""

    _step, _state_parts = staticmethod(_lstm_step), 2
