"""The recurrent encoder-decoder next to an explicit loop over rows, steps and layers; and its alignments."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from regard import RegardRecurrentConfig, RegardRecurrentForConditionalGeneration, RegardRecurrentModel
from regard.modeling.attention import ALIGNMENTS, AdditiveAlignment, Alignment
from regard.modeling.cpu import rnn as rnn_layers

GENERATOR = RegardRecurrentForConditionalGeneration
every_alignment = pytest.mark.parametrize("alignment", ALIGNMENTS)
every_kind = pytest.mark.parametrize(
    ("rnn_type", "layers"), list(itertools.product(["gru", "lstm"], [1, 3])), ids=lambda value: str(value)
)
# Padding on the right, on the left, on both sides, and none.
MASK = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0, 0], [1] * 7])


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(5, 43, shape)


def alignment_fields(alignment: str) -> dict:
    """The dot products need queries and keys of one width."""
    return {"alignment": alignment} | ({"encoder_hidden_size": 8} if "dot" in alignment else {})


def cell_step(cell: nn.Module, inputs: torch.Tensor, hidden: torch.Tensor, memory: torch.Tensor, suffix: str = ""):
    """One step of a GRU (Cho et al., 2014) or LSTM (Hochreiter and Schmidhuber, 1997) on vectors."""
    weights = {name.removesuffix(suffix): value for name, value in cell.named_parameters()}
    of_input = (weights["weight_ih"] @ inputs + weights["bias_ih"]).split(hidden.shape[0])
    of_state = (weights["weight_hh"] @ hidden + weights["bias_hh"]).split(hidden.shape[0])
    if len(of_input) == 3:
        reset = torch.sigmoid(of_input[0] + of_state[0])
        update = torch.sigmoid(of_input[1] + of_state[1])
        new = torch.tanh(of_input[2] + reset * of_state[2])
        return (1 - update) * new + update * hidden, memory
    enter, forget, candidate, leave = (a + b for a, b in zip(of_input, of_state, strict=True))
    memory = torch.sigmoid(forget) * memory + torch.sigmoid(enter) * torch.tanh(candidate)
    return torch.sigmoid(leave) * torch.tanh(memory), memory


def encode(encoder, tokens: list[int]) -> torch.Tensor:
    """The states (tokens, C) of one sentence, each layer read from left to right and from right to left."""
    states = [encoder.tokens.weight[token] for token in tokens]
    directions = [module for module in encoder.modules() if isinstance(module, nn.RNNBase)]
    for onward, backward in zip(directions[::2], directions[1::2], strict=True):
        read = []
        for rnn, order in ((onward, states), (backward, states[::-1])):
            hidden = memory = torch.zeros(rnn.hidden_size)
            read.append([])
            for each in order:
                hidden, memory = cell_step(rnn, each, hidden, memory, "_l0")
                read[-1].append(hidden)
        states = [torch.cat([left, right]) for left, right in zip(read[0], read[1][::-1], strict=True)]
    return torch.stack(states)


def score(alignment: Alignment, name: str, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """How well one query matches one key."""
    if name == "additive":
        matched = alignment.query.weight @ query + alignment.query.bias + alignment.key.weight @ key
        return alignment.score.weight[0] @ torch.tanh(matched)
    if name == "bilinear":
        return query @ (alignment.key.weight @ key)
    return query @ key / (len(query) ** 0.5 if name == "scaled_dot" else 1.0)


def decode(model, memory: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (tokens, V), attention weights (tokens, S) and context vectors (tokens, C) of one sentence."""
    decoder, config = model.get_decoder(), model.config
    onward, backward = memory.chunk(2, dim=-1)
    summary = torch.cat([onward[-1], backward[0]])
    hidden = list(torch.tanh(decoder.first_state(summary)).split(config.hidden_size))
    cells = [torch.zeros(config.hidden_size) for _ in hidden]
    modules = [module for module in decoder.modules() if isinstance(module, nn.RNNCellBase)]
    alignment = next((module for module in decoder.modules() if isinstance(module, Alignment)), None)
    logits, weights, contexts = [], [], []
    for token in tokens:
        embedded = decoder.tokens.weight[token]
        if alignment is None:
            seen, context = torch.zeros(len(memory)), summary
        else:
            scores = torch.stack([score(alignment, config.alignment, hidden[-1], key) for key in memory])
            seen = scores.exp() / scores.exp().sum()
            context = sum(weight * value for weight, value in zip(seen, memory, strict=True))
        inputs = torch.cat([embedded, context])
        for layer, module in enumerate(modules):
            hidden[layer], cells[layer] = cell_step(module, inputs, hidden[layer], cells[layer])
            inputs = hidden[layer]
        readout = torch.tanh(decoder.readout(torch.cat([hidden[-1], context, embedded])))
        logits.append(model.lm_head.weight @ readout)
        weights.append(seen)
        contexts.append(context)
    return torch.stack(logits), torch.stack(weights), torch.stack(contexts)


@every_kind
def test_the_encoder_is_each_sentence_read_alone(rnn_type, layers, make_model):
    encoder = make_model(GENERATOR, rnn_type=rnn_type, num_hidden_layers=layers).get_encoder()
    source = ids(4, 7)
    states = encoder(source, MASK).last_hidden_state
    assert states.shape == (4, 7, 10)
    assert (states[MASK == 0] == 0).all()
    for row, mask in enumerate(MASK.bool()):
        expected = encode(encoder, source[row, mask].tolist())
        torch.testing.assert_close(states[row, mask], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(encoder(source).last_hidden_state[3], states[3], atol=1e-6, rtol=0)


@every_kind
def test_the_encoder_is_the_layer_of_torch(rnn_type, layers, make_model):
    encoder = make_model(GENERATOR, rnn_type=rnn_type, num_hidden_layers=layers).get_encoder()
    kind = {"gru": nn.GRU, "lstm": nn.LSTM}[rnn_type]
    stock = kind(16, 5, layers, batch_first=True, bidirectional=True)
    directions = [module for module in encoder.modules() if isinstance(module, nn.RNNBase)]
    weights = {}
    for number, rnn in enumerate(directions):
        ending = f"_l{number // 2}" + ("_reverse" if number % 2 else "")
        weights |= {name.replace("_l0", ending): value for name, value in rnn.state_dict().items()}
    stock.load_state_dict(weights)
    source = ids(4, 7)
    states = encoder(source, MASK).last_hidden_state
    for row, mask in enumerate(MASK.bool()):
        expected, _ = stock(encoder.tokens(source[row, mask]).unsqueeze(0))
        torch.testing.assert_close(states[row, mask], expected[0], atol=1e-6, rtol=0)


@every_kind
@pytest.mark.parametrize("alignment", [*ALIGNMENTS, "none"])
def test_the_decoder_is_the_loop_of_the_paper(rnn_type, layers, alignment, make_model):
    fields = alignment_fields(alignment)
    model = make_model(GENERATOR, rnn_type=rnn_type, num_hidden_layers=layers, **fields)
    source, target = ids(4, 7), ids(4, 5)
    outputs = model(source, MASK, target, output_attentions=True)
    for row, mask in enumerate(MASK.bool()):
        memory = encode(model.get_encoder(), source[row, mask].tolist())
        logits, weights, _ = decode(model, memory, target[row].tolist())
        torch.testing.assert_close(outputs.logits[row], logits, atol=1e-4, rtol=0)
        if alignment == "none":
            assert outputs.cross_attentions is None
            continue
        seen = outputs.cross_attentions[0][row, 0]
        torch.testing.assert_close(seen[:, mask], weights, atol=1e-5, rtol=0)
        assert (seen[:, ~mask] == 0).all()


@every_alignment
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_row_of_weights_is_a_distribution_over_the_source(alignment, dtype, make_model):
    model = make_model(GENERATOR, **alignment_fields(alignment)).to(dtype)
    source, target = ids(4, 7), ids(4, 5)
    given = model(source, MASK, target, output_attentions=True).cross_attentions
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    written = model.generate(
        source, attention_mask=MASK, output_attentions=True, return_dict_in_generate=True, **options
    )
    steps = [step[0] for step in written.cross_attentions]
    assert [step.shape for step in steps] == [(4, 1, 1, 7)] * 5
    for weights in (given[0], torch.cat(steps, dim=2)):
        assert weights.shape == (4, 1, 5, 7)
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(weights.float().sum(dim=-1), torch.ones(4, 1, 5), atol=tolerance, rtol=0)
        assert (weights.transpose(1, 3)[MASK == 0] == 0).all()
        assert (weights.transpose(1, 3)[MASK == 1] > 0).all()
    if dtype == torch.float32:
        again = model(source, MASK, written.sequences[:, :-1], output_attentions=True).cross_attentions[0]
        torch.testing.assert_close(torch.cat(steps, dim=2), again, atol=1e-5, rtol=0)


@every_alignment
def test_a_sentence_does_not_see_its_company(alignment, make_model):
    model = make_model(GENERATOR, **alignment_fields(alignment))
    short, long, target = ids(1, 2), ids(1, 9), ids(2, 4)
    for sides in ((0, 7), (7, 0)):
        batch = torch.cat([F.pad(short, sides), long])
        mask = torch.cat([F.pad(torch.ones_like(short), sides), torch.ones_like(long)])
        together = model(batch, mask, target).logits
        for row, alone in enumerate((short, long)):
            expected = model(alone, decoder_input_ids=target[row : row + 1]).logits
            torch.testing.assert_close(together[row : row + 1], expected, atol=1e-5, rtol=0)


def test_without_an_alignment_each_step_reads_the_same(make_model):
    """So swapping what is between the ends matters only through the ends."""
    model = make_model(GENERATOR, alignment="none")
    assert not any(isinstance(module, Alignment) for module in model.modules())
    contexts = []
    cell = next(module for module in model.modules() if isinstance(module, nn.RNNCellBase))
    cell.register_forward_pre_hook(lambda module, args: contexts.append(args[0][:, 16:]))
    source, target = ids(4, 7), ids(4, 5)
    model(source, MASK, target)
    assert len(contexts) == 5
    assert all(context.equal(contexts[0]) for context in contexts)
    for row, mask in enumerate(MASK.bool()):
        onward, backward = encode(model.get_encoder(), source[row, mask].tolist()).chunk(2, dim=-1)
        torch.testing.assert_close(contexts[0][row], torch.cat([onward[-1], backward[0]]), atol=1e-5, rtol=0)
    # With one they differ.
    attentive = make_model(GENERATOR)
    cell = next(module for module in attentive.modules() if isinstance(module, nn.RNNCellBase))
    contexts.clear()
    cell.register_forward_pre_hook(lambda module, args: contexts.append(args[0][:, 16:]))
    attentive(source, MASK, target)
    assert not any(torch.allclose(a, b, atol=1e-5) for a, b in itertools.pairwise(contexts))


@pytest.mark.parametrize("alignment", ["dot", "scaled_dot"])
def test_unequal_widths_are_answered_with_what_to_do(alignment):
    fields = {"vocab_size": 43, "hidden_size": 16, "encoder_hidden_size": 5, "alignment": alignment}
    message = "needs queries and keys of one width, got 16 and 10: make them equal, or use 'bilinear' or 'additive'$"
    with pytest.raises(ValueError, match=message):
        RegardRecurrentModel(RegardRecurrentConfig(**fields))
    RegardRecurrentModel(RegardRecurrentConfig(**(fields | {"encoder_hidden_size": None})))


def test_an_unknown_alignment_is_answered_with_the_real_ones():
    with pytest.raises(ValueError, match="`alignment` \\('adition'\\) must be one of ") as error:
        RegardRecurrentConfig(alignment="adition")
    assert all(name in str(error.value) for name in (*ALIGNMENTS, "none"))


@every_alignment
def test_keys_are_projected_once_for_each_source(alignment, make_model, monkeypatch):
    model = make_model(GENERATOR, **alignment_fields(alignment))
    calls = []
    project = ALIGNMENTS[alignment].project_keys
    monkeypatch.setattr(
        ALIGNMENTS[alignment], "project_keys", lambda self, keys: calls.append(keys.shape) or project(self, keys)
    )
    source = ids(4, 7)
    model(source, MASK, ids(4, 5))
    assert calls == [(4, 7, 2 * model.config.encoder_hidden_size)]
    for beams in (1, 3):
        calls.clear()
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "num_beams": beams}
        cached = model.generate(source, attention_mask=MASK, **options)
        assert len(calls) == 1
        calls.clear()
        assert model.generate(source, attention_mask=MASK, use_cache=False, **options).equal(cached)
        assert len(calls) == 5


def test_the_settings_compute_different_things(make_model):
    source, target, outputs = ids(2, 7), ids(2, 5), []
    settings = itertools.product(["gru", "lstm"], [*ALIGNMENTS, "none"], [1, 2])
    for rnn_type, alignment, layers in settings:
        torch.manual_seed(5)
        model = make_model(
            GENERATOR, rnn_type=rnn_type, alignment=alignment, num_hidden_layers=layers, encoder_hidden_size=8
        )
        outputs.append(model(source, decoder_input_ids=target).logits)
    assert len(outputs) == 20
    assert not any(torch.allclose(a, b, atol=1e-4) for a, b in itertools.combinations(outputs, 2))


def test_recurrent_weights_start_orthogonal():
    """Of each gate, so that a state neither grows nor fades on its way."""
    model = RegardRecurrentModel(RegardRecurrentConfig(vocab_size=43, hidden_size=16, num_hidden_layers=2))
    modules = [module for module in model.modules() if isinstance(module, (nn.RNNBase, nn.RNNCellBase))]
    assert len(modules) == 6
    for module in modules:
        for name, values in module.named_parameters():
            if "weight_hh" in name:
                torch.testing.assert_close(values.T @ values, torch.eye(values.shape[1]), atol=1e-5, rtol=0)
            elif "bias" in name:
                assert (values == 0).all()


@pytest.mark.parametrize("rnn_type", ["gru", "lstm"])
@pytest.mark.parametrize("layers", [1, 3])
def test_hidden_states_are_the_embeddings_and_each_layer(rnn_type, layers, make_model):
    model = make_model(RegardRecurrentModel, rnn_type=rnn_type, num_hidden_layers=layers)
    source, target = ids(4, 7), ids(4, 5)
    outputs = model(source, MASK, target, output_hidden_states=True)
    assert [states.shape for states in outputs.encoder_hidden_states] == [(4, 7, 16)] + [(4, 7, 10)] * layers
    assert [states.shape for states in outputs.decoder_hidden_states] == [(4, 5, 16)] * (1 + layers)
    assert outputs.encoder_hidden_states[0].equal(model.encoder.tokens(source))
    assert outputs.encoder_hidden_states[-1].equal(outputs.encoder_last_hidden_state)
    assert outputs.decoder_hidden_states[0].equal(model.decoder.tokens(target))
    stepped = [[] for _ in range(layers)]
    cells = [module for module in model.modules() if isinstance(module, nn.RNNCellBase)]
    for cell, states in zip(cells, stepped, strict=True):
        cell.register_forward_hook(
            lambda module, args, output, states=states: states.append(output if rnn_type == "gru" else output[0])
        )
    model(source, MASK, target)
    for states, expected in zip(outputs.decoder_hidden_states[1:], stepped, strict=True):
        assert states.equal(torch.stack(expected, dim=1))


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def attended_loss(outputs) -> torch.Tensor:
    """Of what was written and of what was attended to, so that gradients come from both."""
    weights = outputs.cross_attentions[0] if outputs.cross_attentions else torch.zeros(1)
    return outputs.loss + weights.square().sum()


@pytest.fixture
def products(monkeypatch) -> list:
    """The shapes of the matrices that are shared by all steps."""
    made = []

    def share(matrix: torch.Tensor, bias: torch.Tensor | None = None) -> rnn_layers.Product:
        made.append(tuple(matrix.shape))
        return make(matrix, bias)

    make = rnn_layers.shared_product
    monkeypatch.setattr(rnn_layers, "shared_product", share)
    return made


@every_kind
@pytest.mark.parametrize("alignment", [*ALIGNMENTS, "none"])
@pytest.mark.parametrize("mask", [MASK, None], ids=["padding", "full"])
def test_training_computes_what_evaluation_does(rnn_type, layers, alignment, mask, make_model, products):
    model = make_model(
        GENERATOR,
        rnn_type=rnn_type,
        num_hidden_layers=layers,
        hidden_dropout_prob=0.0,
        **alignment_fields(alignment),
    )
    source, labels = ids(4, 7), ids(4, 5)
    labels[1, 3:] = -100

    def run():
        outputs = model(source, mask, labels=labels, output_attentions=True, output_hidden_states=True)
        return outputs, gradients(model, attended_loss(outputs))

    expected, expected_gradients = run()
    assert products == []
    model.train()
    outputs, actual_gradients = run()
    # Of each layer, two directions in the encoder, and input and state in the decoder.
    assert len(products) == 4 * layers + 1
    for name in ("logits", "encoder_hidden_states", "decoder_hidden_states", "cross_attentions"):
        torch.testing.assert_close(getattr(outputs, name), getattr(expected, name), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(actual_gradients, expected_gradients, atol=1e-6, rtol=1e-4)


def test_a_wrapped_step_makes_its_own_products(make_model, products):
    """Sharding wrappers pass attributes through, but have the weights in place only while they are called."""

    class Wrapper(nn.Module):
        def __init__(self, step: nn.Module) -> None:
            super().__init__()
            self.step = step

        def __getattr__(self, name: str):
            return super().__getattr__(name) if name == "step" else getattr(self.step, name)

        def forward(self, *args):
            return self.step(*args)

    model = make_model(GENERATOR, num_hidden_layers=1, hidden_dropout_prob=0.0).train()
    source, labels = ids(4, 7), ids(4, 5)
    expected = model(source, MASK, labels=labels).loss
    assert len(products) == 5
    products.clear()
    decoder = model.get_decoder()
    decoder.step = Wrapper(decoder.step)
    torch.testing.assert_close(model(source, MASK, labels=labels).loss, expected)
    # The encoder's.
    assert len(products) == 2


def test_padding_is_not_computed_in_training(make_model, monkeypatch):
    model = make_model(GENERATOR, num_hidden_layers=1).train()
    rows = []
    step = rnn_layers.GRU._step
    monkeypatch.setattr(rnn_layers.GRU, "_step", lambda *args: rows.append(len(args[0])) or step(*args))
    wider = F.pad(MASK[:3], (0, 2))
    model.get_encoder()(ids(3, 9), wider)
    # Three tokens, five and two.
    assert rows == [3, 3, 2, 1, 1] * 2
    rows.clear()
    model.get_encoder()(ids(3, 9))
    assert rows == [3] * 18


@every_kind
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_steps_computed_again_give_the_same_gradients(rnn_type, layers, reentrant, make_model):
    model = make_model(GENERATOR, rnn_type=rnn_type, num_hidden_layers=layers, hidden_dropout_prob=0.3).train()
    source, labels = ids(4, 7), ids(4, 5)

    def run():
        model.zero_grad()
        torch.manual_seed(3)
        # The re-entrant kind knows of no `torch.autograd.grad`.
        attended_loss(model(source, MASK, labels=labels, output_attentions=True)).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = run()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    torch.testing.assert_close(run(), expected, atol=1e-6, rtol=1e-5)


def test_it_trains_in_mixed_precision(make_model, products):
    model = make_model(GENERATOR, hidden_dropout_prob=0.0).train()
    source, labels = ids(4, 7), ids(4, 5)
    expected = model(source, MASK, labels=labels).loss
    products.clear()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(source, MASK, labels=labels).loss
    assert products == []
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    torch.testing.assert_close(loss, expected, atol=0.05, rtol=0)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("trained", ["all", "query", "keys"])
def test_additive_scores_are_those_of_the_tanh(queries, trained):
    alignment = AdditiveAlignment(6, 3, 5)
    query, keys = torch.randn(2, queries, 6, requires_grad=True), torch.randn(2, 7, 3, requires_grad=True)
    alignment.requires_grad_(trained == "all")
    wanted = {"all": [query, keys, *alignment.parameters()], "query": [query], "keys": [keys]}[trained]
    matched = torch.tanh(alignment.query(query).unsqueeze(2) + alignment.key(keys).unsqueeze(1))
    expected = alignment.score(matched).squeeze(-1)
    actual = alignment(query, alignment.project_keys(keys))
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
    weights = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad((actual * weights).sum(), wanted),
        torch.autograd.grad((expected * weights).sum(), wanted),
        atol=1e-5,
        rtol=1e-5,
    )


def test_additive_scores_keep_none_of_what_they_match():
    alignment = AdditiveAlignment(6, 3, 5)
    query, keys = torch.randn(2, 4, 6), torch.randn(2, 7, 5)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.numel()) or saved, lambda x: x):
        alignment(query, keys)
    assert max(kept) == keys.numel()


def test_a_layer_with_more_to_it_scores_as_it_does():
    alignment = AdditiveAlignment(6, 3, 5)
    query, keys = torch.randn(2, 4, 6), torch.randn(2, 7, 5)
    expected = alignment(query, keys)
    alignment.score.register_forward_hook(lambda module, args, output: 3 * output)
    torch.testing.assert_close(alignment(query, keys), 3 * expected, atol=1e-5, rtol=1e-5)


def test_one_rows_keys_serve_all_rows():
    alignment = AdditiveAlignment(6, 3, 5)
    query, keys = torch.randn(4, 2, 6), torch.randn(1, 7, 5)
    torch.testing.assert_close(alignment(query, keys), alignment(query, keys.expand(4, 7, 5)), atol=1e-6, rtol=1e-6)
