"""One battery for every registered model class."""

import copy
import pickle

import pytest
import torch
import transformers
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from regard import RegardBertForMaskedLM, registration
from regard.modeling.base import RegardPreTrainedModel
from tests.support.families import FAMILIES

# What shifts every score of a softmax alike changes nothing, so these have a gradient of zero.
SHIFTS = {
    "RegardBertForMultipleChoice": {"classifier.bias"},
    "RegardBertForQuestionAnswering": {
        "qa_outputs.bias",
        "bert.encoder.blocks.1.feed_forward_slot.after.bias",
    },
}


def tensors_of(outputs) -> dict[str, torch.Tensor]:
    return {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}


def masks_of(inputs) -> list[torch.Tensor]:
    return [value for name, value in inputs.items() if name.endswith("attention_mask")]


def at_tokens(outputs, inputs) -> dict[str, torch.Tensor]:
    """Outputs that have an entry for each token, of the source or of the target: those of real tokens alone."""
    tensors = tensors_of(outputs)
    for mask in masks_of(inputs):
        for name, value in tensors.items():
            if value.shape[: mask.dim()] == mask.shape:
                tensors[name] = value[mask.bool()]
    return tensors


def alone(inputs, row: int) -> dict[str, torch.Tensor]:
    """One row of a padded batch without its padding."""
    one = rows(inputs, slice(row, row + 1))
    for mask in masks_of(one):
        length = int(mask.sum(dim=-1).max())
        # Source and target differ in length, so that it tells them apart.
        same = [name for name, value in one.items() if value.shape[-1] == mask.shape[-1]]
        one |= {name: one[name][..., :length] for name in same}
    assert all(mask.all() for mask in masks_of(one))
    return one


def rows(inputs, index) -> dict[str, torch.Tensor]:
    return {name: value[index] for name, value in inputs.items()}


def gradients(model, loss) -> dict[str, torch.Tensor]:
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def test_forward_is_finite_and_every_parameter_gets_a_gradient(model_class, kernel, make_model, make_inputs, loss_of):
    model = make_model(model_class, kernel)
    outputs = model(**make_inputs(model_class, labels=True))
    assert all(value.isfinite().all() for value in tensors_of(outputs).values())
    loss = loss_of(outputs)
    assert loss.shape == ()
    assert loss > 0
    for name, gradient in gradients(model, loss).items():
        assert gradient.isfinite().all(), name
        if name not in SHIFTS.get(model_class.__name__, ()):
            assert gradient.abs().max() > 1e-6, name


def test_dropout_is_active_in_training_only(model_class, make_model, make_inputs):
    model = make_model(model_class)
    inputs = make_inputs(model_class)
    assert model(**inputs)[0].equal(model(**inputs)[0])
    model.train()
    assert not torch.allclose(model(**inputs)[0], model(**inputs)[0])
    model.eval()
    assert model(**inputs)[0].equal(model(**inputs)[0])


def test_a_fresh_model_has_the_initial_weights_it_should(model_class, tiny_fields):
    config_class = next(config for config, models in FAMILIES.items() if model_class in models.values())
    model = model_class(config_class(**tiny_fields(model_class), initializer_range=0.3))
    matrices = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.LayerNorm):
            assert (module.weight == 1).all(), name
        elif isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            assert (module.weight[module.padding_idx] == 0).all(), name
        elif isinstance(module, torch.nn.Linear):
            matrices.append(module.weight.flatten())
        if isinstance(module, torch.nn.LayerNorm | torch.nn.Linear) and module.bias is not None:
            assert (module.bias == 0).all(), name
    assert abs(torch.cat(matrices).std() - 0.3) < 0.03


def test_a_saved_model_comes_back_bit_for_bit(model_class, auto_class, make_model, make_inputs, tmp_path):
    model = make_model(model_class)
    model.save_pretrained(tmp_path)
    files = {"config.json", "model.safetensors"} | ({"generation_config.json"} if model.can_generate() else set())
    assert {path.name for path in tmp_path.iterdir()} == files
    inputs = make_inputs(model_class, labels=True)
    for loader in (model_class, auto_class):
        # Tables that are not saved must be computed again, whatever stood in the memory that they get.
        junk = [torch.full_like(buffer.float(), torch.nan) for _ in range(100) for buffer in model.buffers()]
        del junk
        loaded, report = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is model_class
        assert not any(report.values())
        assert not loaded.training
        expected, actual = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (model, loaded))
        assert actual.keys() == expected.keys()
        assert [name for name in expected if not actual[name].equal(expected[name])] == []
        for name, value in tensors_of(model(**inputs)).items():
            assert loaded(**inputs)[name].equal(value), name
    saved, read = model.config.to_dict(), loaded.config.to_dict()
    for parts in (saved, read):
        # A part's own type of numbers is known only once it is loaded.
        for part in loaded.config.sub_configs:
            parts[part].pop("dtype", None)
    assert {name for name in saved if saved[name] != read[name]} <= {"_name_or_path"}
    assert loaded.config.architectures == [model_class.__name__]


def test_the_order_of_a_batch_does_not_matter(model_class, kernel, make_model, make_inputs):
    model, inputs = make_model(model_class, kernel), make_inputs(model_class)
    order = torch.tensor([2, 0, 1])
    expected, actual = tensors_of(model(**inputs)), tensors_of(model(**rows(inputs, order)))
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value[order], msg=name)


def test_padding_changes_nothing(model_class, kernel, make_model, make_inputs):
    model, inputs = make_model(model_class, kernel), make_inputs(model_class)
    together = tensors_of(model(**inputs))
    lengths = []
    for row in range(len(masks_of(inputs)[0])):
        one = alone(inputs, row)
        for name, value in tensors_of(model(**one)).items():
            # The same part of what the whole batch gave.
            part = together[name][row : row + 1][tuple(slice(0, size) for size in value.shape)]
            torch.testing.assert_close(part, value, atol=1e-5, rtol=0, msg=name)
        lengths.append(masks_of(one)[0].shape[-1])
    assert len(set(lengths)) == len(lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_nothing_but_padding_harms_nobody(model_class, kernel, dtype, make_model, make_inputs, loss_of):
    model, inputs = make_model(model_class, kernel).to(dtype), make_inputs(model_class, labels=True)
    if "decoder_attention_mask" in inputs:
        # A target of nothing but padding is one more row to pass over; of such a source nothing could be read.
        inputs["decoder_attention_mask"][1] = 0
        if "attention_mask" in inputs:
            mask = inputs["attention_mask"].clone()
            mask[1] = 0
            with pytest.raises(
                ValueError, match=r"row 1 of the source is nothing but padding: it must have at least one token$"
            ):
                model(**(inputs | {"attention_mask": mask}))
    else:
        inputs["attention_mask"][1] = 0
    for name in inputs.keys() & {"labels", "next_sentence_label", "start_positions", "end_positions"}:
        inputs[name][1] = 99 if name.endswith("positions") else -100
    outputs = model(**inputs)
    assert all(value.isfinite().all() for value in tensors_of(outputs).values())
    others = [0, 2]
    expected = model(**rows(inputs, others))
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for name, value in tensors_of(expected).items():
        actual = outputs[name] if name == "loss" else outputs[name][others]
        torch.testing.assert_close(actual.float(), value.float(), atol=tolerance, rtol=tolerance, msg=name)
    for name, gradient in gradients(model, loss_of(outputs)).items():
        assert gradient.isfinite().all(), name
    if "loss" in outputs and dtype == torch.float32:
        actual, wanted = (gradients(model, each.loss) for each in (model(**inputs), expected))
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-4)


def test_the_kernels_agree(model_class, make_model, make_inputs, loss_of):
    """Evaluation, and training with dropout 0."""
    if not model_class._supports_sdpa or model_class.config_class.sub_configs:
        pytest.skip("has one kernel only, or parts with kernels of their own")
    model = make_model(model_class, "eager", dropout=0.0)
    inputs = make_inputs(model_class, labels=True)
    for training in (False, True):
        model.train(training)
        results = []
        for kernel in ("eager", "sdpa"):
            model.set_attn_implementation(kernel)
            outputs = model(**inputs)
            results.append(at_tokens(outputs, inputs))
        torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=0)
        expected, actual = (gradients(model, loss_of(result)) for result in results)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_gradient_checkpointing_gives_the_same_gradients(model_class, kernel, make_model, make_inputs, loss_of):
    """With dropout; and with all but the checkpointed layers frozen, which the re-entrant kind would not get past.

    They need less memory: fewer numbers are kept for the backward pass.
    """
    model, inputs = make_model(model_class, kernel).train(), make_inputs(model_class, labels=True)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert bool(layers) == model_class.supports_gradient_checkpointing
    if not layers:
        pytest.skip("has no layers to checkpoint")
    model.requires_grad_(False)
    for layer in layers:
        layer.requires_grad_(True)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    calls = []
    for layer in layers:
        # A part of it: whether the layer itself is called again is for transformers to decide.
        next(layer.children()).register_forward_pre_hook(lambda module, args: calls.append(module))

    kept = []

    def run():
        calls.clear()
        kept.clear()
        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.numel()) or saved, lambda x: x):
            loss = loss_of(model(**inputs))
        size = sum(kept)
        gradients = torch.autograd.grad(loss, list(trained.values()))
        return len(calls), size, dict(zip(trained, gradients, strict=True))

    once, size, expected = run()
    # A recurrent layer runs at each step.
    assert once >= len(layers)
    model.gradient_checkpointing_enable()
    times, less, actual = run()
    assert times == 2 * once
    assert less < size / 2
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
    model.gradient_checkpointing_disable()
    assert run()[0] == once


@pytest.fixture
def assert_compiled_is_the_same(make_model, make_inputs, loss_of):
    def check(model_class) -> None:
        """Forward and backward; in one graph, but for packed sequences."""
        model, inputs = make_model(model_class), make_inputs(model_class, labels=True)
        torch.compiler.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=not model_class._is_stateful)
        expected, actual = model(**inputs), compiled(**inputs)
        torch.testing.assert_close(tensors_of(actual), tensors_of(expected))
        torch.testing.assert_close(gradients(model, loss_of(actual)), gradients(model, loss_of(expected)))

    return check


# One class with every change, since each takes seconds.
def test_a_compiled_bert_is_the_same(assert_compiled_is_the_same):
    assert_compiled_is_the_same(RegardBertForMaskedLM)


@pytest.mark.slow
def test_compiled_is_the_same(model_class, assert_compiled_is_the_same):
    assert_compiled_is_the_same(model_class)


def test_copies_and_pickles_are_models_of_their_own(model_class, make_model, make_inputs):
    model, inputs = make_model(model_class), make_inputs(model_class)
    expected = model(**inputs)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other(**inputs)[0].equal(expected)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not other(**inputs)[0].equal(expected)
    assert model(**inputs)[0].equal(expected)


def test_ties_are_one_parameter(model_class, make_model, make_inputs, tmp_path):
    def vocabularies(model) -> list[torch.nn.Parameter]:
        """The token embeddings, a decoder's own, and the output layer."""
        both = model.config.is_encoder_decoder and model.main_input_name == "input_ids"
        decoder = model.get_decoder().get_input_embeddings() if both else None
        modules = (model.get_input_embeddings(), decoder, model.get_output_embeddings())
        return [module.weight for module in modules if module is not None]

    tied, untied = (make_model(model_class, tie_word_embeddings=value) for value in (True, False))
    scores_vocabulary = tied(**make_inputs(model_class))[0].shape[-1] == tied.config.vocab_size
    assert (tied.get_output_embeddings() is not None) == scores_vocabulary
    if len(vocabularies(tied)) == 1:
        assert not tied.all_tied_weights_keys
        return
    for model, expected in ((tied, 1), (untied, len(vocabularies(untied)))):
        model.save_pretrained(tmp_path)
        loaded = model_class.from_pretrained(tmp_path)
        for each in (model, copy.deepcopy(model), loaded, loaded.to(torch.bfloat16)):
            assert len({id(weight) for weight in vocabularies(each)}) == expected
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (tied, untied)]
    one = tied.get_input_embeddings().weight.numel()
    assert sizes[1] - sizes[0] == (len(vocabularies(tied)) - 1) * one


def test_a_model_generates_only_if_its_name_says_so(model_class):
    generates = model_class.__name__.endswith(("CausalLM", "ConditionalGeneration"))
    assert model_class.can_generate() == generates
    assert issubclass(model_class, RegardPreTrainedModel)
    assert issubclass(model_class, transformers.GenerationMixin) == generates


@pytest.mark.parametrize("config_class", list(FAMILIES), ids=lambda config_class: config_class.model_type)
def test_model_types_are_ours_alone(config_class, monkeypatch):
    model_type = config_class.model_type
    assert model_type.startswith("regard_")
    assert model_type not in CONFIG_MAPPING_NAMES
    assert type(transformers.AutoConfig.for_model(model_type)) is config_class
    # A later transformers may bring a model type of that name.
    monkeypatch.setitem(CONFIG_MAPPING._mapping, model_type, "BertConfig")
    with pytest.raises(ValueError, match=f"'{model_type}' is already used"):
        registration.register_families()


def test_each_auto_class_gives_the_model_of_its_name():
    generates = {"ForSeq2SeqLM": "ForConditionalGeneration", "ForImageTextToText": "ForConditionalGeneration"}
    for models in FAMILIES.values():
        for auto_name, model_class in models.items():
            ending = auto_name.removeprefix("AutoModel") or "Model"
            assert model_class.__name__.endswith(generates.get(ending, ending))


def test_every_registered_class_is_public():
    import regard

    for config_class, models in FAMILIES.items():
        for public in (config_class, *models.values()):
            assert getattr(regard, public.__name__) is public
            assert public.__name__ in regard.__all__
