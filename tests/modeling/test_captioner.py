"""The captioner, with each decoder: against explicit arithmetic, and by its properties."""

import importlib.util
import math
import re

import pytest
import torch
import transformers
from torch.nn import functional

from regard.configuration.captioner import RegardCaptionerConfig
from regard.configuration.recurrent import ALIGNMENT_NAMES
from regard.modeling.captioner import (
    RegardCaptionerForConditionalGeneration,
    attention_penalty,
    spatial_maps,
)

BACKBONES = {
    "resnet": {
        "model_type": "resnet",
        "embedding_size": 5,
        "hidden_sizes": [7, 10],
        "depths": [1, 1],
        "layer_type": "basic",
        "out_features": ["stage2"],
    },
    "convnext": {"model_type": "convnext", "hidden_sizes": [6, 10], "depths": [1, 1], "num_stages": 2},
    "dinov2": {
        "model_type": "dinov2",
        "hidden_size": 10,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
    },
}
HEIGHT, WIDTH = 40, 23
GRID = (5, 3)
every_decoder = pytest.mark.parametrize("decoder_type", ["recurrent", "transformer"])


@pytest.fixture
def make_captioner(randomize):
    def make(decoder_type="recurrent", backbone="resnet", **fields):
        config = RegardCaptionerConfig(
            **{
                "backbone_config": dict(BACKBONES[backbone]),
                "decoder_type": decoder_type,
                "vocab_size": 37,
                "hidden_size": 12,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "intermediate_size": 17,
                "max_position_embeddings": 13,
                **fields,
            }
        )
        return randomize(RegardCaptionerForConditionalGeneration(config)).eval()

    return make


def images(count=3, height=HEIGHT, width=WIDTH) -> torch.Tensor:
    return torch.randn(count, 3, height, width)


def captions() -> torch.Tensor:
    labels = torch.randint(4, 37, (3, 7))
    labels[1, 4:] = labels[2, 6:] = -100
    return labels


def features_of(model, pixel_values) -> torch.Tensor:
    return model.encoder(pixel_values).last_hidden_state


@pytest.mark.parametrize("rnn_type", ["gru", "lstm"])
@pytest.mark.parametrize("alignment", ALIGNMENT_NAMES)
def test_the_recurrent_decoder_is_its_equations(alignment, rnn_type, make_captioner):
    model = make_captioner(alignment=alignment, rnn_type=rnn_type)
    decoder, step = model.decoder, model.decoder.step
    pixel_values, ids = images(), torch.randint(4, 37, (3, 6))
    feature_map = model.encoder.backbone(pixel_values).feature_maps[-1]
    linear = model.encoder.projection
    for image in range(3):
        places = [feature_map[image, :, row, column] for row in range(GRID[0]) for column in range(GRID[1])]
        features = torch.stack([linear.weight @ place + linear.bias for place in places])
        mean = features.sum(dim=0) / len(places)
        first = torch.tanh(decoder.first_state.weight @ mean + decoder.first_state.bias)
        hidden, cells = [first[:12], first[12:]], [torch.zeros(12), torch.zeros(12)]
        expected = []
        for token in ids[image]:
            embedded = decoder.tokens.weight[token]
            context = mean
            if alignment != "none":
                function, query = step.alignment, hidden[-1]
                scores = {
                    "dot": lambda key, query=query: query @ key,
                    "scaled_dot": lambda key, query=query: query @ key / math.sqrt(12),
                    "bilinear": lambda key, query=query, f=function: query @ (f.key.weight @ key),
                    "additive": lambda key, query=query, f=function: (
                        f.score.weight[0] @ torch.tanh(f.query.weight @ query + f.query.bias + f.key.weight @ key)
                    ),
                }
                exponents = torch.stack([scores[alignment](key) for key in features]).exp()
                context = (exponents / exponents.sum()) @ features
            inputs = torch.cat([embedded, context])
            for layer, cell in enumerate(step.cells):
                given = cell.weight_ih @ inputs + cell.bias_ih
                own = cell.weight_hh @ hidden[layer] + cell.bias_hh
                if rnn_type == "gru":
                    reset, update = (
                        (g + o).sigmoid() for g, o in zip(given.chunk(3)[:2], own.chunk(3)[:2], strict=True)
                    )
                    new = torch.tanh(given[24:] + reset * own[24:])
                    hidden[layer] = (1 - update) * new + update * hidden[layer]
                else:
                    enter, forget, new, leave = (given + own).chunk(4)
                    cells[layer] = forget.sigmoid() * cells[layer] + enter.sigmoid() * new.tanh()
                    hidden[layer] = leave.sigmoid() * cells[layer].tanh()
                inputs = hidden[layer]
            read = decoder.readout.weight @ torch.cat([hidden[-1], context, embedded]) + decoder.readout.bias
            expected.append(model.lm_head.weight @ torch.tanh(read))
        actual = model(pixel_values[image : image + 1], decoder_input_ids=ids[image : image + 1]).logits[0]
        torch.testing.assert_close(actual, torch.stack(expected), atol=1e-5, rtol=1e-4)


@every_decoder
def test_labels_are_shifted_once(decoder_type, make_captioner):
    model, pixel_values, labels = make_captioner(decoder_type), images(), captions()
    shifted = torch.cat([torch.full((3, 1), 1), labels[:, :-1]], dim=1).masked_fill(
        torch.cat([torch.zeros(3, 1), labels[:, :-1]], dim=1) == -100, 0
    )
    actual = model(pixel_values, labels=labels).logits
    assert actual.equal(model(pixel_values, decoder_input_ids=shifted).logits)
    assert not actual.equal(model(pixel_values, decoder_input_ids=labels.clamp(min=0)).logits)


@every_decoder
def test_the_future_cannot_change_the_past(decoder_type, make_captioner):
    model, pixel_values, ids = make_captioner(decoder_type), images(), torch.randint(4, 37, (3, 8))
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] - 3) % 33 + 4
    before, after = (model(pixel_values, decoder_input_ids=each).logits for each in (ids, changed))
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert (after[:, 5:] - before[:, 5:]).abs().amax(dim=(0, 2)).min() > 1e-5


@every_decoder
def test_each_image_is_captioned_by_itself(decoder_type, make_captioner):
    model, pixel_values, ids = make_captioner(decoder_type), images(), torch.randint(4, 37, (3, 8))
    together = model(pixel_values, decoder_input_ids=ids).logits
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(model(pixel_values[order], decoder_input_ids=ids[order]).logits, together[order])
    for row in range(3):
        one = slice(row, row + 1)
        alone = model(pixel_values[one], decoder_input_ids=ids[one]).logits
        torch.testing.assert_close(alone, together[one], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(images(), decoder_input_ids=ids).logits, together)


@every_decoder
@pytest.mark.parametrize("search", [{}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize("text", [None, [5, 6]], ids=["", "continued"])
def test_generation_with_a_cache_and_without(decoder_type, search, text, make_captioner):
    model, inputs = make_captioner(decoder_type), {"pixel_values": images()}
    if text:
        inputs["decoder_input_ids"] = torch.tensor([[1, *text]] * 3)
    results = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        results.append(model.generate(**inputs, max_new_tokens=7, use_cache=use_cache, **search))
    assert results[0].equal(results[1])
    assert len(results[0]) == 3 * search.get("num_return_sequences", 1)
    if text:
        assert (results[0][:, 1:3] == torch.tensor(text)).all()
    if not search:
        rows = [
            model.generate(**{name: value[i : i + 1] for name, value in inputs.items()}, max_new_tokens=7)
            for i in range(3)
        ]
        for row, together in zip(rows, results[0], strict=True):
            assert together[: row.shape[1]].equal(row[0])
            assert (together[row.shape[1] :] == 0).all()


@every_decoder
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("text", [[1], [1, 5, 6]], ids=["", "continued"])
@pytest.mark.parametrize("beams", [1, 3])
def test_the_maps_of_generated_words_are_those_of_the_forward_pass(
    decoder_type, kernel, use_cache, text, beams, make_captioner
):
    model, pixel_values = make_captioner(decoder_type, attn_implementation=kernel), images()
    outputs = model.generate(
        pixel_values,
        decoder_input_ids=torch.tensor([text] * 3),
        max_new_tokens=6,
        num_beams=beams,
        num_return_sequences=beams,
        use_cache=use_cache,
        output_attentions=True,
        return_dict_in_generate=True,
    )
    sequences = outputs.sequences
    indices = outputs.beam_indices if beams > 1 else None
    maps = spatial_maps(outputs.cross_attentions, model.feature_grid(HEIGHT, WIDTH), indices)
    forced = model(
        pixel_values.repeat_interleave(beams, dim=0), decoder_input_ids=sequences[:, :-1], output_attentions=True
    )
    expected = spatial_maps(forced.cross_attentions, GRID)[:, :, :, len(text) - 1 :]
    layers, heads = (1, 1) if decoder_type == "recurrent" else (2, 3)
    assert maps.shape == (layers, 3 * beams, heads, sequences.shape[1] - len(text), *GRID)
    for row, caption in enumerate(sequences[:, len(text) :].tolist()):
        words = caption.index(2) + 1 if 2 in caption else len(caption)
        torch.testing.assert_close(maps[:, row, :, :words], expected[:, row, :, :words], atol=1e-5, rtol=1e-4)
        assert (maps[:, row, :, :words].sum(dim=(-1, -2)) - 1).abs().max() < 1e-5
        if beams > 1:
            assert (maps[:, row, :, words:] == 0).all()
    assert model.decoder.config._attn_implementation == ("eager" if decoder_type == "recurrent" else kernel)


@every_decoder
def test_a_map_has_the_places_of_the_image(decoder_type, make_captioner):
    model = make_captioner(decoder_type)
    weights = model(images(), labels=captions(), output_attentions=True).cross_attentions
    maps = spatial_maps(weights, GRID)
    for layer, each in enumerate(weights):
        for row in range(GRID[0]):
            for column in range(GRID[1]):
                assert maps[layer, ..., row, column].equal(each[..., row * GRID[1] + column])
    # What the upper right corner shows changes nothing far from it.
    pixel_values = torch.zeros(2, 3, 64, 160)
    pixel_values[1, :, :8, -8:] = 3.0
    dark, lit = features_of(model, pixel_values)
    change = (lit - dark).abs().sum(dim=-1).view(model.feature_grid(64, 160))
    assert change[0, -1] > 0
    assert change[:, :-8].max() == change[-3:].max() == 0


def test_maps_need_weights_and_the_right_grid(make_captioner):
    fixed = make_captioner(alignment="none")(images(), labels=captions(), output_attentions=True)
    for weights in (None, (), fixed.cross_attentions):
        with pytest.raises(ValueError, match=r"^`cross_attentions` is empty: request `output_attentions`"):
            spatial_maps(weights, GRID)
    weights = make_captioner()(images(), labels=captions(), output_attentions=True).cross_attentions
    with pytest.raises(ValueError, match=r"^`grid` \(4 x 3\) must have the 15 places of the weights$"):
        spatial_maps(weights, (4, 3))


@every_decoder
def test_weights_are_returned_only_when_asked_for(decoder_type, make_captioner):
    model = make_captioner(decoder_type, attn_implementation="eager")
    assert "cross_attentions" not in model(images(), labels=captions())
    assert len(model(images(), labels=captions(), output_attentions=True).cross_attentions) > 0
    model.config.output_attentions = True
    assert len(model(images(), labels=captions()).cross_attentions) > 0


def test_the_penalty_asks_that_each_place_be_looked_at_once():
    weights, labels = torch.rand(3, 2, 7, 15).softmax(dim=-1), captions()
    expected = torch.zeros(3)
    for image in range(3):
        for head in range(2):
            for place in range(15):
                looks = sum(weights[image, head, t, place] for t in range(7) if labels[image, t] != -100)
                expected[image] += (1 - looks) ** 2 / (2 * 15)
    torch.testing.assert_close(attention_penalty(weights, labels), expected)
    even = torch.full((1, 1, 5, 5), 1 / 5)
    assert attention_penalty(even, torch.ones(1, 5, dtype=torch.long)) < 1e-10


@every_decoder
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_the_loss(decoder_type, smoothing, weight, make_captioner):
    model = make_captioner(decoder_type, label_smoothing=smoothing, attention_regularization=weight)
    pixel_values, labels = images(), captions()
    outputs = model(pixel_values, labels=labels, output_attentions=True)
    total = functional.cross_entropy(outputs.logits.mT, labels, reduction="sum", label_smoothing=smoothing)
    if decoder_type == "recurrent":
        penalties = attention_penalty(outputs.cross_attentions[0], labels)
        assert penalties.min() > 0.1
        total = total + weight * (penalties * torch.tensor([7, 4, 6])).sum()
    torch.testing.assert_close(outputs.loss, total / 17)
    # Without attention there is nothing to regularise.
    fixed = make_captioner(alignment="none", label_smoothing=smoothing, attention_regularization=weight)
    outputs = fixed(pixel_values, labels=labels)
    expected = functional.cross_entropy(outputs.logits.mT, labels, label_smoothing=smoothing)
    torch.testing.assert_close(outputs.loss, expected)


@every_decoder
def test_the_losses_of_parts_add_up_to_that_of_the_whole(decoder_type, make_captioner):
    """And their gradients. The first part holds a caption of nothing but padding, which counts for nothing."""
    model = make_captioner(decoder_type, label_smoothing=0.1)
    pixel_values, labels = images(), captions()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole = model(pixel_values, labels=labels).loss
    blank = torch.full((1, 7), -100)
    parts = [
        model(torch.cat([pixel_values[:2], images(1)]), labels=torch.cat([labels[:2], blank]), num_items_in_batch=17),
        model(pixel_values[2:], labels=labels[2:], num_items_in_batch=torch.tensor(17)),
    ]
    added = sum(part.loss for part in parts)
    torch.testing.assert_close(added, whole)
    expected, actual = (torch.autograd.grad(loss, parameters) for loss in (whole, added))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    empty = model(pixel_values[:1], labels=blank)
    assert empty.loss == 0
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(empty.loss, parameters))


@every_decoder
@pytest.mark.parametrize("freeze", [True, False])
def test_a_frozen_backbone_stays_as_it_is(decoder_type, freeze, make_captioner, tmp_path):
    model = make_captioner(decoder_type, freeze_backbone=freeze)
    model.save_pretrained(tmp_path)
    for each in (model, RegardCaptionerForConditionalGeneration.from_pretrained(tmp_path)):
        backbone = each.encoder.backbone
        statistics = {name: value.clone() for name, value in backbone.named_buffers()}
        each.train()
        assert each.encoder.training
        assert {module.training for module in backbone.modules()} == {not freeze}
        before = backbone(images(3)).feature_maps[-1].requires_grad
        each.encoder.train()
        each(images(), labels=captions()).loss.backward()
        changed = [name for name, value in backbone.named_buffers() if not value.equal(statistics[name])]
        trained = [name for name, parameter in each.named_parameters() if parameter.grad is not None]
        assert any(name.startswith("encoder.backbone.") for name in trained) == (not freeze)
        assert {name for name, _ in each.named_parameters() if "backbone" not in name} <= set(trained)
        assert bool(changed) == before == (not freeze)
        assert any(parameter.requires_grad for parameter in backbone.parameters()) == (not freeze)


@pytest.mark.parametrize("backbone", list(BACKBONES))
@every_decoder
def test_any_backbone(backbone, decoder_type, make_captioner, tmp_path):
    model = make_captioner(decoder_type, backbone)
    pixel_values = images(2, 42, 63)
    feature_map = model.encoder.backbone(pixel_values).feature_maps[-1]
    assert model.feature_grid(42, 63) == feature_map.shape[2:]
    expected = model.encoder.projection(feature_map.permute(0, 2, 3, 1)).reshape(2, -1, 12)
    torch.testing.assert_close(features_of(model, pixel_values), expected)
    model.save_pretrained(tmp_path)
    loaded, report = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(report.values())
    for name, value in model.state_dict().items():
        assert loaded.state_dict()[name].equal(value), name
    labels = captions()[:2]
    assert loaded(pixel_values, labels=labels).loss.equal(model(pixel_values, labels=labels).loss)
    half = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert abs(half(pixel_values, labels=labels).loss - model(pixel_values, labels=labels).loss) < 0.3
    assert half.generate(pixel_values, max_new_tokens=3).shape[0] == 2


def test_a_timm_backbone(make_captioner):
    if importlib.util.find_spec("timm") is None or importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs timm, and the torchvision that timm imports")
    model = RegardCaptionerForConditionalGeneration(
        RegardCaptionerConfig(backbone_config={"model_type": "timm_backbone", "backbone": "resnet18"}, hidden_size=12)
    )
    assert features_of(model.eval(), images(1, 64, 96)).shape == (1, math.prod(model.feature_grid(64, 96)), 12)


def test_features_of_the_width_of_the_decoder_are_taken_as_they_are(make_captioner):
    model = make_captioner(hidden_size=10)
    pixel_values = images()
    expected = model.encoder.backbone(pixel_values).feature_maps[-1].flatten(2).mT
    assert features_of(model, pixel_values).equal(expected)
    assert not list(model.encoder.projection.parameters())


def test_images_that_are_none(make_captioner):
    model, labels = make_captioner(), captions()
    for pixel_values in (torch.zeros(3, HEIGHT, WIDTH), torch.zeros(3, 4, HEIGHT, WIDTH)):
        shape = str(tuple(pixel_values.shape)).replace("(", r"\(").replace(")", r"\)")
        with pytest.raises(
            ValueError, match=rf"^`pixel_values` has the shape {shape}, but must be \(images, 3, height, "
        ):
            model(pixel_values, labels=labels)
    with pytest.raises(ValueError, match=r"^give `pixel_values`, or the `encoder_outputs` computed from them$"):
        model(labels=labels)
    small = make_captioner(backbone="convnext")
    for call in (lambda: small(images(3, 3, 50), labels=labels), lambda: small.feature_grid(3, 50)):
        with pytest.raises(ValueError, match=r"^the backbone cannot read images of 3 x 50 pixels: .*size.*$"):
            call()
    assert model(images(3, 1, 1), labels=labels).loss.isfinite()


def test_configurations_that_are_none():
    cases = {
        "`decoder_type` ('rnn') must be one of": {"decoder_type": "rnn"},
        "`attention_regularization` (-1) must be at least 0": {"attention_regularization": -1},
        "`label_smoothing` (1.0) must be at least 0 and less than 1": {"label_smoothing": 1.0},
        "has no field `freeze_backbones`: did you mean `freeze_backbone`?": {"freeze_backbones": True},
    }
    for message, fields in cases.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            RegardCaptionerConfig(**fields)
    with pytest.raises(
        ValueError, match=r"^`backbone_config` has the model type 'bert', for which transformers has no AutoBackb"
    ):
        RegardCaptionerForConditionalGeneration(RegardCaptionerConfig(backbone_config={"model_type": "bert"}))


def test_the_grid_of_the_default_backbone_is_an_eighth_of_the_image():
    model = RegardCaptionerForConditionalGeneration(RegardCaptionerConfig())
    assert model.feature_grid(64, 96) == (8, 12)


@every_decoder
def test_each_part_begins_by_its_own_rules(decoder_type):
    config = RegardCaptionerConfig(decoder_type=decoder_type, initializer_range=0.3)
    model = RegardCaptionerForConditionalGeneration(config)
    linear = [module.weight for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert all(abs(weight.std() - 0.3) < 0.05 for weight in linear)
    convolutions = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    assert len(convolutions) > 3
    for module in convolutions:
        fan_out = module.out_channels * math.prod(module.kernel_size)
        assert abs(module.weight.std() / math.sqrt(2 / fan_out) - 1) < 0.15
    for cell in (module for module in model.modules() if isinstance(module, torch.nn.RNNCellBase)):
        parts = cell.weight_hh.view(-1, 256, 256) if len(cell.weight_hh) == 256 else [cell.weight_hh]
        for part in parts:
            torch.testing.assert_close(part.mT @ part, torch.eye(256), atol=1e-4, rtol=0)


@every_decoder
@pytest.mark.parametrize("tied", [True, False])
def test_the_vocabulary_can_grow_and_shrink(decoder_type, tied, make_captioner, tmp_path):
    model = make_captioner(decoder_type, tie_word_embeddings=tied)
    pixel_values, labels = images(), captions()
    before = model(pixel_values, labels=labels).logits
    for size in (44, 37):
        model.resize_token_embeddings(size)
        assert model.config.vocab_size == size
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
        model.save_pretrained(tmp_path)
        for each in (model, RegardCaptionerForConditionalGeneration.from_pretrained(tmp_path)):
            logits = each(pixel_values, labels=labels).logits
            assert logits.shape[-1] == size
            torch.testing.assert_close(logits[..., :37], before)
    with pytest.raises(
        ValueError, match=r"^`decoder_input_ids` contains the id 40, but `vocab_size` \(37\) allows 0 to 36$"
    ):
        model(pixel_values, decoder_input_ids=torch.full((3, 2), 40))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@every_decoder
def test_gradient_checkpointing_gives_the_same_gradients(decoder_type, make_captioner):
    model, pixel_values, labels = make_captioner(decoder_type).train(), images(), captions()

    def run():
        torch.manual_seed(3)
        return torch.autograd.grad(model(pixel_values, labels=labels).loss, list(model.parameters()))

    # Its statistics go on changing otherwise.
    model.encoder.backbone.eval()
    expected = run()
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(run(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backbone", list(BACKBONES))
@every_decoder
def test_the_kernels_agree(decoder_type, backbone, make_captioner):
    """A backbone that does not attend keeps out of it; a recurrent decoder has no kernel to choose."""
    model = make_captioner(decoder_type, backbone, attn_implementation="eager")
    pixel_values, labels = images(3, 42, 63), captions()
    expected = model(pixel_values, labels=labels).logits
    kernels = [model.encoder.backbone.config, model.decoder.config]
    assert [config._attn_implementation for config in kernels] == ["eager", "eager"]
    if decoder_type == "recurrent":
        with pytest.raises(ValueError, match=r"^RegardRecurrentDecoder does not support an attention implementation"):
            model.set_attn_implementation("sdpa")
        return
    model.set_attn_implementation("sdpa")
    assert [config._attn_implementation for config in kernels] == ["sdpa" if backbone == "dinov2" else "eager", "sdpa"]
    torch.testing.assert_close(model(pixel_values, labels=labels).logits, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_compiled_is_the_same(make_captioner):
    model, pixel_values, labels = make_captioner("transformer", num_hidden_layers=1), images(), captions()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(pixel_values, labels=labels).loss, model(pixel_values, labels=labels).loss)
