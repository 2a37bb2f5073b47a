import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, set_seed

import regard
from regard.commands.generate import generate_text
from regard.loading import for_generation, load_network
from regard.modeling.decoder import RegardDecoderForCausalLM

PROMPT = "The river"
FAMILIES = ["transformer", "recurrent"]


@pytest.fixture
def generate(decoder_folder):
    """Generates with the decoder of the tiny run."""

    def run(prompt: str = PROMPT, **options) -> str:
        return generate_text(prompt, decoder_folder, **options)

    return run


@pytest.fixture
def expected(decoder_folder):
    """What the decoder's own `generate()` makes of the prompt."""
    model = AutoModelForCausalLM.from_pretrained(decoder_folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(decoder_folder / "model")

    def run(prompt: str = PROMPT, seed: int | None = None, **options) -> str:
        if seed is not None:
            set_seed(seed)
        ids = model.generate(**tokenizer(prompt, return_tensors="pt"), **options)
        return tokenizer.decode(ids[0], skip_special_tokens=True)

    return run


@pytest.fixture
def asked(monkeypatch):
    """Gathers what the decoder's `generate()` is asked for from now on, and the ids that it gives."""
    seen = []
    whole = RegardDecoderForCausalLM.generate

    def generate(self, *args, **options):
        ids = whole(self, *args, **options)
        seen.append((options, ids))
        return ids

    monkeypatch.setattr(RegardDecoderForCausalLM, "generate", generate)
    return seen


def test_the_face_of_the_package():
    assert regard.generate_text is generate_text


# Decoders


@pytest.mark.parametrize("options", [{}, {"sample": False}, {"beams": 3}, {"top_k": 0, "top_p": 1.0}])
def test_a_decoder_goes_on_from_its_prompt(generate, options):
    for prompt in (PROMPT, "  spaced  out\n", "Ünseen 河"):
        text = generate(prompt, max_new_tokens=9, **options)
        assert text.startswith(prompt)
        assert len(text) > len(prompt)
        assert "<s>" not in text


@pytest.mark.parametrize("tokens", [1, 7])
def test_without_drawing_the_most_probable_token_is_taken(generate, expected, tokens):
    text = generate(sample=False, max_new_tokens=tokens)
    assert text == expected(do_sample=False, max_new_tokens=tokens)
    # What the draw would go by plays no part.
    assert generate(sample=False, max_new_tokens=tokens, temperature=3.0, top_k=2, seed=8) == text


@pytest.mark.parametrize("sample", [True, False])
def test_beams_search_instead_of_drawing(generate, expected, sample):
    found = {beams: generate(sample=sample, max_new_tokens=9, beams=beams, seed=4) for beams in (2, 4)}
    for beams, text in found.items():
        assert text == expected(do_sample=False, num_beams=beams, max_new_tokens=9)


def test_the_draw_is_that_of_the_model(generate, expected):
    options = {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "max_new_tokens": 9}
    for seed in (0, 5):
        assert generate(seed=seed, **options) == expected(seed=seed, do_sample=True, **options)


def test_a_seed_repeats_the_draw_and_another_draws_anew(generate):
    texts = [generate(seed=seed) for seed in (3, 4, 3)]
    assert texts[0] == texts[2] != texts[1]
    assert generate() != generate()


def test_options_of_the_draw(generate):
    greedy = generate(sample=False, max_new_tokens=9)
    plain = generate(seed=1, max_new_tokens=9)
    assert plain != greedy
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        assert generate(seed=1, max_new_tokens=9, **narrow) == greedy
    for wide in ({"top_k": 3}, {"top_p": 0.3}, {"temperature": 5.0}):
        assert generate(seed=1, max_new_tokens=9, **wide) not in (plain, greedy)


def test_zero_draws_among_all_tokens(generate, asked):
    for seed in range(3):
        generate(seed=seed, top_k=0, top_p=1.0, temperature=100.0)
        generate(seed=seed, top_k=5, top_p=1.0, temperature=100.0)
    # As good as uniform, so that over 50 tokens are met if nothing bars them.
    drawn = [set(ids[0].tolist()) for _, ids in asked]
    assert len(set.union(*drawn[::2])) > 50
    for _, ids in asked[1::2]:
        assert len(set(ids[0].tolist())) < 25


# Lengths


@pytest.mark.parametrize("tokens", [1, 5])
def test_no_more_tokens_than_asked_for(generate, asked, decoder_folder, tokens):
    generate(max_new_tokens=tokens, sample=False)
    ((_, ids),) = asked
    assert ids.shape[1] == len(AutoTokenizer.from_pretrained(decoder_folder / "model")(PROMPT)["input_ids"]) + tokens


@pytest.mark.parametrize("tokens", [None, 1_000])
@pytest.mark.parametrize("words", [1, 3])
def test_no_more_tokens_than_there_are_positions(generate, asked, decoder_folder, words, tokens):
    prompt = "river " * words
    begun = len(AutoTokenizer.from_pretrained(decoder_folder / "model")(prompt)["input_ids"])
    generate(prompt, max_new_tokens=tokens)
    ((options, ids),) = asked
    assert options["max_new_tokens"] == 32 - begun
    assert ids.shape[1] <= 32


def test_a_prompt_that_leaves_no_room(generate, decoder_folder):
    tokenizer = AutoTokenizer.from_pretrained(decoder_folder / "model")
    prompt = next("=" * n for n in range(1, 99) if len(tokenizer("=" * n)["input_ids"]) == 31)
    assert generate(prompt).startswith(prompt)
    prompt += "="
    assert len(tokenizer(prompt)["input_ids"]) == 32
    with pytest.raises(ValueError, match=r"^`prompt` has 32 tokens, and the model has room for 32: shorten it$"):
        generate(prompt)


# Encoder-decoders


@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_decoder_rewrites_its_source(trained, family):
    folder = trained(family)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    source = "the river near a door"
    inputs = tokenizer(source, return_tensors="pt")
    with torch.no_grad():
        for given, own in (({}, {}), ({"beams": 3}, {"num_beams": 3}), ({"max_new_tokens": 4}, {"max_new_tokens": 4})):
            ids = model.generate(**inputs, do_sample=False, **own)
            text = generate_text(source, folder, **given)
            assert text == tokenizer.decode(ids[0], skip_special_tokens=True)
    # Nothing is drawn.
    assert generate_text(source, folder, seed=1) == generate_text(source, folder, seed=2, temperature=5.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_as_long_as_were_trained_on(trained, family):
    model, _ = load_network(trained(family), for_generation)
    # transformers' own default is 20.
    assert model.generation_config.max_new_tokens == 32
    assert isinstance(generate_text("the river", trained(family), max_new_tokens=1_000), str)


def test_a_source_that_is_too_long(trained):
    with pytest.raises(ValueError, match=r"100 > 32 \(`max_position_embeddings`\)|101 > 32"):
        generate_text("r" * 100, trained("transformer"))


# What goes wrong


@pytest.mark.parametrize("prompt", ["", "  \n\t"])
@pytest.mark.parametrize("family", ["decoder", *FAMILIES])
def test_an_empty_prompt(trained, family, prompt):
    with pytest.raises(ValueError, match=r"^`prompt` is empty: .*$"):
        generate_text(prompt, trained(family))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_new_tokens": 0}, r"`max_new_tokens` \(0\) must be at least 1"),
        ({"max_new_tokens": -2}, r"`max_new_tokens` \(-2\) must be at least 1"),
        ({"temperature": 0.0}, r"`temperature` \(0.0\) must be at least 1e-06, and finite"),
        ({"temperature": -1.0}, r"`temperature` \(-1.0\) must be at least 1e-06, and finite"),
        ({"temperature": 5e-324}, r"`temperature` \(5e-324\) must be at least 1e-06, and finite"),
        ({"temperature": float("nan")}, r"`temperature` \(nan\) must be at least 1e-06, and finite"),
        ({"temperature": float("inf")}, r"`temperature` \(inf\) must be at least 1e-06, and finite"),
        ({"top_k": -1}, r"`top_k` \(-1\) must be at least 0"),
        ({"top_p": 0.0}, r"`top_p` \(0.0\) must be more than 0 and at most 1"),
        ({"top_p": 1.01}, r"`top_p` \(1.01\) must be more than 0 and at most 1"),
        ({"beams": 0}, r"`beams` \(0\) must be at least 1 and at most 1000"),
        ({"beams": 2**31}, r"`beams` \(2147483648\) must be at least 1 and at most 1000"),
        ({"seed": -1}, r"`seed` \(-1\) must be at least 0 and less than 2\*\*32"),
        ({"seed": 2**32}, r"`seed` \(4294967296\) must be at least 0 and less than 2\*\*32"),
    ],
)
def test_options_out_of_range(generate, given, expected):
    with pytest.raises(ValueError, match=f"^{expected}$"):
        generate(**given)


def test_a_model_that_does_not_generate(run_folder):
    for folder in (run_folder, run_folder / "model"):
        with pytest.raises(ValueError, match=r"is a 'regard_bert', but only regard_decoder, .*generate$"):
            generate_text("The river", folder)


def test_run_and_model_folders(decoder_folder, generate):
    expected = generate(seed=2)
    for folder in (decoder_folder / "model", str(decoder_folder), str(decoder_folder / "model")):
        assert generate_text(PROMPT, folder, seed=2) == expected


def test_a_run_that_has_not_ended(decoder_folder, tmp_path):
    shutil.copytree(decoder_folder, tmp_path / "run", ignore=shutil.ignore_patterns("model"))
    with pytest.raises(ValueError, match=r"holds no model: the run may not have ended"):
        generate_text(PROMPT, tmp_path / "run")


@pytest.mark.parametrize("name", ["runs/none", "none"])
def test_no_such_model(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^`model` \({name}\) is no folder here"):
        generate_text(PROMPT, name)


def test_the_default_is_the_run_of_the_default_folder(decoder_folder, tmp_path, monkeypatch):
    shutil.copytree(decoder_folder, tmp_path / "runs" / "decoder")
    monkeypatch.chdir(tmp_path)
    assert generate_text(PROMPT, sample=False).startswith(PROMPT)
