"""Pushing to a stand-in for the Hub and pulling back, with the real clients, in a process of their own."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from huggingface_hub import HfApi, ModelCard, constants, snapshot_download
from transformers import AutoModelForMaskedLM, Trainer, TrainingArguments

from regard.sharing import export
from regard.sharing.bundle import write_bundle
from regard.sharing.hub import EXPORTED_TYPES, push_folder
from tests.support.hub.client import error_of
from tests.support.hub.models import TINY, fingerprint, make_model, pull, save_model
from tests.support.hub.server import OTHER, READ, TOKENS, WRITE, HubServer


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# A model and what belongs to it


@pytest.mark.parametrize("model_type", TINY)
def test_every_family_comes_back_to_the_bit(hub, client, tmp_path, model_type):
    repo_id = f"me/{model_type}"
    model, processor = make_model(model_type)
    folder = save_model(tmp_path / "model", model, processor)
    before = contents(folder)
    url = client(push_folder, folder, repo_id, token=WRITE)
    assert contents(folder) == before
    assert url == f"{hub.url}/{repo_id}/commit/{list(hub.commits(repo_id))[-1]}"
    files = hub.files(repo_id)
    assert {str(path) for path in before} <= files.keys()
    assert [name for name in files if name.endswith(".py")] != []
    assert "AutoConfig" in json.loads(hub.text(repo_id, "config.json"))["auto_map"]
    assert ("generation_config.json" in files) == model.can_generate()
    assert client(pull, repo_id, model_type, tmp_path / "cache") == fingerprint(model, processor)


def push_by_methods(model_type, folder, repo_id):
    model, processor = transformers_of(model_type, folder)
    model.push_to_hub(repo_id, token=WRITE)
    processor.push_to_hub(repo_id, token=WRITE)


def transformers_of(model_type, folder):
    auto_class = getattr(transformers, TINY[model_type][0])
    processor = transformers.AutoProcessor if model_type == "regard_captioner" else transformers.AutoTokenizer
    return auto_class.from_pretrained(folder, dtype="auto"), processor.from_pretrained(folder)


@pytest.mark.parametrize("model_type", TINY)
def test_the_methods_of_models_and_tokenizers(hub, client, tmp_path, model_type):
    repo_id = f"me/methods-{model_type}"
    model, processor = make_model(model_type)
    client(push_by_methods, model_type, save_model(tmp_path / "model", model, processor), repo_id)
    assert [name for name in hub.files(repo_id) if str(tmp_path) in hub.text(repo_id, name)] == []
    assert client(pull, repo_id, model_type, tmp_path / "cache") == fingerprint(model, processor)
    assert not [name for name in hub.files(repo_id) if name.endswith((".bin", ".pt"))]


def train_and_push(model_type, folder, output, repo_id):
    model, processor = transformers_of(model_type, folder)
    tokenizer = getattr(processor, "tokenizer", processor)
    ids = torch.tensor(tokenizer("a red cat sat")["input_ids"])
    row = {"labels": ids}
    row["pixel_values" if model_type == "regard_captioner" else "input_ids"] = (
        torch.randn(3, 40, 24) if model_type == "regard_captioner" else ids
    )
    arguments = TrainingArguments(
        str(output),
        max_steps=2,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        push_to_hub=True,
        hub_model_id=repo_id,
        hub_token=WRITE,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=[row] * 4, processing_class=processor)
    trainer.train()
    trainer.push_to_hub()
    return fingerprint(model.eval(), processor)


@pytest.mark.parametrize("model_type", TINY)
def test_the_trainer(hub, client, tmp_path, model_type):
    repo_id = f"me/trained-{model_type}"
    folder = save_model(tmp_path / "model", *make_model(model_type))
    trained = client(train_and_push, model_type, folder, tmp_path / "output", repo_id)
    assert client(pull, repo_id, model_type, tmp_path / "cache") == trained
    card = hub.text(repo_id, "README.md")
    assert card.startswith("---\n")
    assert WRITE not in card
    files = hub.files(repo_id)
    assert [name for name in files if str(tmp_path) in hub.text(repo_id, name)] == []
    assert not any(name.startswith("pytorch_model") for name in files)


# One push after another


def test_a_second_push_sends_what_changed(hub, client, tmp_path, bert):
    client(push_folder, bert, "me/again", token=WRITE)
    first = list(hub.commits("me/again"))[-1]
    sent = len(hub.requests("PUT", "/lfs/"))
    (bert / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# Changed\n")
    client(push_folder, bert, "me/again", token=WRITE, message="Change the card")
    last = list(hub.commits("me/again").values())[-1]
    assert last["changed"] == ["README.md"]
    assert last["title"] == "Change the card"
    assert len(hub.requests("PUT", "/lfs/")) == sent
    # Nothing changed: no commit, and the address of the last one.
    number = len(hub.commits("me/again"))
    url = client(push_folder, bert, "me/again", token=WRITE)
    assert len(hub.commits("me/again")) == number
    assert url.endswith(hub.store.repos["me/again"]["refs"]["main"])

    # Other weights, and the earlier ones by the commit that they came with.
    other = make_model("regard_bert", seed=1)
    client(push_folder, save_model(bert, *other), "me/again", token=WRITE)
    assert list(hub.commits("me/again").values())[-1]["changed"] == ["model.safetensors"]
    assert client(pull, "me/again", "regard_bert", tmp_path / "cache") == fingerprint(*other)
    earlier = client(pull, "me/again", "regard_bert", tmp_path / "cache", revision=first)
    assert earlier == fingerprint(*make_model("regard_bert"))


def test_weights_and_code_of_an_earlier_push_are_gone(hub, client, tmp_path):
    sharded = save_model(tmp_path / "sharded", *make_model("regard_bert"), max_shard_size="2KB")
    (sharded / "notes.txt").write_text("mine")
    client(push_folder, sharded, "me/stale", token=WRITE)
    whole = save_model(tmp_path / "whole", *make_model("regard_bert", seed=1))
    client(push_folder, whole, "me/stale", token=WRITE, bundle=False)
    files = hub.files("me/stale")
    assert [name for name in files if name.endswith((".safetensors", ".py", ".index.json"))] == ["model.safetensors"]
    assert "notes.txt" in files
    expected = fingerprint(*make_model("regard_bert", seed=1))
    assert client(pull, "me/stale", "regard_bert", tmp_path / "cache") == expected
    # The other way round the single file would win over the shards.
    client(push_folder, sharded, "me/stale", token=WRITE)
    assert "model.safetensors" not in hub.files("me/stale")
    assert client(pull, "me/stale", "regard_bert", tmp_path / "fresh") == fingerprint(*make_model("regard_bert"))


def test_a_branch(hub, client, tmp_path, bert):
    client(push_folder, bert, "me/branched", token=WRITE)
    other = make_model("regard_bert", seed=1)
    folder = save_model(tmp_path / "other", *other)
    for _ in range(2):  # the branch is made, and then it is there
        client(push_folder, folder, "me/branched", token=WRITE, revision="trial/one")
    main = client(pull, "me/branched", "regard_bert", tmp_path / "cache")
    assert main == fingerprint(*make_model("regard_bert"))
    branch = client(pull, "me/branched", "regard_bert", tmp_path / "cache", revision="trial/one")
    assert branch == fingerprint(*other)


def test_only_what_is_asked_for_is_sent(hub, client, bert):
    (bert / ".env").write_text(f"HF_TOKEN={WRITE}")
    (bert / ".git").mkdir()
    (bert / ".git" / "config").write_text("x")
    (bert / "__pycache__").mkdir()
    (bert / "__pycache__" / "a.pyc").write_text("x")
    (bert / "README.md").write_text('---\nlibrary_name: transformers\n---\n\nload("PATH_OR_ID")\n')
    own = {path.name for path in bert.iterdir() if path.is_file()} - {".env"}
    client(push_folder, bert, "me/plain", token=WRITE, bundle=False)
    assert hub.files("me/plain").keys() == own | {".gitattributes"}
    assert hub.text("me/plain", "config.json") == (bert / "config.json").read_text()
    assert hub.text("me/plain", "README.md").endswith('load("me/plain")\n')
    assert "PATH_OR_ID" in (bert / "README.md").read_text()


def test_a_license_goes_into_the_card(hub, client, bert):
    (bert / "README.md").write_text('---\nlibrary_name: transformers\n---\n\nload("PATH_OR_ID")\n')
    client(push_folder, bert, "me/licensed", token=WRITE, license="apache-2.0")
    card = ModelCard(hub.text("me/licensed", "README.md"))
    assert (card.data.license, card.data.library_name) == ("apache-2.0", "transformers")
    assert 'load("me/licensed")' in card.text
    assert "license" not in (bert / "README.md").read_text()


def test_a_card_for_a_repository_that_has_none(hub, client, bert):
    client(push_folder, bert, "me/carded", token=WRITE, card="# First\n")
    client(push_folder, bert, "me/carded", token=WRITE, card="# Second\n")
    assert hub.text("me/carded", "README.md") == "# First\n"
    (bert / "README.md").write_text("# Mine\n")
    client(push_folder, bert, "me/carded", token=WRITE, card="# Third\n")
    assert hub.text("me/carded", "README.md") == "# Mine\n"


def test_exported_models_have_no_code_to_add(hub, client, tmp_path, bert):
    client(export.export_model, bert, tmp_path / "stock")
    client(push_folder, tmp_path / "stock", "me/stock", token=WRITE)
    assert not [name for name in hub.files("me/stock") if name.endswith(".py")]
    assert json.loads(hub.text("me/stock", "config.json"))["model_type"] == "bert"
    layouts = (export._DECODER_LAYOUTS, export._TRANSFORMER_LAYOUTS)
    named = {stock.model_type for stocks in layouts for stock in stocks.values()}
    assert set(EXPORTED_TYPES) == named | {"bert"}


# Sizes, and a connection that breaks


def add_large(folder):
    """Weights and a text of more than 10 MB each, which take another way than small files."""
    model, tokenizer = make_model("regard_bert", vocab_size=150_000)
    save_model(folder, model, tokenizer)
    (folder / "vocabulary.md").write_bytes(b"".join(b"%d\n" % number for number in range(1_600_000)))
    return fingerprint(model, tokenizer)


@pytest.mark.parametrize("mode", ["client", "xet_client"])
def test_large_files(hub, request, tmp_path, mode):
    process, repo_id = request.getfixturevalue(mode), f"me/large-{mode}"
    expected = add_large(tmp_path / "model")
    process(push_folder, tmp_path / "model", repo_id, token=WRITE)
    entry = hub.files(repo_id)["vocabulary.md"]
    assert entry["size"] > 10 * 1024**2
    assert "sha256" in entry
    assert (hub.store.xet.hash(entry["sha256"]) is not None) == (mode == "xet_client")
    assert process(pull, repo_id, "regard_bert", tmp_path / "cache") == expected
    assert process(read_from_hub, repo_id, "vocabulary.md", tmp_path / "cache") == (
        (tmp_path / "model" / "vocabulary.md").read_bytes()
    )


def read_from_hub(repo_id, name, cache):
    return Path(snapshot_download(repo_id, cache_dir=cache, allow_patterns=name), name).read_bytes()


def test_a_connection_cut_in_an_upload(hub, client, tmp_path):
    folder = save_model(tmp_path / "model", *make_model("regard_decoder", vocab_size=20_000))
    # The client itself tries once more ...
    hub.cut("PUT /lfs/", after=500_000)
    client(push_folder, folder, "me/cut", token=WRITE)
    assert [request["status"] for request in hub.requests("PUT", "/lfs/")][-2:] == ["cut", 200]
    # ... but not with the commit. Then there is none, and the next push makes it.
    save_model(folder, *make_model("regard_decoder", seed=1, vocab_size=20_000))
    number = len(hub.commits("me/cut"))
    hub.cut("POST .*/commit/", after=100)
    kind, text = client(error_of, push_folder, folder, "me/cut", token=WRITE)
    assert kind == "ConnectionError"
    assert "check the network and push again" in text
    assert "\n" not in text
    assert len(hub.commits("me/cut")) == number
    client(push_folder, folder, "me/cut", token=WRITE)
    expected = fingerprint(*make_model("regard_decoder", seed=1, vocab_size=20_000))
    assert client(pull, "me/cut", "regard_decoder", tmp_path / "cache") == expected


@pytest.mark.slow
def test_an_upload_that_is_cut_every_time(hub, client, tmp_path):
    model = make_model("regard_bert", seed=2)
    folder = save_model(tmp_path / "model", *model)
    hub.cut("PUT /lfs/", after=1000, times=100)
    kind, text = client(error_of, push_folder, folder, "me/hopeless", token=WRITE)
    hub.faults.clear()
    assert kind == "ConnectionError"
    assert "check the network and push again" in text
    assert "\n" not in text
    assert "model.safetensors" not in hub.files("me/hopeless")
    client(push_folder, folder, "me/hopeless", token=WRITE)
    pulled = client(pull, "me/hopeless", "regard_bert", tmp_path / "cache")
    assert pulled == fingerprint(*model)


def test_a_connection_cut_in_a_download(hub, client, tmp_path):
    model = make_model("regard_decoder", vocab_size=20_000)
    client(push_folder, save_model(tmp_path / "model", *model), "me/cut-off", token=WRITE)
    # The client itself tries once more ...
    hub.cut("GET /lfs/", after=500_000)
    assert client(pull, "me/cut-off", "regard_decoder", tmp_path / "cache") == fingerprint(*model)
    assert [request["status"] for request in hub.requests("GET", "/lfs/")][-2:] == ["cut", 200]
    # ... and then gives up. What it has by then is not taken for the file.
    hub.cut("GET /lfs/", after=500_000, times=100)
    kind, _ = client(error_of, pull, "me/cut-off", "regard_decoder", tmp_path / "fresh")
    hub.faults.clear()
    assert kind == "OSError"
    assert not list((tmp_path / "fresh").rglob("model.safetensors"))
    assert client(pull, "me/cut-off", "regard_decoder", tmp_path / "fresh") == fingerprint(*model)


def test_a_hub_that_is_not_ready(hub, client, bert):
    hub.fail("POST .*/commit/", status=503)
    kind, text = client(error_of, push_folder, bert, "me/busy", token=WRITE)
    assert kind == "ConnectionError"
    assert "503" in text
    assert "push again later" in text


@pytest.mark.parametrize("status", [400, 402, 403, 404, 409, 500])
def test_what_the_hub_says_is_passed_on_without_the_token(hub, client, bert, status):
    hub.fail("POST .*/commit/", status=status, message=f"{WRITE} is no good for\nthat")
    _, text = client(error_of, push_folder, bert, "me/refusing", token=WRITE)
    assert "*** is no good for that" in text
    assert WRITE not in text
    assert "\n" not in text


def push_to(hub, folder, repo_id):
    with patch.object(constants, "ENDPOINT", hub):
        return error_of(push_folder, folder, repo_id, token=WRITE)


def test_no_hub_at_all(client, bert):
    with HubServer(TOKENS) as gone:
        pass
    kind, text = client(push_to, gone.url, bert, "me/nowhere")
    assert kind == "ConnectionError"
    assert f"the Hub at {gone.url}" in text
    assert "\n" not in text


# Who may do what


@pytest.mark.parametrize(
    ("token", "repo_id", "kind", "advice"),
    [
        (None, "me/denied", "PermissionError", "run `hf auth login`, or set HF_TOKEN"),
        ("hf_unknownunknown", "me/denied", "PermissionError", "does not know the token"),
        (READ, "me/denied", "PermissionError", "may not write to me/denied"),
        (OTHER, "me/denied", "PermissionError", "may not write to me/denied"),
        (WRITE + "\nX-Other: 1", "me/denied", "ValueError", "copy it anew"),
        (WRITE + "…", "me/denied", "ValueError", "copy it anew"),
    ],
)
def test_a_token_that_does_not_do(hub, client, bert, token, repo_id, kind, advice):
    raised, text = client(error_of, push_folder, bert, repo_id, token=token)
    assert raised == kind
    assert advice in text
    assert "\n" not in text
    assert token is None or token[:10] not in text
    assert repo_id not in hub.store.repos


def test_another_account_may_not_write_to_what_is_public(hub, client, bert):
    client(push_folder, bert, "me/public", token=WRITE)
    raised, text = client(error_of, push_folder, bert, "me/public", token=OTHER)
    assert (raised, "may not write to me/public" in text) == ("PermissionError", True)
    assert len(hub.commits("me/public")) == 2


def push_with_own_token(token, folder, repo_id):
    with patch.dict(os.environ, HF_TOKEN=token):
        return push_folder(folder, repo_id)


def test_a_token_of_ones_own_and_a_name_without_an_account(hub, client, bert):
    assert client(push_with_own_token, f"{WRITE}\n", bert, "short").startswith(f"{hub.url}/me/short/commit/")


def pull_with(repo_id, cache, token):
    AutoModelForMaskedLM.from_pretrained(repo_id, cache_dir=cache, token=token)


def gate(repo_id):
    HfApi(token=WRITE).update_repo_settings(repo_id, gated="auto")


def test_private_gated_and_missing_repositories(hub, client, bert, tmp_path):
    client(push_folder, bert, "me/private", token=WRITE, private=True)
    client(push_folder, bert, "me/gated", token=WRITE)
    client(gate, "me/gated")
    assert hub.store.repos["me/private"]["private"]
    assert not hub.store.repos["me/gated"]["private"]
    for repo_id in ("me/private", "me/gated"):
        assert client(error_of, pull_with, repo_id, tmp_path / "cache", WRITE) is None
    number = 0
    for repo_id in ("me/private", "me/gated", "me/missing"):
        for token in (False, OTHER, "hf_unknownunknown"):
            number += 1  # what is in a cache is given without asking who it is for
            raised, text = client(error_of, pull_with, repo_id, tmp_path / str(number), token)
            assert raised == "OSError"
            assert not token or token not in text
    # A push to what is private already need not say so.
    (bert / "README.md").write_text("# Changed\n")
    client(push_folder, bert, "me/private", token=WRITE)
    assert hub.store.repos["me/private"]["private"]


def test_what_is_public_is_not_pushed_to_as_private(hub, client, bert):
    client(push_folder, bert, "me/open", token=WRITE)
    (bert / "README.md").write_text("# Secret\n")
    raised, text = client(error_of, push_folder, bert, "me/open", token=WRITE, private=True)
    assert raised == "ValueError"
    assert "`private`: me/open is there already and public" in text
    assert "README.md" not in hub.files("me/open")


def test_a_card_that_the_hub_refuses(hub, client, bert):
    (bert / "README.md").write_text("---\ntags: regard\n---\n\n# Model\n")
    raised, text = client(error_of, push_folder, bert, "me/refused", token=WRITE)
    assert raised == "ValueError"
    assert "README.md" in text
    assert '"tags" has the wrong type' in text
    assert "\n" not in text


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def upload_evil(folder, repo_id):
    api = HfApi(token=WRITE)
    api.create_repo(repo_id)
    api.upload_folder(repo_id=repo_id, folder_path=folder)


def test_pickles_of_others_run_no_code(hub, client, tmp_path, bert):
    (bert / "model.safetensors").unlink()
    torch.save({"weight": Evil(tmp_path / "trace")}, bert / "pytorch_model.bin")
    client(upload_evil, bert, "me/evil")
    kind, _ = client(error_of, pull_with, "me/evil", tmp_path / "cache", WRITE)
    assert kind == "UnpicklingError"
    assert not (tmp_path / "trace").exists()


def test_a_trainers_state_stays_behind_and_a_bundle_that_is_not_wanted(hub, client, tmp_path):
    folder = save_model(tmp_path / "model", *make_model("regard_bert"))
    write_bundle(folder)
    (folder / "checkpoint-3").mkdir()
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth", "checkpoint-3/optimizer.pt"):
        (folder / name).write_bytes(b"x")
    before = contents(folder)
    client(push_folder, folder, "me/lean", token=WRITE, bundle=False)
    assert contents(folder) == before
    files = hub.files("me/lean")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pth", ".py"))]
    assert "auto_map" not in json.loads(hub.text("me/lean", "config.json"))
