"""Multi-head attention: against a loop over heads, with caches, and each kernel against the other."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from regard.modeling.attention import MultiHeadAttention

B, Q, K, WIDTH, HEADS = 3, 5, 7, 15, 3

every_kernel = pytest.mark.parametrize("kernel", ["eager", "sdpa"])
self_and_cross = pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])


def make_config(kernel: str, heads: int = HEADS, dropout: float = 0.0) -> PreTrainedConfig:
    return PreTrainedConfig(
        hidden_size=WIDTH,
        num_attention_heads=heads,
        attention_probs_dropout_prob=dropout,
        attn_implementation=kernel,
    )


def make_attention(kernel: str, causal: bool = False, cross: bool = False, layer: int = 0, **settings):
    return MultiHeadAttention(make_config(kernel, **settings), layer, is_causal=causal, is_cross_attention=cross)


def mask_for(kernel: str, seen: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A boolean (B, 1, Q, K) mask, as transformers hands it to the kernel."""
    if kernel == "sdpa":
        return seen
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def loop_over_heads(attention, hidden_states, memory=None, seen=None):
    """One example, one head, one query at a time, with the module's own weights."""
    if memory is None:
        parts = zip(attention.query_key_value.weight.chunk(3), attention.query_key_value.bias.chunk(3), strict=True)
    else:
        parts = [
            (attention.query.weight, attention.query.bias),
            *zip(attention.key_value.weight.chunk(2), attention.key_value.bias.chunk(2), strict=True),
        ]
    weights, biases = zip(*parts, strict=True)
    memory = hidden_states if memory is None else memory
    size = WIDTH // HEADS
    rows = []
    for b in range(len(hidden_states)):
        queries = hidden_states[b] @ weights[0].T + biases[0]
        keys, values = (memory[b] @ weights[i].T + biases[i] for i in (1, 2))
        for q in range(len(queries)):
            heads = []
            for h in range(HEADS):
                part = slice(h * size, (h + 1) * size)
                visible = [k for k in range(len(keys)) if seen is None or seen[b, 0, q, k]]
                scores = [(queries[q, part] * keys[k, part]).sum() / size**0.5 for k in visible]
                total = sum(score.exp() for score in scores)
                context = torch.zeros(size, dtype=hidden_states.dtype)
                for k, score in zip(visible, scores, strict=True):
                    context = context + score.exp() / total * values[k, part]
                heads.append(context)
            rows.append(torch.cat(heads) @ attention.output.weight.T + attention.output.bias)
    return torch.stack(rows).view(hidden_states.shape)


@every_kernel
@self_and_cross
@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
def test_equals_a_loop_over_heads(kernel, cross, masked):
    attention = make_attention(kernel, cross=cross).double()
    hidden_states = torch.randn(B, Q, WIDTH, dtype=torch.float64)
    memory = torch.randn(B, K, WIDTH, dtype=torch.float64) if cross else None
    seen = None
    if masked:
        seen = torch.rand(B, 1, Q, K if cross else Q) < 0.6
        seen[1, 0, 2] = False
    mask = mask_for(kernel, seen, torch.float64) if masked else None
    output, weights = attention(hidden_states, mask, memory=memory)
    torch.testing.assert_close(output, loop_over_heads(attention, hidden_states, memory, seen))
    assert (weights is None) == (kernel == "sdpa")
    if weights is not None:
        assert weights.shape == (B, HEADS, Q, K if cross else Q)
        rows = torch.ones(B, HEADS, Q) if seen is None else seen.any(dim=-1).expand(B, HEADS, Q)
        torch.testing.assert_close(weights.sum(dim=-1), rows.double())


@every_kernel
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_no_mask_means_the_same_to_every_kernel(kernel, causal):
    attention = make_attention(kernel, causal=causal).double()
    hidden_states = torch.randn(B, Q, WIDTH, dtype=torch.float64)
    seen = torch.ones(B, 1, Q, Q, dtype=torch.bool)
    expected = loop_over_heads(attention, hidden_states, seen=seen.tril() if causal else seen)
    torch.testing.assert_close(attention(hidden_states)[0], expected)


@every_kernel
@pytest.mark.parametrize("layer", [0, 2])
def test_steps_with_a_cache_equal_one_causal_pass(kernel, layer):
    attention = make_attention(kernel, causal=True, layer=layer).eval()
    hidden_states = torch.randn(B, K, WIDTH)
    seen = torch.ones(B, 1, K, K, dtype=torch.bool).tril()
    seen[1, :, :, :2] = False  # left padding
    whole = attention(hidden_states, mask_for(kernel, seen))[0]
    assert not torch.allclose(whole, attention(hidden_states)[0])

    for cache in (DynamicCache(), EncoderDecoderCache(DynamicCache(), DynamicCache())):
        outputs = []
        for start, stop in ((0, 3), (3, 4), (4, 5), (5, 7)):
            mask = mask_for(kernel, seen[:, :, start:stop, :stop])
            outputs.append(attention(hidden_states[:, start:stop], mask, cache=cache)[0])
        torch.testing.assert_close(torch.cat(outputs, dim=1), whole)
        assert cache.get_seq_length(layer) == K


@every_kernel
def test_cross_attention_with_a_cache_projects_the_memory_once(kernel):
    layers = [make_attention(kernel, cross=True, layer=layer).eval() for layer in (0, 1)]
    calls = []
    for layer in layers:
        layer.key_value.register_forward_hook(lambda module, args, output: calls.append(module))
    queries, memory = torch.randn(B, Q, WIDTH), torch.randn(B, K, WIDTH)
    seen = torch.ones(B, 1, 1, K, dtype=torch.bool)
    seen[1, ..., 4:] = False
    mask = mask_for(kernel, seen)

    def decode(cache):
        """Both layers read the memory; the second takes what the first gave."""
        steps = []
        for step in range(Q):
            hidden_states = queries[:, step : step + 1]
            for layer in layers:
                hidden_states = layer(hidden_states, mask, memory=memory, cache=cache)[0]
            steps.append(hidden_states)
        return torch.cat(steps, dim=1)

    expected = decode(cache=None)
    assert len(calls) == Q * len(layers)
    calls.clear()
    outputs = decode(EncoderDecoderCache(DynamicCache(), DynamicCache()))
    assert calls == [layer.key_value for layer in layers]
    torch.testing.assert_close(outputs, expected)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match=r"`hidden_size` \(15\) must be a multiple of `num_attention_heads` \(4\)"):
        make_attention("eager", heads=4)


def test_adding_heads_does_not_change_the_width():
    hidden_states = torch.randn(B, Q, WIDTH)
    attentions = [make_attention("sdpa", heads=heads) for heads in (1, 3, 5, 15)]
    assert len({attention.head_dim for attention in attentions}) == 4
    shapes = [{name: p.shape for name, p in attention.named_parameters()} for attention in attentions]
    assert all(each == shapes[0] for each in shapes)
    outputs = []
    for attention in attentions:
        attention.load_state_dict(attentions[0].state_dict())
        outputs.append(attention(hidden_states)[0])
    assert all(output.shape == hidden_states.shape for output in outputs)
    assert not any(torch.allclose(outputs[0], output) for output in outputs[1:])


@every_kernel
@self_and_cross
def test_dropout_is_active_in_training_only(kernel, cross):
    attention = make_attention(kernel, cross=cross, dropout=0.3)
    hidden_states = torch.randn(1, Q, WIDTH).expand(4000, Q, WIDTH)
    memory = torch.randn(1, K, WIDTH).expand(4000, K, WIDTH) if cross else None
    with torch.no_grad():
        exact = attention.eval()(hidden_states, memory=memory)[0]
        dropped = attention.train()(hidden_states, memory=memory)[0]
    torch.testing.assert_close(exact, exact[:1].expand_as(exact))
    assert attention.eval()(hidden_states, memory=memory)[0].equal(exact)
    assert not torch.allclose(dropped[0], dropped[1])
    # What is kept is scaled, so that the mean stays where it was.
    error = dropped.std(dim=0) / 4000**0.5
    assert ((dropped.mean(dim=0) - exact[0]).abs() < 6 * error).all()


def masks_for_both_kernels(config, hidden_states, memory, causal):
    """For each kind of mask, what the eager and the sdpa kernel get."""
    batch, length, keys = (
        len(hidden_states),
        hidden_states.shape[1],
        (hidden_states if memory is None else memory).shape[1],
    )
    padding = (torch.rand(batch, keys) < 0.7).long()
    padding[0], padding[2] = 1, 0  # an example without padding, one that is nothing else
    anything = torch.rand(batch, 1, length, keys) < 0.7
    if causal:
        anything = anything.tril()
    yield None, None
    yield mask_for("eager", anything), mask_for("sdpa", anything)
    for values in (padding, torch.ones_like(padding)):
        masks = []
        for kernel in ("eager", "sdpa"):
            config._attn_implementation = kernel
            if causal:
                masks.append(create_causal_mask(config, hidden_states, values, None))
            else:
                masks.append(create_bidirectional_mask(config, hidden_states, values, encoder_hidden_states=memory))
        yield masks


@pytest.mark.parametrize("sees", ["all", "the past", "the memory"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_eager_equals_sdpa_for_random_masks(sees, training):
    """Outputs, and in training without dropout gradients, at lengths from 1 to 64."""
    causal, cross = sees == "the past", sees == "the memory"
    dropout = 0.0 if training else 0.3
    attention = make_attention("eager", causal=causal, cross=cross, dropout=dropout).train(training)
    for length in (1, 2, 17, 64):
        hidden_states = torch.randn(B, length, WIDTH, requires_grad=training)
        memory = torch.randn(B, 65 - length, WIDTH, requires_grad=training) if cross else None
        direction = torch.randn(B, length, WIDTH)
        for masks in masks_for_both_kernels(attention.config, hidden_states, memory, causal):
            results = []
            for kernel, mask in zip(("eager", "sdpa"), masks, strict=True):
                attention.config._attn_implementation = kernel
                with torch.set_grad_enabled(training):
                    result = [attention(hidden_states, mask, memory=memory)[0]]
                if training:
                    inputs = [hidden_states, *([memory] if cross else []), *attention.parameters()]
                    result += torch.autograd.grad((result[0] * direction).sum(), inputs)
                assert all(tensor.isfinite().all() for tensor in result)
                results.append(result)
            torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=0)
            torch.testing.assert_close(results[0][1:], results[1][1:], atol=1e-4, rtol=1e-4)


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_fully_hidden_row_gives_the_bias_and_leaves_the_others_alone(kernel, dtype):
    attention = make_attention(kernel).to(dtype)
    hidden_states = torch.randn(B, Q, WIDTH).to(dtype).requires_grad_()
    seen = torch.ones(B, 1, Q, Q, dtype=torch.bool)
    seen[1] = False
    output = attention(hidden_states, mask_for(kernel, seen, dtype))[0]
    assert output[1].equal(attention.output.bias.expand(Q, WIDTH))
    alone = attention(hidden_states[[0, 2]], mask_for(kernel, seen[[0, 2]], dtype))[0]
    torch.testing.assert_close(output[[0, 2]], alone)
    output.float().square().sum().backward()
    assert hidden_states.grad.isfinite().all()
    assert (hidden_states.grad[1] == 0).all()
    assert all(p.grad.isfinite().all() for p in attention.parameters())


def test_the_kernel_is_whichever_is_registered(monkeypatch):
    def first_value(module, query, key, value, attention_mask, scaling, dropout, **kwargs):
        seen.update(scaling=scaling, dropout=dropout, mask=attention_mask, **kwargs)
        return value[:, :, :1].expand(value.shape).transpose(1, 2), None

    seen = {}
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "first_value", first_value)
    attention = make_attention("first_value", dropout=0.25)
    hidden_states, mask = torch.randn(B, Q, WIDTH), torch.ones(B, 1, Q, Q, dtype=torch.bool)
    output = attention(hidden_states, mask, extra="passed on")[0]
    value = attention.query_key_value(hidden_states)[:, :1, 2 * WIDTH :]
    torch.testing.assert_close(output, attention.output(value).expand(B, Q, WIDTH))
    assert seen == {"scaling": 5**-0.5, "dropout": 0.25, "mask": mask, "extra": "passed on"}
