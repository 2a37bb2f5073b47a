"""What every registered class returns besides its result, and vocabularies that grow and shrink."""

import itertools

import pytest
import torch


def maps_of(model, inputs) -> dict[str, tuple[int, int, torch.Tensor, torch.Tensor, bool]]:
    """For each output of attention weights: layers, heads, masks (B, L) of queries and of keys, causal or not."""
    config = model.config
    if not config.is_encoder_decoder:
        mask, is_causal = inputs["attention_mask"].flatten(end_dim=-2), config.model_type == "regard_decoder"
        return {"attentions": (config.num_hidden_layers, config.num_attention_heads, mask, mask, is_causal)}
    target = inputs["decoder_attention_mask"]
    if "attention_mask" in inputs:
        source = inputs["attention_mask"]
    else:
        # Every place of an image.
        source = torch.ones(model(**inputs).encoder_last_hidden_state.shape[:2])
    if getattr(config, "decoder_type", config.model_type).endswith("recurrent"):
        # An alignment has one head, and only one layer asks.
        return {"cross_attentions": (1, 1, target, source, False)}
    heads = config.num_attention_heads
    return {
        "encoder_attentions": (config.num_hidden_layers, heads, source, source, False),
        "decoder_attentions": (config.num_decoder_layers, heads, target, target, True),
        "cross_attentions": (config.num_decoder_layers, heads, target, source, False),
    }


def flat(values) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values for tensor in flat(value)] if isinstance(values, tuple) else []


def test_the_default_kernel_shows_its_weights_when_asked(model_class, make_model, make_inputs):
    model, inputs = make_model(model_class), make_inputs(model_class)
    kernel = "sdpa" if model_class._supports_sdpa else "eager"
    assert model.config._attn_implementation == kernel
    plain = model(**inputs)
    maps = maps_of(model, inputs)
    assert all(plain.get(name) is None for name in maps)
    shown = model(**inputs, output_attentions=True)
    assert model.config._attn_implementation == kernel
    torch.testing.assert_close(shown[0], plain[0], atol=1e-5, rtol=0)

    assert {name for name in shown if name.endswith("attentions")} == maps.keys()
    for name, (layers, heads, queries, keys, is_causal) in maps.items():
        assert len(shown[name]) == layers
        visible = keys[:, None, None, :].expand(-1, heads, queries.shape[1], -1) == 1
        if is_causal:
            visible = visible.tril()
        # A row that sees nothing is all zeros: padding on the left does.
        sums = visible.any(dim=-1).float()
        for weights in shown[name]:
            assert weights.shape == visible.shape
            torch.testing.assert_close(weights.sum(dim=-1), sums)
            assert (weights[~visible] == 0).all()
            assert (weights[visible] > 0).all()
        assert layers == 1 or not torch.allclose(shown[name][0], shown[name][1])
    # Afterwards as before.
    assert all(model(**inputs).get(name) is None for name in maps)


def test_the_kernel_is_put_back_after_an_error(model_class, make_model, make_inputs):
    model, inputs = make_model(model_class), make_inputs(model_class)
    kernel = model.config._attn_implementation
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    inputs[name][0] = 1000
    with pytest.raises(ValueError, match="1000"):
        model(**inputs, output_attentions=True)
    assert model.config._attn_implementation == kernel


def test_the_configuration_can_ask_for_weights_too(model_class, make_model, make_inputs):
    model, inputs = make_model(model_class, kernel=None, output_attentions=True), make_inputs(model_class)
    kernel = "sdpa" if model_class._supports_sdpa else "eager"
    assert model.config._attn_implementation == kernel
    actual, expected = model(**inputs), model(**inputs, output_attentions=True)
    for name, (layers, *_) in maps_of(model, inputs).items():
        assert len(actual[name]) == layers
        assert all(a.equal(e) for a, e in zip(actual[name], expected[name], strict=True))
        assert model(**inputs, output_attentions=False).get(name) is None
    assert model.config._attn_implementation == kernel


def test_hidden_states_are_the_embeddings_and_each_block(model_class, make_model, make_inputs):
    model, inputs = make_model(model_class), make_inputs(model_class)
    config, base = model.config, model.base_model
    parts = {"hidden_states": base}
    if config.is_encoder_decoder:
        parts = {"encoder_hidden_states": model.get_encoder(), "decoder_hidden_states": model.get_decoder()}
        if model.main_input_name != "input_ids":
            parts.pop("encoder_hidden_states")
    seen, last = {name: [] for name in parts}, {}

    def record(name: str, part: torch.nn.Module) -> None:
        blocks = [module for module in part.modules() if type(module).__name__ == "TransformerBlock"]
        for block in blocks[:1]:
            block.register_forward_pre_hook(lambda module, args: seen[name].append(args[0]))
        for block in blocks:
            block.register_forward_hook(lambda module, args, output: seen[name].append(output))
        part.register_forward_hook(lambda module, args, output: last.update({name: output.last_hidden_state}))

    for name, part in parts.items():
        record(name, part)
    outputs = model(**inputs, output_hidden_states=True)
    assert {name for name in outputs if name.endswith("hidden_states")} == parts.keys()
    for name in parts:
        states = outputs[name]
        layers = config.num_hidden_layers
        if name == "decoder_hidden_states":
            layers = getattr(config, "num_decoder_layers", layers)
        assert len(states) == layers + 1
        mask = inputs["decoder_attention_mask" if name.startswith("decoder") else "attention_mask"].flatten(end_dim=-2)
        assert all(state.shape[:2] == mask.shape for state in states)
        assert not any(before.equal(after) for before, after in itertools.pairwise(states))
        if seen[name]:
            assert all(state.equal(output) for state, output in zip(states[:-1], seen[name][:-1], strict=True))
            # What the norm after pre-LN blocks makes of the last.
            assert states[-1].equal(last[name])
    model.config.output_hidden_states = True
    assert all(len(model(**inputs)[name]) == len(outputs[name]) for name in parts)


def test_a_tuple_on_request(model_class, make_model, make_inputs):
    model, inputs = make_model(model_class), make_inputs(model_class, labels=True)
    for asked in ({}, {"output_hidden_states": True, "output_attentions": True}):
        outputs, plain = model(**inputs, **asked), model(**inputs, return_dict=False, **asked)
        assert type(plain) is tuple
        assert len(plain) == len(outputs.to_tuple())
        assert all(a.equal(b) for a, b in zip(flat(plain), flat(outputs.to_tuple()), strict=True))


def test_the_vocabulary_grows_and_shrinks(model_class, make_model, make_inputs, tmp_path):
    for tied in (True, False):
        model, inputs = make_model(model_class, tie_word_embeddings=tied), make_inputs(model_class)
        size, width = model.config.vocab_size, model.config.hidden_size
        ids_names = [name for name in inputs if name.endswith("input_ids")]
        before = model(**inputs)[0]
        assert (model.get_output_embeddings() is not None) == (before.shape[-1] == size)

        def vocabularies(model) -> list[torch.nn.Module]:
            both = model.config.is_encoder_decoder and model.main_input_name == "input_ids"
            decoder = model.get_decoder().get_input_embeddings() if both else None
            modules = (model.get_input_embeddings(), decoder, model.get_output_embeddings())
            return [module for module in modules if module is not None]

        old = [
            {name: values.detach().clone() for name, values in module.named_parameters()}
            for module in vocabularies(model)
        ]
        for new, kept in ((size + 4, size), (size - 2, size - 2)):
            model.resize_token_embeddings(new)
            assert model.config.vocab_size == new
            assert model.get_input_embeddings().weight.shape == (new, width)
            for module, rows in zip(vocabularies(model), old, strict=True):
                for name, values in module.named_parameters():
                    assert len(values) == new
                    assert values[:kept].equal(rows[name][:kept])
            assert len({id(module.weight) for module in vocabularies(model)}) == (1 if tied else len(old))
            folder = tmp_path / f"{tied}-{new}"
            model.save_pretrained(folder)
            loaded, report = model_class.from_pretrained(folder, output_loading_info=True)
            assert not any(report.values())

            for name in ids_names:
                inputs[name] = inputs[name].clamp(max=new - 1)
            after = model(**inputs)[0]
            torch.testing.assert_close(loaded(**inputs)[0], after, atol=1e-6, rtol=1e-6)
            assert model.get_output_embeddings() is None or after.shape[-1] == new
            if new > size:
                torch.testing.assert_close(after[..., : before.shape[-1]], before)
            for name in ids_names:
                inputs[name][0].view(-1)[1] = new
                with pytest.raises(ValueError, match=f"`{name}` contains the id {new}, but"):
                    model(**inputs)
                inputs[name][0].view(-1)[1] = new - 1
                assert model(**inputs)[0].isfinite().all()
