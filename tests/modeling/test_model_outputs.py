"""What every registered class returns besides its result, and vocabularies that grow and shrink."""

import pytest
import torch


def choices(inputs) -> int:
    """How many sequences the encoder sees."""
    return inputs["input_ids"].shape[:-1].numel()


def test_the_default_kernel_shows_its_weights_when_asked(model_class, make_model, make_inputs):
    model, inputs = make_model(model_class), make_inputs(model_class)
    assert model.config._attn_implementation == "sdpa"
    plain = model(**inputs)
    assert plain.get("attentions") is None
    shown = model(**inputs, output_attentions=True)
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(shown[0], plain[0], atol=1e-5, rtol=0)

    config, length = model.config, inputs["input_ids"].shape[-1]
    assert len(shown.attentions) == config.num_hidden_layers
    hidden = inputs["attention_mask"].reshape(-1, 1, 1, length).expand(-1, config.num_attention_heads, length, -1) == 0
    for weights in shown.attentions:
        assert weights.shape == (choices(inputs), config.num_attention_heads, length, length)
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1]))
        assert (weights[hidden] == 0).all()
        assert (weights[~hidden] > 0).all()
    assert not torch.allclose(shown.attentions[0], shown.attentions[1])
    # Afterwards as before.
    assert model(**inputs).get("attentions") is None


def test_the_kernel_is_put_back_after_an_error(model_class, make_model, make_inputs):
    model, inputs = make_model(model_class), make_inputs(model_class)
    inputs["input_ids"][0] = 1000
    with pytest.raises(ValueError, match="1000"):
        model(**inputs, output_attentions=True)
    assert model.config._attn_implementation == "sdpa"


def test_the_configuration_can_ask_for_weights_too(model_class, make_model, make_inputs):
    model, inputs = make_model(model_class, kernel=None, output_attentions=True), make_inputs(model_class)
    assert model.config._attn_implementation == "sdpa"
    actual, expected = model(**inputs).attentions, model(**inputs, output_attentions=True).attentions
    assert len(actual) == model.config.num_hidden_layers
    assert all(a.equal(e) for a, e in zip(actual, expected, strict=True))
    assert model(**inputs, output_attentions=False).get("attentions") is None
    assert model.config._attn_implementation == "sdpa"


def test_hidden_states_are_the_embeddings_and_each_block(model_class, make_model, make_inputs):
    model, inputs = make_model(model_class), make_inputs(model_class)
    seen = []
    for module in model.modules():
        if type(module).__name__ == "TransformerBlock":
            module.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
            module.register_forward_hook(lambda module, args, output: seen.append(output))
    states = model(**inputs, output_hidden_states=True).hidden_states
    assert len(states) == model.config.num_hidden_layers + 1
    assert all(state.shape == (*seen[0].shape[:2], model.config.hidden_size) for state in states)
    assert states[0].equal(seen[0])
    assert all(state.equal(output) for state, output in zip(states[1:], seen[1::2], strict=True))
    seen.clear()
    model.config.output_hidden_states = True
    assert len(model(**inputs).hidden_states) == len(states)


def test_a_tuple_on_request(model_class, make_model, make_inputs):
    model, inputs = make_model(model_class), make_inputs(model_class, labels=True)
    outputs, plain = model(**inputs), model(**inputs, return_dict=False)
    assert type(plain) is tuple
    assert all(a.equal(b) for a, b in zip(plain, outputs.to_tuple(), strict=True))
    everything = model(**inputs, return_dict=False, output_hidden_states=True, output_attentions=True)
    assert [len(part) for part in everything[-2:]] == [3, 2]


def test_the_vocabulary_grows_and_shrinks(model_class, make_model, make_inputs, tmp_path):
    for tied in (True, False):
        model, inputs = make_model(model_class, tie_word_embeddings=tied), make_inputs(model_class)
        head = model.get_output_embeddings()
        old_rows = model.get_input_embeddings().weight.detach().clone()
        old_head = None if head is None else (head.weight.detach().clone(), head.bias.detach().clone())
        before = model(**inputs)[0]
        assert (head is not None) == (before.shape[-1] == 40)
        for size, kept in ((44, 40), (38, 38)):
            model.resize_token_embeddings(size)
            assert model.config.vocab_size == size
            embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
            assert embeddings.weight.shape == (size, 15)
            assert embeddings.weight[:kept].equal(old_rows[:kept])
            if head is not None:
                assert (head.weight is embeddings.weight) == tied
                assert head.weight[:kept].equal(old_head[0][:kept])
                assert head.bias.shape == (size,)
                assert head.bias[:kept].equal(old_head[1][:kept])
            folder = tmp_path / f"{tied}-{size}"
            model.save_pretrained(folder)
            loaded, report = model_class.from_pretrained(folder, output_loading_info=True)
            assert not any(report.values())

            inputs["input_ids"] = inputs["input_ids"].clamp(max=size - 1)
            after = model(**inputs)[0]
            assert loaded(**inputs)[0].equal(after)
            assert head is None or after.shape[-1] == size
            if size == 44:
                torch.testing.assert_close(after[..., : before.shape[-1]], before)
            inputs["input_ids"][0].view(-1)[1] = size
            with pytest.raises(ValueError, match=f"holds the id {size}, but"):
                model(**inputs)
            inputs["input_ids"][0].view(-1)[1] = size - 1
            assert model(**inputs)[0].isfinite().all()
        if head is None:
            break
