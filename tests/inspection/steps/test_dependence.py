"""The causal mask hides the future to the last bit; without positions an encoder takes a text for a bag of words."""

from importlib.util import find_spec

import pytest
import torch
from torch.testing import assert_close

import regard
from regard.inspection.steps.dependence import order_effect, position_gradients, without_positions

LENGTH = 9
SMALL = {"num_attention_heads": 2, "intermediate_size": 20, "max_position_embeddings": 12}


def make(family: str, **fields) -> tuple:
    """A small model with random weights, not in evaluation, and a text for it."""
    ids = torch.randperm(30)[None, :LENGTH] + 5
    both = {"input_ids": ids[:, :6] + 1, "decoder_input_ids": ids}
    if family == "bert":
        config = regard.RegardBertConfig(vocab_size=40, hidden_size=14, num_hidden_layers=2, **SMALL, **fields)
        model, inputs = regard.RegardBertForMaskedLM(config), {"input_ids": ids}
    elif family == "decoder":
        config = regard.RegardDecoderConfig(vocab_size=40, hidden_size=14, num_hidden_layers=2, **SMALL, **fields)
        model, inputs = regard.RegardDecoderForCausalLM(config), {"input_ids": ids}
    elif family == "transformer":
        config = regard.RegardTransformerConfig(vocab_size=40, hidden_size=14, num_hidden_layers=2, **SMALL, **fields)
        model, inputs = regard.RegardTransformerForConditionalGeneration(config), both
    elif family == "recurrent":
        config = regard.RegardRecurrentConfig(vocab_size=40, hidden_size=14, **fields)
        model, inputs = regard.RegardRecurrentForConditionalGeneration(config), both
    else:
        backbone = {"model_type": "resnet", "embedding_size": 4, "hidden_sizes": [6], "depths": [1]}
        config = regard.RegardCaptionerConfig(
            vocab_size=40, hidden_size=14, backbone_config=backbone | {"layer_type": "basic"}, **SMALL, **fields
        )
        model = regard.RegardCaptionerForConditionalGeneration(config)
        inputs = {"pixel_values": torch.randn(1, 3, 20, 28), "decoder_input_ids": ids}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.train(), inputs


CAUSAL = [
    ("decoder", {}),
    ("decoder", {"norm_position": "post", "position_embedding_type": "sinusoidal"}),
    ("transformer", {}),
    ("recurrent", {}),
    ("captioner", {"decoder_type": "transformer"}),
    ("captioner", {"decoder_type": "recurrent"}),
]


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize(("family", "fields"), CAUSAL)
def test_no_output_depends_on_a_later_token(family, fields, kernel):
    model, inputs = make(family, **fields)
    if "recurrent" not in (family, fields.get("decoder_type")):
        model.set_attn_implementation(kernel)
    gradients = position_gradients(model, inputs)
    assert gradients.shape == (LENGTH, LENGTH)
    assert torch.equal(gradients.triu(1), torch.zeros(LENGTH, LENGTH))
    # And on each of those before it, and on itself, every output does.
    assert bool((gradients[torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()] > 0).all())
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_bidirectional_model_sees_the_future():
    model, inputs = make("bert")
    assert bool((position_gradients(model, inputs) > 0).all())


def test_a_gradient_is_what_a_small_change_does():
    model, inputs = make("decoder")
    model.double().eval()
    gradients = position_gradients(model, inputs, seed=3)
    direction = torch.randn(14, generator=torch.Generator().manual_seed(3)).double()
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach()
    changes = torch.zeros(LENGTH, 14, LENGTH, dtype=torch.float64)
    with torch.no_grad():
        for place in range(LENGTH):
            for column in range(14):
                step = torch.zeros_like(embedded)
                step[0, place, column] = 1e-5
                above, below = (model.decoder(inputs_embeds=embedded + s).last_hidden_state[0] for s in (step, -step))
                changes[place, column] = (above - below) @ direction / 2e-5
    assert_close(gradients, changes.abs().amax(dim=1).T, atol=1e-6, rtol=1e-4)


def test_a_leak_of_the_future_is_found(monkeypatch):
    model, inputs = make("decoder")
    model.set_attn_implementation("eager")
    block = model.decoder.stack.blocks[1].self_attention
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda states, mask=None, **kwargs: forward(states, mask * 0, **kwargs))
    assert float(position_gradients(model, inputs).triu(1).max()) > 0


@pytest.mark.parametrize(
    ("family", "fields"), [("bert", {}), ("transformer", {}), ("transformer", {"position_embedding_type": "learned"})]
)
def test_without_positions_an_encoder_does_not_see_the_order(family, fields):
    model, inputs = make(family, **fields)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    effect = order_effect(model, inputs["input_ids"])
    assert effect.without_positions <= 1e-5 * effect.largest
    assert effect.with_positions >= 1e-2 * effect.largest
    assert sorted(effect.permutation) == list(range(inputs["input_ids"].shape[1])) != list(effect.permutation)
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    # Compared with permuted rows: as it was asked, of the model itself.
    network = model.bert if family == "bert" else model.model.encoder
    model.eval()
    permuted = inputs["input_ids"][:, list(effect.permutation)]
    plain = network(inputs["input_ids"]).last_hidden_state[0]
    difference = network(permuted).last_hidden_state[0] - plain[list(effect.permutation)]
    assert float(difference.detach().abs().max()) == pytest.approx(effect.with_positions, rel=1e-4)


def test_a_causal_mask_tells_the_order_too():
    model, inputs = make("decoder")
    effect = order_effect(model, inputs["input_ids"])
    assert effect.without_positions >= 1e-2 * effect.largest


@pytest.mark.skipif(find_spec("peft") is None, reason="peft, an optional package, is not installed")
def test_the_order_is_that_of_a_model_with_adapters():
    from peft import LoraConfig, get_peft_model

    model, inputs = make("bert")
    adapted = get_peft_model(model, LoraConfig(target_modules=["query_key_value"], init_lora_weights=False))
    effect = order_effect(adapted, inputs["input_ids"])
    assert effect.with_positions > 1e-2
    assert effect.without_positions < 1e-4 * effect.largest


@pytest.mark.parametrize("seed", range(5))
def test_the_permuted_text_is_another(seed):
    model, _ = make("bert")
    ids = torch.tensor([[7, 7, 8]])
    effect = order_effect(model, ids, seed)
    assert not torch.equal(ids[:, list(effect.permutation)], ids)
    assert effect.with_positions > 0


@pytest.mark.parametrize("kind", ["learned", "sinusoidal"])
def test_positions_come_back_after_an_error(kind):
    model, _ = make("transformer", position_embedding_type=kind)
    encoder = model.model.encoder.embeddings.positions
    table = encoder.weight if kind == "learned" else encoder.table
    kept = table.detach().clone()

    def fail() -> None:
        with without_positions(model):
            assert not table.any()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert torch.equal(table, kept)


def test_what_cannot_be_shown():
    model, inputs = make("recurrent")
    with pytest.raises(ValueError, match="RegardRecurrentEncoder, which has no position embeddings"):
        order_effect(model, inputs["input_ids"])
    model, inputs = make("bert")
    for ids in (torch.tensor([[7, 7, 7]]), torch.tensor([[7, 8], [8, 9]])):
        with pytest.raises(ValueError, match=r"^`input_ids` must hold one text with at least two different tokens$"):
            order_effect(model, ids)
    for given in ({}, {"input_ids": torch.tensor([[7, 8], [8, 9]])}):
        with pytest.raises(ValueError, match=r"^`inputs` must hold the `input_ids` of one text$"):
            position_gradients(model, given)
