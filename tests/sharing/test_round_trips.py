"""What comes back from the Hub as it was: any precision, shards, added tokens, stock models; and what is left out."""

import os

import pytest
import torch
import transformers
from huggingface_hub import HfApi
from safetensors.torch import load_file
from transformers import AddedToken, Trainer, TrainingArguments

import regard
from regard.sharing.bundle import write_bundle
from regard.sharing.export import export_model
from regard.sharing.hub import push_folder
from tests.support.families import FAMILIES
from tests.support.hub.client import error_of
from tests.support.hub.models import TINY, fingerprint, make_model, pull, save_model
from tests.support.hub.server import READ, WRITE
from tests.support.thorough import slow_except

OUR_CLASSES = [model_class for models in FAMILIES.values() for model_class in models.values()]
BERT_HEADS = """Model ForPreTraining ForMaskedLM ForNextSentencePrediction ForSequenceClassification
ForTokenClassification ForQuestionAnswering ForMultipleChoice""".split()


def load(model_type, folder, **options):
    auto_class = getattr(transformers, TINY[model_type][0])
    kind = transformers.AutoProcessor if model_type == "regard_captioner" else transformers.AutoTokenizer
    return auto_class.from_pretrained(folder, dtype="auto", **options), kind.from_pretrained(folder, **options)


# Weights


def resized(model_type, **fields):
    """A model that was given tokens more, and rows for them."""
    model, processor = make_model(model_type, **fields)
    tokenizer = getattr(processor, "tokenizer", processor)
    tokenizer.add_tokens(["<extra>", "<more>"])
    model.resize_token_embeddings(len(tokenizer))
    # A new bias is zero, as it also is where it goes missing.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, processor


VARIANTS = {
    "resized, tied": lambda model_type: resized(model_type, tie_word_embeddings=True),
    "resized, untied": lambda model_type: resized(model_type, tie_word_embeddings=False),
    "bfloat16": lambda model_type: (make_model(model_type)[0].bfloat16(), make_model(model_type)[1]),
    "float16": lambda model_type: (make_model(model_type)[0].half(), make_model(model_type)[1]),
}


def push_by_methods(model_type, folder, repo_id, **options):
    model, processor = load(model_type, folder)
    model.push_to_hub(repo_id, token=WRITE, **options)
    processor.push_to_hub(repo_id, token=WRITE)


WAYS = [(way, size) for way in ("push", "methods") for size in ("50GB", "2KB")]


@pytest.mark.parametrize(("way", "shard_size"), slow_except([("push", "2KB"), ("methods", "50GB")], WAYS))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model_type", TINY)
def test_variants_come_back_to_the_bit(hub, client, tmp_path, model_type, variant, way, shard_size):
    repo_id = f"me/{model_type}-{variant.replace(', ', '-')}-{way}-{shard_size}"
    model, processor = VARIANTS[variant](model_type)
    folder = save_model(tmp_path / "model", model, processor, max_shard_size=shard_size)
    if way == "push":
        client(push_folder, folder, repo_id, token=WRITE)
    else:
        client(push_by_methods, model_type, folder, repo_id, max_shard_size=shard_size)
    pulled = client(pull, repo_id, model_type, tmp_path / "cache")
    assert pulled == fingerprint(model, processor)
    files = hub.files(repo_id)
    assert (len([name for name in files if name.startswith("model-")]) > 2) == (shard_size == "2KB")
    assert ("model.safetensors" in files) == (shard_size == "50GB")
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
    assert pulled["tied"] == model.config.tie_word_embeddings
    if variant.startswith("resized"):
        tokenizer = getattr(processor, "tokenizer", processor)
        assert tokenizer.convert_tokens_to_ids("<extra>") in pulled["ids"]
        sizes = [shape for name, (_, shape, _) in pulled["weights"].items() if name.endswith("decoder.bias")]
        assert sizes == ([(len(tokenizer),)] if model_type == "regard_bert" else [])


# What a tokenizer is, beside its ids


TEXTS = ["a <lead> cat wholewhole whole Ünïcode <ent>x <special> y", "a red CAT"]


def description(tokenizer):
    return {
        "backend": tokenizer.backend_tokenizer.to_str(),
        "added": {number: repr(token) for number, token in tokenizer.added_tokens_decoder.items()},
        "special": tokenizer.all_special_tokens,
        "named": tokenizer.special_tokens_map,
        "length": tokenizer.model_max_length,
        "encoded": dict(tokenizer(TEXTS)),
        "decoded": tokenizer.batch_decode(tokenizer(TEXTS)["input_ids"], skip_special_tokens=True),
    }


def push_and_pull_tokenizer(folder, repo_id, cache):
    transformers.AutoTokenizer.from_pretrained(folder).push_to_hub(repo_id, token=WRITE)
    return description(transformers.AutoTokenizer.from_pretrained(repo_id, cache_dir=cache))


@pytest.mark.parametrize("model_type", TINY)
def test_a_tokenizer_with_added_tokens(hub, client, tmp_path, model_type):
    model, processor = make_model(model_type)
    tokenizer = getattr(processor, "tokenizer", processor)
    tokenizer.add_tokens([AddedToken("<lead>", lstrip=True, normalized=False), AddedToken("whole", single_word=True)])
    tokenizer.add_tokens(["Ünïcode"])
    tokenizer.add_tokens([AddedToken("<special>", special=True, rstrip=True)], special_tokens=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<ent>"]})
    tokenizer.model_max_length = 17
    expected = description(tokenizer)
    assert {"<lead>", "whole", "Ünïcode", "<special>", "<ent>"} <= tokenizer.get_added_vocab().keys()
    # The model's configuration is beside it, as it mostly is.
    folder = save_model(tmp_path / "model", model, processor)
    assert client(push_and_pull_tokenizer, folder, f"me/tokenizer-{model_type}", tmp_path / "cache") == expected


# Stock models


def push_stock(folder, class_name, repo_id):
    getattr(transformers, class_name).from_pretrained(folder).push_to_hub(repo_id, token=WRITE)


def outputs_of_ours(class_name, repo_id, inputs, cache):
    """What our class makes of a checkpoint, and what it found amiss with it."""
    model, report = getattr(regard, class_name).from_pretrained(repo_id, cache_dir=cache, output_loading_info=True)
    with torch.no_grad():
        return dict(model.eval()(**inputs)), {name: sorted(keys) for name, keys in report.items() if keys}


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("head", BERT_HEADS)
def test_a_stock_bert_from_the_hub(hub, client, tmp_path, head, is_tied):
    config = transformers.BertConfig(
        vocab_size=37,
        hidden_size=18,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=23,
        max_position_embeddings=13,
        tie_word_embeddings=is_tied,
    )
    stock = getattr(transformers, f"Bert{head}")(config).eval()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    stock.save_pretrained(tmp_path / "stock")
    repo_id = f"me/stock-{head}-{is_tied}"
    client(push_stock, tmp_path / "stock", f"Bert{head}", repo_id)
    ids = torch.randint(5, 37, (2, 11))
    mask = (torch.arange(11) < torch.tensor([[11], [7]])).long()
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": (ids > 20).long()}
    if head == "ForMultipleChoice":
        inputs = {name: tensor[None] for name, tensor in inputs.items()}
    actual, report = client(outputs_of_ours, f"RegardBert{head}", repo_id, inputs, tmp_path / "cache")
    assert report == {}
    with torch.no_grad():
        expected = {name: value for name, value in stock(**inputs).items() if isinstance(value, torch.Tensor)}
    assert expected
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=1e-5, rtol=1e-5)


def load_ours(class_name, place, **options):
    getattr(regard, class_name).from_pretrained(place, **options)


@pytest.mark.parametrize("model_class", OUR_CLASSES, ids=lambda model_class: model_class.__name__)
def test_another_architecture_is_refused_by_its_name(model_class, tmp_path):
    config = transformers.GPT2Config(vocab_size=37, n_embd=18, n_head=3, n_layer=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"\A`model_type` is 'gpt2', but Regard\w+Config reads [^\n]*\Z"):
        model_class.from_pretrained(tmp_path)


def test_another_architecture_on_the_hub_is_refused_by_its_name(hub, client, tmp_path):
    config = transformers.GPT2Config(vocab_size=37, n_embd=18, n_head=3, n_layer=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    client(push_stock, tmp_path / "gpt2", "GPT2LMHeadModel", "me/gpt2")
    kind, text = client(error_of, load_ours, "RegardBertForMaskedLM", "me/gpt2", cache_dir=tmp_path / "cache")
    assert (kind, text) == ("ValueError", "`model_type` is 'gpt2', but RegardBertConfig reads 'bert' or 'regard_bert'")


# Saved anew


def resave(model_type, place, folder, cache):
    """Loads what has its code beside it, and saves it."""
    model, processor = load(model_type, place, cache_dir=cache)
    save_model(folder, model, processor)
    return fingerprint(model, processor)


@pytest.mark.parametrize("model_type", TINY)
def test_the_package_promises_no_code_that_it_does_not_save(hub, client, tmp_path, model_type):
    model, processor = make_model(model_type)
    folder, repo_id = save_model(tmp_path / "model", model, processor), f"me/bundled-{model_type}"
    client(push_folder, folder, repo_id, token=WRITE)
    write_bundle(folder)
    expected = fingerprint(model, processor)
    for number, place in enumerate((folder, repo_id)):
        again = tmp_path / f"again{number}"
        assert client(resave, model_type, place, again, tmp_path / "cache") == expected
        assert list(again.glob("*.py")) == []
        assert [path.name for path in again.glob("*.json") if "auto_map" in path.read_text()] == []
        assert fingerprint(*load(model_type, again)) == expected


# Pickles, which run code when they are loaded


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("is_evil", [True, False], ids=["evil", "weights alone"])
def test_a_pickle_is_not_exported(bert, tmp_path, is_evil):
    weights = load_file(bert / "model.safetensors")
    (bert / "model.safetensors").unlink()
    evil = {"evil": Evil(tmp_path / "trace")} if is_evil else {}
    torch.save(weights | evil, bert / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        export_model(bert, tmp_path / "stock")
    assert not (tmp_path / "trace").exists()
    assert not (tmp_path / "stock").exists()


def train_and_push(folder, output, repo_id):
    model, tokenizer = load("regard_bert", folder)
    ids = torch.tensor(tokenizer("a red cat sat")["input_ids"])
    arguments = TrainingArguments(
        str(output),
        max_steps=1,
        save_steps=1,
        report_to="none",
        use_cpu=True,
        push_to_hub=True,
        hub_model_id=repo_id,
        hub_token=WRITE,
        hub_always_push=True,
        disable_tqdm=True,
    )
    rows = [{"input_ids": ids, "labels": ids}] * 8
    trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.push_to_hub()


@pytest.mark.parametrize("mode", ["client", "xet_client"])
def test_the_trainer_can_leave_its_pickle_out(hub, request, tmp_path, bert, mode):
    """It saves its arguments beside the model as `training_args.bin`; a `.gitignore` keeps that from the Hub."""
    process, output, repo_id = request.getfixturevalue(mode), tmp_path / "output", f"me/unpickled-{mode}"
    output.mkdir()
    (output / ".gitignore").write_text("training_args.bin\n")
    process(train_and_push, bert, output, repo_id)
    assert (output / "training_args.bin").exists()
    files = hub.files(repo_id)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pth"))]


# Whose token it is


def whoami(token):
    return HfApi(token=token).whoami()


@pytest.mark.parametrize(("token", "name", "role"), [(WRITE, "me", "write"), (READ, "me", "read")])
def test_whose_token_it_is(hub, client, token, name, role):
    found = client(whoami, token)
    assert (found["name"], found["auth"]["accessToken"]["role"]) == (name, role)


def test_a_token_of_nobody(hub, client):
    kind, text = client(error_of, whoami, "hf_unknownunknown")
    assert (kind, "Invalid user token" in text) == ("HfHubHTTPError", True)


# A connection that breaks, where files go in pieces


def test_a_connection_cut_in_either_direction_with_xet(hub, xet_client, tmp_path):
    model = make_model("regard_decoder", vocab_size=20_000)
    hub.cut("POST /v1/xorbs/", after=500_000)
    xet_client(push_folder, save_model(tmp_path / "model", *model), "me/cut-xet", token=WRITE)
    assert [request["status"] for request in hub.requests("POST", "/v1/xorbs/")][-2:] == ["cut", 200]
    hub.cut("GET /xorb/", after=500_000)
    assert xet_client(pull, "me/cut-xet", "regard_decoder", tmp_path / "cache") == fingerprint(*model)
    assert [request["status"] for request in hub.requests("GET", "/xorb/")][-2:] == ["cut", 206]
