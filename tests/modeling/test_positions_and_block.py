"""Positions, the block and the stack, against the formulas."""

import copy
import math

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.masking_utils import create_causal_mask

from regard.configuration.bert import RegardBertConfig
from regard.modeling.base import RegardPreTrainedModel
from regard.modeling.bert import RegardBertModel
from regard.modeling.block import NORM_SLOTS, TransformerBlock, TransformerStack
from regard.modeling.positions import POSITIONS, SinusoidalPositions, make_positions, position_ids_for, sinusoids

B, L, M, WIDTH, HEADS, LAYERS = 3, 6, 7, 10, 5, 2

every_kernel = pytest.mark.parametrize("kernel", ["eager", "sdpa"])
every_norm_position = pytest.mark.parametrize("norm_position", sorted(NORM_SLOTS))


class StackConfig(PreTrainedConfig):
    model_type = "regard_test_stack"

    hidden_size: int = WIDTH
    num_attention_heads: int = HEADS
    num_hidden_layers: int = LAYERS
    intermediate_size: int = 17
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    max_position_embeddings: int = 19
    layer_norm_eps: float = 0.1
    norm_position: str = "post"


class StackModel(RegardPreTrainedModel):
    """The least model that has everything: sinusoidal positions and a decoder stack."""

    config_class = StackConfig

    def __init__(self, config):
        super().__init__(config)
        self.positions = SinusoidalPositions(config.max_position_embeddings, config.hidden_size)
        self.stack = TransformerStack(
            config, config.num_hidden_layers, config.norm_position, is_causal=True, has_cross_attention=True
        )
        self.post_init()

    def forward(self, hidden_states, memory):
        position_ids = torch.arange(hidden_states.shape[1])[None]
        return self.stack(hidden_states + self.positions(position_ids), memory=memory)


def make_config(kernel="eager", **fields) -> StackConfig:
    return StackConfig(attn_implementation=kernel, **fields)


def randomize(module: nn.Module) -> nn.Module:
    """Every parameter away from its initial zero or one."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


@pytest.mark.parametrize("width", [2, 14])
def test_sinusoids_are_those_of_the_paper(width):
    positions = SinusoidalPositions(5001, width)
    position_ids = torch.tensor([[0, 1, 2], [7, 999, 5000]])
    vectors = positions(position_ids)
    assert vectors.shape == (2, 3, width)
    for row, ids in enumerate(position_ids.tolist()):
        for column, position in enumerate(ids):
            angles = [position / 10000 ** (2 * i / width) for i in range(width // 2)]
            expected = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)])
            torch.testing.assert_close(vectors[row, column], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", sorted(POSITIONS))
def test_positions_are_looked_up_by_their_ids(name):
    """So left padding and packing work: a position's vector does not depend on where it stands."""
    positions = make_positions(name, 9, WIDTH)
    counted = positions(torch.arange(9)[None])[0]
    assert len(counted.unique(dim=0)) == 9
    ids = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 8, 0, 1]])
    assert positions(ids).equal(counted[ids])
    assert sum(p.numel() for p in positions.parameters()) == (9 * WIDTH if name == "learned" else 0)


def test_bad_positions_are_refused():
    with pytest.raises(ValueError, match=r"`hidden_size` \(15\) must be even for sinusoidal positions"):
        SinusoidalPositions(9, 15)
    with pytest.raises(ValueError, match=r"'sinusoid'\) must be one of learned, sinusoidal"):
        make_positions("sinusoid", 9, WIDTH)


def test_positions_of_new_tokens_count_each_rows_earlier_ones():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    # Two new tokens after three earlier ones, of which two are padding in the first row.
    assert position_ids_for(mask, 2, 3, mask.device).tolist() == [[1, 2], [3, 4]]
    assert position_ids_for(mask, 5, 0, mask.device).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert position_ids_for(None, 2, 3, mask.device).tolist() == [[3, 4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinusoids_survive_loading(tmp_path, dtype):
    """transformers builds a model on the meta device, and then gives unsaved buffers memory as it comes."""
    model = StackModel(make_config())
    model.save_pretrained(tmp_path)
    expected = model.positions.table.to(dtype)
    for _ in range(5):
        junk = [torch.full_like(expected, torch.nan) for _ in range(200)]
        del junk
        loaded = StackModel.from_pretrained(tmp_path, dtype=dtype)
        assert loaded.positions.table.dtype == dtype
        assert loaded.positions.table.equal(expected)


def layer_norm(norm: nn.LayerNorm, hidden_states: torch.Tensor) -> torch.Tensor:
    centred = hidden_states - hidden_states.mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    return centred / (variance + 0.1).sqrt() * norm.weight + norm.bias


def feed_forward(layer: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    inner = hidden_states @ layer.up.weight.T + layer.up.bias
    inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    return inner @ layer.down.weight.T + layer.down.bias


@every_norm_position
@pytest.mark.parametrize("has_memory", [False, True], ids=["self", "cross"])
def test_the_block_is_the_one_of_the_paper(norm_position, has_memory):
    block = randomize(TransformerBlock(make_config(), 0, norm_position, has_cross_attention=has_memory)).double()
    hidden_states = torch.randn(B, L, WIDTH, dtype=torch.float64)
    memory = torch.randn(B, M, WIDTH, dtype=torch.float64) if has_memory else None
    mask = torch.rand(B, 1, L, L) < 0.7
    memory_mask = torch.rand(B, 1, 1, M) < 0.7

    sub_layers = [(block.self_attention_slot, lambda x: block.self_attention(x, mask)[0])]
    if has_memory:
        sub_layers.append((block.cross_attention_slot, lambda x: block.cross_attention(x, memory_mask, memory)[0]))
    sub_layers.append((block.feed_forward_slot, lambda x: feed_forward(block.feed_forward, x)))
    expected = hidden_states
    for slot, apply in sub_layers:
        if norm_position == "post":
            expected = layer_norm(slot.after, expected + apply(expected))
        else:
            expected = expected + apply(layer_norm(slot.before, expected))

    output = block(hidden_states, mask, memory=memory, memory_mask=memory_mask)
    torch.testing.assert_close(output, expected)
    without_mask = block(hidden_states, memory=memory, memory_mask=memory_mask)
    assert not torch.allclose(output, without_mask)
    if has_memory:
        assert not torch.allclose(output, block(hidden_states, mask, memory=memory))


@every_norm_position
def test_the_stack_is_its_blocks_one_after_another(norm_position):
    stack = randomize(TransformerStack(make_config(), 3, norm_position))
    hidden_states = expected = torch.randn(B, L, WIDTH)
    for index, block in enumerate(stack.blocks):
        assert block.self_attention.layer_idx == index
        expected = block(expected)
    if norm_position == "pre":
        expected = layer_norm(stack.norm, expected)
    torch.testing.assert_close(stack(hidden_states), expected)


def test_an_unknown_norm_position_is_answered_with_the_real_ones():
    with pytest.raises(ValueError, match=r"`norm_position` \('before'\) must be one of post, pre"):
        TransformerStack(make_config(), 1, "before")


@every_kernel
@every_norm_position
@pytest.mark.parametrize("has_mask", [False, True], ids=["no-mask", "mask"])
def test_the_future_cannot_change_the_past(kernel, norm_position, has_mask):
    config = make_config(kernel)
    stack = randomize(TransformerStack(config, LAYERS, norm_position, is_causal=True))
    hidden_states = torch.randn(B, L, WIDTH, requires_grad=True)
    mask = None
    if has_mask:
        padding = torch.ones(B, L, dtype=torch.long)
        padding[1, :2] = 0
        mask = create_causal_mask(config, hidden_states, padding, None)
    output = stack(hidden_states, mask)
    other = hidden_states.detach().clone()
    other[:, 4:] = torch.randn(B, L - 4, WIDTH)
    other_output = stack(other, mask)
    torch.testing.assert_close(other_output[:, :4], output[:, :4])
    assert not torch.allclose(other_output[:, 4:], output[:, 4:])

    (gradient,) = torch.autograd.grad((output[:, :4] * torch.randn(B, 4, WIDTH)).sum(), hidden_states)
    assert (gradient[:, 4:] == 0).all()
    assert (gradient[:, 3] != 0).any()


@every_kernel
def test_without_positions_order_does_not_matter(kernel):
    stack = randomize(TransformerStack(make_config(kernel), LAYERS))
    hidden_states, order = torch.randn(B, L, WIDTH), torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(stack(hidden_states[:, order]), stack(hidden_states)[:, order])

    positions = SinusoidalPositions(L, WIDTH)(torch.arange(L)[None])
    assert not torch.allclose(
        stack(hidden_states[:, order] + positions), stack(hidden_states + positions)[:, order], atol=1e-3
    )


def test_the_feed_forward_layer_in_chunks_is_the_same():
    whole = randomize(TransformerBlock(make_config(), 0))
    chunked = TransformerBlock(make_config(chunk_size_feed_forward=2), 0)
    chunked.load_state_dict(whole.state_dict())
    lengths = []
    chunked.feed_forward.up.register_forward_hook(lambda module, args, output: lengths.append(output.shape[1]))
    hidden_states = torch.randn(B, L, WIDTH)
    outputs = [block(hidden_states) for block in (whole, chunked)]
    assert lengths == [2, 2, 2]
    torch.testing.assert_close(*outputs)
    gradients = [
        torch.autograd.grad(output.square().sum(), list(block.parameters()))
        for output, block in zip(outputs, (whole, chunked), strict=True)
    ]
    torch.testing.assert_close(*gradients)


@every_norm_position
def test_dropout_is_on_every_sub_layer_in_training_only(norm_position):
    block = TransformerBlock(make_config(hidden_dropout_prob=0.4), 0, norm_position, has_cross_attention=True)
    dropped = []
    for slot in (block.self_attention_slot, block.cross_attention_slot, block.feed_forward_slot):
        slot.dropout.register_forward_hook(
            lambda module, args, output: dropped.append((output == 0).float().mean().item())
        )
    hidden_states, memory = torch.randn(50, L, WIDTH), torch.randn(50, M, WIDTH)
    block.train()(hidden_states, memory=memory)
    assert len(dropped) == 3
    assert all(abs(share - 0.4) < 0.05 for share in dropped)
    dropped.clear()
    block.eval()(hidden_states, memory=memory)
    assert dropped == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@every_kernel
@every_norm_position
def test_gradient_checkpointing_gives_the_same_gradients(kernel, norm_position):
    """With dropout, and with a memory that is given by keyword and needs gradients too."""
    config = make_config(
        kernel, norm_position=norm_position, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2
    )
    model = randomize(StackModel(config)).train()
    checkpointed = copy.deepcopy(model)
    checkpointed.gradient_checkpointing_enable()
    hidden_states = torch.randn(B, L, WIDTH, requires_grad=True)
    memory = torch.randn(B, M, WIDTH, requires_grad=True)

    def gradients(model):
        calls = []
        for block in model.stack.blocks:
            block.feed_forward.register_forward_hook(lambda *args: calls.append(args[0]))
        torch.manual_seed(5)
        loss = model(hidden_states, memory).square().sum()
        return torch.autograd.grad(loss, [hidden_states, memory, *model.parameters()]), len(calls)

    expected, calls = gradients(model)
    actual, calls_when_checkpointed = gradients(checkpointed)
    assert (calls, calls_when_checkpointed) == (LAYERS, 2 * LAYERS)
    torch.testing.assert_close(actual, expected)


def test_learned_positions_start_as_sinusoids_in_proportion_to_the_other_weights():
    tables = []
    for std in (0.01, 0.03):
        config = RegardBertConfig(hidden_size=18, num_attention_heads=3, num_hidden_layers=1, initializer_range=std)
        tables.append(RegardBertModel(config).embeddings.positions.weight.detach())
    expected = sinusoids(*tables[0].shape)
    torch.testing.assert_close(tables[0].double(), expected * 2 * 2**0.5 * 0.01)
    torch.testing.assert_close(tables[1], 3 * tables[0])
    # Neighbours are alike, and more so than positions further apart.
    near, far = ((tables[0][:-5] * tables[0][shift : len(tables[0]) - 5 + shift]).sum(-1).mean() for shift in (1, 5))
    assert near > far > 0
