"""Exported checkpoints: what stock transformers makes of them, in this process and in one without the package."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel

from regard.configuration.bert import RegardBertConfig
from regard.configuration.captioner import RegardCaptionerConfig
from regard.configuration.decoder import RegardDecoderConfig
from regard.configuration.recurrent import RegardRecurrentConfig
from regard.configuration.transformer import RegardTransformerConfig
from regard.sharing.export import export_model
from regard.tokenization.byte_level import train_byte_level
from regard.tokenization.characters import train_characters
from regard.tokenization.generative import save_tokenizer
from regard.tokenization.wordpiece import train_wordpiece
from tests.support.families import FAMILIES
from tests.support.fresh import run_python

TEXTS = ["The cat sat, and the cat ran.", "Élan: the 3 cats' hats; a mat.", "a  b\nc  10 Nov. 2026"] * 3
BERT_HEADS = FAMILIES[RegardBertConfig]

# Fields, and the architecture that they become.
DECODERS = [
    ({"norm_position": "pre", "position_embedding_type": "learned"}, "gpt2"),
    ({"norm_position": "pre", "position_embedding_type": "sinusoidal"}, "gpt2"),
    ({"norm_position": "pre", "tie_word_embeddings": False, "layer_norm_eps": 1e-3}, "gpt2"),
    ({"norm_position": "post", "position_embedding_type": "learned"}, "opt"),
    ({"norm_position": "post", "position_embedding_type": "sinusoidal", "tie_word_embeddings": False}, "opt"),
]
TRANSFORMERS = [
    ({"norm_position": "post", "position_embedding_type": "sinusoidal"}, "marian"),
    ({"norm_position": "post", "tie_word_embeddings": False, "scale_embedding": False}, "marian"),
    ({"norm_position": "pre", "position_embedding_type": "sinusoidal"}, "pegasus"),
    ({"norm_position": "pre", "position_embedding_type": "learned"}, "blenderbot"),
    ({"norm_position": "pre", "position_embedding_type": "learned", "scale_embedding": False}, "blenderbot"),
]


@pytest.fixture(scope="module")
def tokenizers() -> dict:
    """A tokenizer of each kind, by the family that it is for."""
    return {
        "regard_bert": train_wordpiece(TEXTS, vocab_size=70, min_frequency=1),
        "regard_decoder": train_byte_level(TEXTS, vocab_size=270),
        "regard_transformer": train_characters(TEXTS),
    }


def fields_of(config_class: type, vocab_size: int) -> dict:
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 18,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 23,
        "max_position_embeddings": 37,
        # Not transformers' default, gelu_new or relu.
        "hidden_act": "silu",
    }
    return (
        sizes
        | {
            RegardBertConfig: {"type_vocab_size": 3, "layer_norm_eps": 1e-3},
            RegardDecoderConfig: {"eos_token_id": 5},
            RegardTransformerConfig: {"num_decoder_layers": 3, "decoder_start_token_id": 3, "label_smoothing": 0.1},
        }[config_class]
    )


@pytest.fixture
def save_model(tokenizers, tmp_path):
    """Saves a model with random weights and its tokenizer, and gives back both the model and the folder."""

    def save(model_class: type[PreTrainedModel], folder: Path = tmp_path / "ours", **fields):
        config_class: type[PreTrainedConfig] = model_class.config_class
        tokenizer = tokenizers[config_class.model_type]
        model = model_class(config_class(**fields_of(config_class, len(tokenizer)) | fields)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        model.save_pretrained(folder)
        save_tokenizer(tokenizer, folder)
        return model, folder

    return save


def padded_batch(vocab_size: int) -> dict[str, torch.Tensor]:
    mask = (torch.arange(11) < torch.tensor([[11], [7], [4]])).long()
    return {"input_ids": torch.randint(6, vocab_size, mask.shape) * mask, "attention_mask": mask}


def load_stock(auto_class: str, folder: Path, kernel: str) -> PreTrainedModel:
    stock, report = getattr(transformers, auto_class).from_pretrained(
        folder, attn_implementation=kernel, output_loading_info=True
    )
    assert not any(report.values())
    assert type(stock).__module__.startswith("transformers.models.")
    return stock


def assert_same(ours: PreTrainedModel, auto_class: str, folder: Path, inputs: dict, padded: tuple[str, ...] = ()):
    """Every output of the stock model is ours; of those in `padded`, what stands on padding means nothing.

    In double precision, where another order of the same sums makes no difference to speak of.
    """
    ours.double()
    for kernel in ("eager", "sdpa"):
        stock = load_stock(auto_class, folder, kernel).double()
        ours.set_attn_implementation(kernel)
        with torch.no_grad():
            expected, actual = ours(**inputs), stock(**inputs)
        # OPT takes its softmax in single precision there.
        tolerance = 1e-5 if (stock.config.model_type, kernel) == ("opt", "eager") else 1e-11
        tensors = {name: value for name, value in expected.items() if isinstance(value, torch.Tensor)}
        assert tensors
        for name, tensor in tensors.items():
            rows = inputs["attention_mask"].bool() if name in padded else ...
            torch.testing.assert_close(actual[name][rows], tensor[rows], atol=tolerance, rtol=tolerance)


def assert_same_tokens(ours: PreTrainedModel, auto_class: str, folder: Path, inputs: dict):
    """Greedy generation gives the same tokens, all of them different, which random models do not do of themselves."""
    stock = load_stock(auto_class, folder, "sdpa").to(ours.dtype)
    options = {"do_sample": False, "no_repeat_ngram_size": 1, "max_new_tokens": 13, "min_new_tokens": 13}
    expected, actual = (model.generate(**inputs, **options) for model in (ours, stock))
    assert actual.equal(expected)
    assert len(set(expected[0, -13:].tolist())) == 13


@pytest.mark.parametrize("auto_class", BERT_HEADS)
def test_every_bert_head(auto_class, save_model, tmp_path):
    # Stock BERT answers questions with as many outputs as there are labels, and needs two.
    fields = {} if auto_class == "AutoModelForQuestionAnswering" else {"num_labels": 5}
    ours, folder = save_model(BERT_HEADS[auto_class], **fields)
    assert export_model(str(folder), tmp_path / "stock") == tmp_path / "stock"
    batch = padded_batch(ours.config.vocab_size)
    batch["token_type_ids"] = torch.randint(0, 3, batch["input_ids"].shape)
    if auto_class == "AutoModelForMultipleChoice":
        batch = {name: tensor.repeat(2, 1, 1) for name, tensor in batch.items()}
    assert_same(ours, auto_class, tmp_path / "stock", batch)
    config = json.loads((tmp_path / "stock/config.json").read_text())
    assert (config["model_type"], config["architectures"]) == (
        "bert",
        [type(ours).__name__.removeprefix("Regard")],
    )
    assert load_file(tmp_path / "stock/model.safetensors").keys() == load_file(folder / "model.safetensors").keys()


def test_an_untied_bert_in_half_precision(save_model, tmp_path):
    ours, folder = save_model(BERT_HEADS["AutoModelForMaskedLM"], tie_word_embeddings=False)
    ours.to(torch.bfloat16).save_pretrained(folder)
    export_model(folder, tmp_path / "stock")
    assert load_stock("AutoModelForMaskedLM", tmp_path / "stock", "sdpa").dtype == torch.bfloat16
    assert_same(ours, "AutoModelForMaskedLM", tmp_path / "stock", padded_batch(ours.config.vocab_size))


def test_an_exported_bert_gives_the_same_to_the_bit(save_model, tmp_path):
    # Where the width of a head is a power of four, scores may be scaled before or after they are summed.
    fields = {"hidden_size": 32, "num_attention_heads": 2}
    ours, folder = save_model(BERT_HEADS["AutoModelForPreTraining"], **fields)
    export_model(folder, tmp_path / "stock")
    # Where weights lie in memory may change the last bit of a product, so both are loaded.
    ours = BERT_HEADS["AutoModelForPreTraining"].from_pretrained(folder).eval()
    stock = load_stock("AutoModelForPreTraining", tmp_path / "stock", "sdpa").eval()
    batch = padded_batch(ours.config.vocab_size)
    with torch.no_grad():
        expected, actual = ours(**batch), stock(**batch)
    real = batch["attention_mask"].bool()
    assert actual.prediction_logits[real].equal(expected.prediction_logits[real])
    assert actual.seq_relationship_logits.equal(expected.seq_relationship_logits)


WITH_ADDED_TOKENS = [
    *((RegardBertConfig, "AutoModelForMaskedLM", {"tie_word_embeddings": tie}) for tie in (True, False)),
    *((RegardBertConfig, "AutoModelForPreTraining", {"tie_word_embeddings": tie}) for tie in (True, False)),
    *((RegardDecoderConfig, "AutoModelForCausalLM", fields) for fields, _ in DECODERS),
    *((RegardTransformerConfig, "AutoModelForSeq2SeqLM", fields) for fields, _ in TRANSFORMERS),
]


@pytest.mark.parametrize(("config_class", "auto_class", "fields"), WITH_ADDED_TOKENS)
def test_added_tokens_and_resized_embeddings(config_class, auto_class, fields, save_model, tmp_path):
    ours, folder = save_model(FAMILIES[config_class][auto_class], **fields)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = len(tokenizer)
    tokenizer.add_tokens(["<extra>", "<more>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<entity>"]})
    ours.resize_token_embeddings(len(tokenizer))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    ours.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    stock = load_stock(auto_class, export_model(folder, tmp_path / "stock"), "sdpa")
    assert stock.config.vocab_size == stock.get_input_embeddings().num_embeddings == before + 3
    is_tied = fields.get("tie_word_embeddings", True)
    assert (stock.get_output_embeddings().weight is stock.get_input_embeddings().weight) == is_tied
    text = "The cat <extra> sat, <entity> and <more>"
    batch = dict(AutoTokenizer.from_pretrained(tmp_path / "stock")([text], return_tensors="pt"))
    assert batch["input_ids"].tolist() == tokenizer([text])["input_ids"]
    assert {before, before + 1, before + 2} <= set(batch["input_ids"][0].tolist())
    if ours.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"].flip(1)
    assert_same(ours, auto_class, tmp_path / "stock", batch)


def test_sentence_transformers_take_an_exported_encoder(save_model, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    ours, folder = save_model(BERT_HEADS["AutoModel"])
    export_model(folder, tmp_path / "stock")
    encoder = sentence_transformers.SentenceTransformer(str(tmp_path / "stock"), device="cpu")
    inputs = AutoTokenizer.from_pretrained(folder)(["the cat sat"], return_tensors="pt")
    with torch.no_grad():
        mean = ours(**inputs).last_hidden_state.mean(dim=1)
    torch.testing.assert_close(torch.from_numpy(encoder.encode(["the cat sat"])), mean, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("fields", "model_type"), DECODERS)
@pytest.mark.parametrize("auto_class", FAMILIES[RegardDecoderConfig])
def test_decoders(auto_class, fields, model_type, save_model, tmp_path):
    ours, folder = save_model(FAMILIES[RegardDecoderConfig][auto_class], **fields)
    export_model(folder, tmp_path / "stock")
    assert AutoConfig.from_pretrained(tmp_path / "stock").model_type == model_type
    batch = padded_batch(ours.config.vocab_size)
    assert_same(ours, auto_class, tmp_path / "stock", batch, padded=("last_hidden_state", "logits"))
    if ours.can_generate():
        # A decoder goes on from the end of each row.
        left = {name: tensor.flip(1) for name, tensor in batch.items()}
        assert_same_tokens(ours, auto_class, tmp_path / "stock", left)


@pytest.mark.parametrize(("fields", "model_type"), TRANSFORMERS)
@pytest.mark.parametrize("auto_class", FAMILIES[RegardTransformerConfig])
def test_encoder_decoders(auto_class, fields, model_type, save_model, tmp_path):
    ours, folder = save_model(FAMILIES[RegardTransformerConfig][auto_class], **fields)
    export_model(folder, tmp_path / "stock")
    stock_config = AutoConfig.from_pretrained(tmp_path / "stock")
    assert stock_config.model_type == model_type
    assert (stock_config.decoder_start_token_id, stock_config.label_smoothing) == (3, 0.1)
    assert stock_config.forced_eos_token_id is None
    assert not getattr(stock_config, "encoder_no_repeat_ngram_size", 0)
    batch = padded_batch(ours.config.vocab_size)
    target = {"decoder_input_ids": torch.randint(6, ours.config.vocab_size, (3, 9))}
    assert_same(ours, auto_class, tmp_path / "stock", batch | target, padded=("encoder_last_hidden_state",))
    if ours.can_generate():
        assert_same_tokens(ours, auto_class, tmp_path / "stock", batch)


@pytest.mark.parametrize(
    ("config_class", "auto_class"),
    [(RegardDecoderConfig, "AutoModelForCausalLM"), (RegardTransformerConfig, "AutoModelForSeq2SeqLM")],
)
def test_the_loss_without_smoothing_and_the_precision_stay(config_class, auto_class, save_model, tmp_path):
    smoothing = {"label_smoothing": 0.0} if config_class is RegardTransformerConfig else {}
    ours, folder = save_model(FAMILIES[config_class][auto_class], **smoothing)
    ours.double().save_pretrained(folder)
    export_model(folder, tmp_path / "stock")
    stock = load_stock(auto_class, tmp_path / "stock", "sdpa")
    assert stock.dtype == torch.float64
    batch = padded_batch(ours.config.vocab_size)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.no_grad():
        expected, actual = (model(**batch, labels=labels).loss for model in (ours, stock))
    torch.testing.assert_close(actual, expected, check_dtype=False)


@pytest.mark.parametrize(
    ("config_class", "auto_class", "fields"),
    [
        (RegardDecoderConfig, "AutoModelForCausalLM", {}),
        (RegardTransformerConfig, "AutoModelForSeq2SeqLM", {}),
        (RegardTransformerConfig, "AutoModelForSeq2SeqLM", DECODERS[0][0]),
    ],
)
def test_how_to_generate_stays(config_class, auto_class, fields, save_model, tmp_path):
    ours, folder = save_model(FAMILIES[config_class][auto_class], **fields)
    ours.generation_config.update(num_beams=3, max_new_tokens=7, eos_token_id=[2, 9])
    ours.save_pretrained(folder)
    export_model(folder, tmp_path / "stock")
    expected, actual = (GenerationConfig.from_pretrained(place).to_dict() for place in (folder, tmp_path / "stock"))
    assert actual == expected
    assert (actual["num_beams"], actual["max_new_tokens"], actual["eos_token_id"]) == (3, 7, [2, 9])
    # What the architecture's own configuration says must not come in behind.
    batch = padded_batch(ours.config.vocab_size)
    stock = load_stock(auto_class, tmp_path / "stock", "sdpa")
    assert stock.generate(**batch).equal(ours.generate(**batch))


ELSEWHERE = """
import json, sys
import torch
import transformers

answers = []
for folder, auto_class, texts in json.loads(sys.argv[1]):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = getattr(transformers, auto_class).from_pretrained(folder)
    inputs = tokenizer(texts[:1], return_tensors="pt")
    generated = model.generate(**inputs, max_new_tokens=9, do_sample=False)[0].tolist() if model.can_generate() else []
    answers.append({
        "ids": tokenizer(texts)["input_ids"],
        "texts": tokenizer.batch_decode(tokenizer(texts)["input_ids"], skip_special_tokens=True),
        "generated": generated,
        "special": tokenizer.special_tokens_map,
        "length": tokenizer.model_max_length,
    })
assert "regard" not in sys.modules
json.dump(answers, sys.stdout)
"""


def test_all_load_where_there_is_no_regard(save_model, tokenizers, tmp_path):
    cases = [(BERT_HEADS["AutoModelForMaskedLM"], "AutoModelForMaskedLM", {})]
    for config_class, auto_class, layouts in (
        (RegardDecoderConfig, "AutoModelForCausalLM", [DECODERS[0], DECODERS[3]]),
        (RegardTransformerConfig, "AutoModelForSeq2SeqLM", [TRANSFORMERS[index] for index in (0, 2, 3)]),
    ):
        cases += [(FAMILIES[config_class][auto_class], auto_class, fields) for fields, _ in layouts]
    texts = ["the cat sat", "Élan 3  a", *TEXTS[:3]]
    questions, expected = [], []
    for number, (model_class, auto_class, fields) in enumerate(cases):
        ours, folder = save_model(model_class, folder=tmp_path / f"ours{number}", **fields)
        stock = export_model(folder, tmp_path / f"stock{number}")
        assert not {file.suffix for file in stock.iterdir()} - {".json", ".safetensors"}
        assert "auto_map" not in (stock / "config.json").read_text()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        inputs = tokenizer(texts[:1], return_tensors="pt")
        options = {"max_new_tokens": 9, "do_sample": False}
        questions.append([str(stock), auto_class, texts])
        expected.append(
            {
                "ids": tokenizer(texts)["input_ids"],
                "texts": tokenizer.batch_decode(tokenizer(texts)["input_ids"], skip_special_tokens=True),
                "generated": ours.generate(**inputs, **options)[0].tolist() if ours.can_generate() else [],
                "special": tokenizer.special_tokens_map,
                "length": tokenizer.model_max_length,
            }
        )
    answer = run_python(ELSEWHERE, tmp_path, json.dumps(questions))
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout) == expected


def test_a_model_without_a_tokenizer(save_model, tmp_path, caplog):
    _, folder = save_model(BERT_HEADS["AutoModel"])
    for file in folder.glob("tokenizer*"):
        file.unlink()
    export_model(folder, tmp_path / "stock")
    assert sorted(file.name for file in (tmp_path / "stock").iterdir()) == ["config.json", "model.safetensors"]
    assert "no tokenizer" in caplog.text


def test_a_bundle_is_left_behind(save_model, tmp_path):
    _, folder = save_model(BERT_HEADS["AutoModel"])
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "bundle.RegardBertConfig", "AutoModel": "bundle.RegardBertModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "bundle.py").write_text("raise SystemExit('custom code ran')")
    export_model(folder, tmp_path / "stock")
    assert "auto_map" not in (tmp_path / "stock/config.json").read_text()


@pytest.mark.parametrize(
    ("config_class", "auto_class", "fields", "words"),
    [
        (
            RegardTransformerConfig,
            "AutoModelForSeq2SeqLM",
            {"norm_position": "post", "position_embedding_type": "learned"},
            ["'post' and 'learned'", "'post' and 'sinusoidal'", "'pre' and 'learned'"],
        ),
        (RegardTransformerConfig, "AutoModelForSeq2SeqLM", {"layer_norm_eps": 1e-6}, ["1e-06", "1e-05", "marian"]),
        (
            RegardTransformerConfig,
            "AutoModelForSeq2SeqLM",
            {"norm_position": "pre", "tie_word_embeddings": False},
            ["`tie_word_embeddings` (False)", "pegasus"],
        ),
        (
            RegardDecoderConfig,
            "AutoModelForCausalLM",
            {"norm_position": "post", "layer_norm_eps": 1e-3},
            ["`layer_norm_eps` (0.001)", "opt"],
        ),
    ],
)
def test_what_no_stock_architecture_computes(config_class, auto_class, fields, words, save_model, tmp_path):
    _, folder = save_model(FAMILIES[config_class][auto_class], **fields)
    with pytest.raises(ValueError, match="regard push --bundle") as caught:
        export_model(folder, tmp_path / "stock")
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "stock").exists()


@pytest.mark.parametrize(
    "config",
    [RegardRecurrentConfig(), RegardCaptionerConfig()],
    ids=lambda config: config.model_type,
)
def test_families_without_a_counterpart(config, tmp_path):
    config.save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=f"is a {config.model_type}, .* `regard push --bundle`") as caught:
        export_model(tmp_path / "ours", tmp_path / "stock")
    assert "\n" not in str(caught.value)


def test_what_is_no_checkpoint_of_ours(save_model, tmp_path):
    transformers.BertConfig().save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="is a bert, but must be one of regard_bert, "):
        export_model(tmp_path / "bert", tmp_path / "stock")
    RegardDecoderConfig(architectures=["RegardDecoderForPoetry"]).save_pretrained(tmp_path / "ours")
    with pytest.raises(
        ValueError, match=r"`architectures` \(\['RegardDecoderForPoetry'\]\).* RegardDecoderForCausalLM"
    ):
        export_model(tmp_path / "ours", tmp_path / "stock")


@pytest.mark.parametrize(
    ("config_class", "auto_class"),
    [(RegardBertConfig, "AutoModelForMaskedLM"), (RegardDecoderConfig, "AutoModelForCausalLM")],
)
def test_weights_that_are_not_there_are_not_made_up(config_class, auto_class, save_model, tmp_path):
    _, folder = save_model(FAMILIES[config_class][auto_class])
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights[next(name for name in sorted(weights) if "bias" in name)]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 of the weights that it needs, such as .*bias"):
        export_model(folder, tmp_path / "stock")


def test_nothing_is_written_over(save_model, tmp_path):
    _, folder = save_model(BERT_HEADS["AutoModel"])
    (tmp_path / "file").write_text("")
    for output in (folder, tmp_path / "file"):
        with pytest.raises(ValueError, match=r"`output` .* must be a folder that is empty or does not exist yet"):
            export_model(folder, output)
    (tmp_path / "empty").mkdir()
    assert export_model(folder, tmp_path / "empty") == tmp_path / "empty"
