"""`generate` of every family: with a cache and without, alone and in a batch, greedy and with beams."""

import itertools

import pytest
import torch
from transformers import EncoderDecoderCache, StaticCache

from regard import (
    RegardDecoderForCausalLM,
    RegardRecurrentForConditionalGeneration,
    RegardTransformerForConditionalGeneration,
)
from regard.modeling.cpu import linear as linear_layers

DECODER = RegardDecoderForCausalLM
TRANSFORMER = RegardTransformerForConditionalGeneration
RECURRENT = RegardRecurrentForConditionalGeneration
PROMPT_LENGTHS = (1, 5, 3, 2, 4)
PAD = 0


def by_name(value) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


every_generator = pytest.mark.parametrize("generator", [DECODER, TRANSFORMER, RECURRENT], ids=by_name)
every_search = pytest.mark.parametrize("beams", [1, 3], ids=["greedy", "beams"])


def prompts(vocab_size: int) -> list[torch.Tensor]:
    return [torch.randint(5, vocab_size, (length,)) for length in PROMPT_LENGTHS]


def padded(rows: list[torch.Tensor], side: str) -> dict[str, torch.Tensor]:
    length = max(map(len, rows))
    batch = {
        "input_ids": torch.full((len(rows), length), PAD),
        "attention_mask": torch.zeros(len(rows), length).long(),
    }
    for index, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(length - len(row), length)
        batch["input_ids"][index, place], batch["attention_mask"][index, place] = row, 1
    return batch


def write(model, batch, tokens: int = 6, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """The new tokens (rows, tokens), and their scores: each step's logits, or with beams one score a row."""
    out = model.generate(
        **batch,
        max_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    start = 1 if model.config.is_encoder_decoder else batch["input_ids"].shape[1]
    scores = torch.stack(out.logits, dim=1) if out.get("sequences_scores") is None else out.sequences_scores
    return out.sequences[:, start:], scores


@pytest.fixture
def make_generator(make_model):
    """A tiny model that writes until it is stopped, and not the same whatever it has read."""

    def make(generator, *args, **fields):
        model = make_model(generator, *args, **({"eos_token_id": None} | fields))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4 if parameter.dim() > 1 else 0.5)
        return model

    return make


@every_generator
def test_the_fast_kernel_writes_the_same(generator, make_generator, monkeypatch):
    model = make_generator(generator)
    batch = padded(prompts(model.config.vocab_size), side="left")
    expected = write(model, batch)
    products, product = [], linear_layers._product
    monkeypatch.setattr(linear_layers, "_product", lambda *args: products.append(args) or product(*args))
    monkeypatch.setattr(linear_layers, "_WORTHWHILE", 0)
    tokens, scores = write(model, batch)
    assert bool(products) == torch.backends.mkldnn.is_available()
    assert tokens.equal(expected[0])
    torch.testing.assert_close(scores, expected[1], atol=1e-5, rtol=1e-4)


@every_generator
@every_search
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_with_a_cache_as_without(generator, beams, cache, make_generator):
    if generator is RECURRENT and cache == "static":
        pytest.skip("keeps a state, not keys and values")
    for kernel in ("eager", "sdpa") if generator is not RECURRENT else ("eager",):
        model = make_generator(generator, kernel)
        batch = padded(prompts(model.config.vocab_size), "left")
        expected, scores = write(model, batch, num_beams=beams, use_cache=False)
        read = []
        hook = model.get_decoder().register_forward_pre_hook(
            lambda module, args, kwargs, read=read: read.append((args or kwargs["input_ids"])[0].shape[-1]),
            with_kwargs=True,
        )
        options = {} if cache == "dynamic" else {"cache_implementation": "static"}
        actual, same_scores = write(model, batch, num_beams=beams, **options)
        hook.remove()
        assert actual.equal(expected)
        torch.testing.assert_close(same_scores, scores, atol=1e-5, rtol=0)
        assert actual.shape == (5, 6)
        assert len({tuple(row.tolist()) for row in actual}) > 1
        # After the prompt one token at a time.
        assert read[1:] == [1] * 5


@pytest.mark.parametrize("generator", [DECODER, TRANSFORMER], ids=by_name)
def test_the_static_cache_is_one(generator, make_generator):
    model = make_generator(generator)
    batch = padded(prompts(model.config.vocab_size), "left")
    out = model.generate(
        **batch, max_new_tokens=3, do_sample=False, cache_implementation="static", return_dict_in_generate=True
    )
    cache = out.past_key_values if "past_key_values" in type(out).__dataclass_fields__ else out.cache
    if generator is TRANSFORMER:
        assert type(cache) is EncoderDecoderCache
        assert type(cache.cross_attention_cache) is StaticCache
        cache = cache.self_attention_cache
    assert type(cache) is StaticCache


@every_generator
@every_search
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
def test_a_batch_writes_what_each_row_would(generator, beams, side, use_cache, make_generator):
    if generator is DECODER and side == "right":
        pytest.skip("goes on after a prompt, so that the prompt must end where the batch does")
    model = make_generator(generator)
    rows = prompts(model.config.vocab_size)
    together, scores = write(model, padded(rows, side), num_beams=beams, use_cache=use_cache)
    for index, row in enumerate(rows):
        one, own_scores = write(model, padded([row], side), num_beams=beams, use_cache=use_cache)
        assert together[index].tolist() == one[0].tolist()
        torch.testing.assert_close(scores[index], own_scores[0], atol=1e-4, rtol=0)
    assert len({tuple(row.tolist()) for row in together}) > 1


@every_generator
@every_search
def test_rows_that_end_early_leave_the_others_alone(generator, beams, make_generator):
    model = make_generator(generator)
    rows = prompts(model.config.vocab_size)
    written, _ = write(model, padded(rows, "left"))
    # A token that some rows write at different places.
    counts = {token: (written == token).any(dim=1).sum().item() for token in written.unique().tolist()}
    end = next(token for token, count in counts.items() if 0 < count < 5)
    options = {"num_beams": beams, "eos_token_id": end, "pad_token_id": PAD}
    together, _ = write(model, padded(rows, "left"), **options)
    lengths = set()
    for index, row in enumerate(rows):
        one = write(model, padded([row], "left"), **options)[0][0].tolist()
        assert together[index].tolist()[: len(one)] == one
        # Beam search takes a padding id of 0 for none, and fills with the end.
        assert set(together[index].tolist()[len(one) :]) <= {PAD if beams == 1 else end}
        lengths.add(len(one))
    assert beams > 1 or len(lengths) > 1


def exhaustive(model, batch, length: int, end: int | None) -> dict[tuple[int, ...], float]:
    """The log-probability of every continuation up to `length`, or to the end token."""
    source = batch["input_ids"]
    scores = {}
    for words in itertools.product(range(model.config.vocab_size), repeat=length):
        if end in words:
            words = words[: words.index(end) + 1]
        target = torch.tensor([words])
        if model.config.is_encoder_decoder:
            started = torch.cat([torch.tensor([[model.config.decoder_start_token_id]]), target], dim=1)
            logits = model(**batch, decoder_input_ids=started).logits[:, :-1]
        else:
            logits = model(torch.cat([source, target], dim=1)).logits[:, source.shape[1] - 1 : -1]
        chosen = logits.log_softmax(dim=-1).gather(-1, target.unsqueeze(-1))
        scores[words] = chosen.sum().item()
    return scores


@every_generator
@pytest.mark.parametrize("end", [None, 3])
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
def test_beam_search_finds_the_best_of_all(generator, end, use_cache, make_generator):
    """On four words and three steps, with as many beams as there are continuations of two."""
    model = make_generator(generator, vocab_size=4)
    batch = {"input_ids": torch.tensor([[2, 1, 2]]), "attention_mask": torch.ones(1, 3).long()}
    with torch.no_grad():
        scores = exhaustive(model, batch, 3, end)
    assert len(scores) == (64 if end is None else 27 + 9 + 3 + 1)
    out = model.generate(
        **batch,
        max_new_tokens=3,
        num_beams=16,
        num_return_sequences=5,
        do_sample=False,
        length_penalty=0.0,
        early_stopping="never",
        eos_token_id=end,
        use_cache=use_cache,
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = sorted(scores, key=scores.get, reverse=True)[:5]
    found = out.sequences[:, 1 if model.config.is_encoder_decoder else 3 :].tolist()
    cut = [row[: row.index(end) + 1] if end in row else row for row in found]
    expected = torch.tensor([scores[words] for words in best])
    torch.testing.assert_close(out.sequences_scores, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor([scores[tuple(row)] for row in cut]), expected, atol=1e-4, rtol=0)
    assert len({tuple(row) for row in cut}) == 5


@every_generator
def test_generate_shows_real_weights(generator, make_generator, tmp_path):
    """Of a model that was loaded without a word about kernels; the same as when the text is given."""
    make_generator(generator).save_pretrained(tmp_path)
    model = generator.from_pretrained(tmp_path)
    kernel = "eager" if generator is RECURRENT else "sdpa"
    assert model.config._attn_implementation == kernel
    batch = padded(prompts(model.config.vocab_size), "left")
    options = {"max_new_tokens": 4, "do_sample": False, "output_attentions": True, "return_dict_in_generate": True}
    out = model.generate(**batch, **options)
    assert model.config._attn_implementation == kernel
    mask = batch["attention_mask"]
    if generator is DECODER:
        full_mask = torch.cat([mask, torch.ones(5, 3).long()], dim=1)
        full = model(out.sequences[:, :-1], attention_mask=full_mask, output_attentions=True)
        names = {"attentions": full_mask}
    else:
        full = model(**batch, decoder_input_ids=out.sequences[:, :-1], output_attentions=True)
        names = {"cross_attentions": mask}
        if generator is TRANSFORMER:
            names["decoder_attentions"] = torch.ones(5, 4)
    for name, keys in names.items():
        steps = out[name]
        assert len(steps) == 4
        for layer, expected in enumerate(full[name]):
            # Each step's new rows, in a grid as wide as the last.
            parts = [step[layer] for step in steps]
            grid = torch.cat([torch.nn.functional.pad(part, (0, keys.shape[1] - part.shape[-1])) for part in parts], 2)
            torch.testing.assert_close(grid, expected, atol=1e-5, rtol=0)
            assert (grid.transpose(1, 3)[keys == 0] == 0).all()
            torch.testing.assert_close(grid[:, :, -4:].sum(dim=-1), torch.ones_like(grid[:, :, -4:, 0]))
        assert all(len(step) == len(full[name]) for step in steps)
    if generator is TRANSFORMER:
        assert len(out.encoder_attentions) == model.config.num_hidden_layers
        assert all(weights.shape == (5, 3, 5, 5) for weights in out.encoder_attentions)
    # Without asking there are none.
    plain = model.generate(**batch, **(options | {"output_attentions": False}))
    assert plain.sequences.equal(out.sequences)
    assert all(plain.get(name) is None for name in names)


@pytest.mark.parametrize("generator", [DECODER, TRANSFORMER], ids=by_name)
@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"cache_implementation": "static"}], ids=str)
def test_beyond_the_last_position_is_an_error(generator, options, make_generator):
    model = make_generator(generator)
    limit = model.config.max_position_embeddings
    batch = {"input_ids": torch.randint(5, 30, (2, 4)), "attention_mask": torch.ones(2, 4).long()}
    # The last token that is written is not read.
    tokens = limit + 1 - (1 if model.config.is_encoder_decoder else 4)
    assert model.generate(**batch, max_new_tokens=tokens, do_sample=False, **options).shape == (2, limit + 1)
    message = rf"{limit + 1} > {limit} \(`max_position_embeddings`\)"
    with pytest.raises(ValueError, match=message) as error:
        model.generate(**batch, max_new_tokens=tokens + 1, do_sample=False, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("generator", [TRANSFORMER, RECURRENT], ids=by_name)
def test_the_source_is_encoded_once(generator, make_generator):
    model = make_generator(generator)
    calls = []
    model.get_encoder().register_forward_hook(lambda module, args, output: calls.append(1))
    write(model, padded(prompts(model.config.vocab_size), "right"), num_beams=3)
    assert len(calls) == 1


def test_the_memory_is_projected_once(make_generator):
    model = make_generator(TRANSFORMER)
    calls = []
    for name, module in model.named_modules():
        if name.endswith("cross_attention.key_value"):
            module.register_forward_hook(lambda module, args, output: calls.append(1))
    batch = padded(prompts(model.config.vocab_size), "right")
    write(model, batch)
    assert len(calls) == model.config.num_decoder_layers
    calls.clear()
    write(model, batch, use_cache=False)
    assert len(calls) == 6 * model.config.num_decoder_layers


@every_generator
def test_a_cache_may_be_given_and_gone_on_with(generator, make_generator):
    """Reading in two parts, each with what the first left behind."""
    model = make_generator(generator)
    ids = torch.randint(5, model.config.vocab_size, (3, 7))
    if generator is DECODER:
        given, name = {}, "input_ids"
    else:
        given, name = padded(prompts(model.config.vocab_size)[:3], "right"), "decoder_input_ids"
    whole = model(**given, **{name: ids}).logits
    first = model(**given, **{name: ids[:, :4]}, use_cache=True)
    cache = first.past_key_values if "past_key_values" in type(first).__dataclass_fields__ else first.cache
    assert cache.get_seq_length() == 4
    second = model(**given, **{name: ids[:, 4:]}, cache=cache, use_cache=True)
    assert cache.get_seq_length() == 7
    torch.testing.assert_close(torch.cat([first.logits, second.logits], dim=1), whole, atol=1e-5, rtol=0)
