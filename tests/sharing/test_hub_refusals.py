"""What is not pushed: it is refused before the Hub is asked."""

import os
import pickle
import shutil

import pytest

from regard.sharing.hub import check_folder, push_folder
from tests.support.hub.models import make_model, save_model

TOKEN = "hf_writewritewrite"


@pytest.fixture
def bert(tmp_path):
    return save_model(tmp_path / "bert", *make_model("regard_bert"))


def refusal(*args, **kwargs):
    with pytest.raises(ValueError, match=r"\A[^\n]*\Z") as raised:
        push_folder(*args, **{"token": TOKEN, **kwargs})
    return str(raised.value)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "deep/pytorch_model.bin", "a.pt", "b.PTH", "deep/er/c.pkl", "d.ckpt"]
)
def test_pickles_are_refused_by_name(bert, name):
    (bert / name).parent.mkdir(parents=True, exist_ok=True)
    (bert / name).write_bytes(b"x")
    assert f"holds {name}, which may run code" in refusal(bert, "me/x")


def drop(name):
    return lambda folder: (folder / name).unlink()


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (shutil.rmtree, "there is no such folder"),
        (drop("config.json"), "has no config.json"),
        (write("config.json", "{"), "config.json that is not JSON"),
        (write("config.json", "[]"), "config.json that is not a JSON object"),
        (write("config.json", "{}"), "of the type None"),
        (write("config.json", '{"model_type": "llama"}'), "of the type 'llama'"),
        (drop("model.safetensors"), "has no weights"),
        (lambda folder: os.truncate(folder / "model.safetensors", 5000), "no complete model.safetensors"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(pickle.dumps({"a": 1})),
            "no complete model.safetensors",
        ),
    ],
)
def test_a_folder_that_is_no_model(bert, spoil, complaint):
    spoil(bert)
    message = refusal(bert, "me/x")
    assert message.startswith(f"`folder` ({bert})")
    assert complaint in message


def test_a_shard_that_is_missing(tmp_path):
    folder = save_model(tmp_path / "model", *make_model("regard_bert"), max_shard_size="2KB")
    assert check_folder(folder) == "regard_bert"
    sorted(folder.glob("model-*"))[2].unlink()
    assert "no complete model-00003-of-" in refusal(folder, "me/x")


@pytest.mark.parametrize("repo_id", ["", "a/b/c", "me/x y", "me/a--b", "https://huggingface.co/me/x", "me/x.git"])
def test_a_bad_name(bert, repo_id):
    assert f"`repo_id` ({repo_id!r}) must be a name such as `someone/model`" in refusal(bert, repo_id)


@pytest.mark.parametrize("revision", ["", " ", "a b", "-x", "a\nb"])
def test_a_bad_branch(bert, revision):
    assert f"`revision` ({revision!r}) must be the name of a branch" in refusal(bert, "me/x", revision=revision)


def test_offline(bert):
    with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE"):
        push_folder(bert, "me/x", token=TOKEN)
