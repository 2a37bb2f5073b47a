"""Pushing runs and folders, and using what was pushed in the ways that its card tells of."""

import json
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from huggingface_hub import ModelCard

import regard
import regard.commands.app
from regard.commands.finetune import finetune
from regard.commands.push import plain_card, push
from tests.support.families import FAMILIES
from tests.support.hub.client import Client
from tests.support.hub.models import TINY, fingerprint, make_model, save_model
from tests.support.hub.server import HubServer

TOKEN = "hf_writewritewrite"
ACCOUNT, MACHINE = "someones-account", "someones-machine"
NAMES = {"HOSTNAME": MACHINE, "LOGNAME": ACCOUNT, "USER": ACCOUNT}


@pytest.fixture(scope="module")
def hub():
    with HubServer({TOKEN: ("me", "write")}) as server:
        yield server
        assert server.errors == []
        assert server.unhandled == []


@pytest.fixture(scope="module")
def client(hub, tmp_path_factory):
    with Client(hub.environment(tmp_path_factory.mktemp("home"), TOKEN) | NAMES) as process:
        yield process


@pytest.fixture(scope="module")
def texts(hub):
    """All small files of a repository, by their names."""

    def read(repo_id, branch="main"):
        repo = hub.store.repos[repo_id]
        files = repo["commits"][repo["refs"][branch]]["files"]
        return {name: hub.store.text(files, name) for name in files}

    return read


def code_of(card):
    """The example of a card."""
    return re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]


def run_example(code):
    """What the example of a card comes to: the fingerprint of its model and of its tokenizer or processor."""
    names = {}
    exec(code, names)
    return fingerprint(names["model"], names.get("tokenizer") or names["processor"])


@pytest.mark.parametrize("model_type", TINY)
def test_a_folder_without_a_card(hub, client, texts, tmp_path, model_type):
    model, processor = make_model(model_type)
    folder = save_model(tmp_path / "model", model, processor)
    url = client(push, folder, f"me/{model_type}")
    assert url.startswith(f"{hub.url}/me/{model_type}/commit/")
    assert not (folder / "README.md").exists()
    text = texts(f"me/{model_type}")["README.md"]
    card = ModelCard(text)
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["regard", model_type]
    assert f"\n# {model_type}\n" in text
    assert "trust_remote_code=True" in text
    # In the client's own cache, which is empty of it.
    assert client(run_example, code_of(text)) == fingerprint(model, processor)


def test_without_the_code(client, texts, tmp_path):
    folder = save_model(tmp_path / "model", *make_model("regard_bert"))
    client(push, folder, "me/bare", bundle=False)
    assert "trust_remote_code" not in texts("me/bare")["README.md"]
    assert not [name for name in texts("me/bare") if name.endswith(".py")]


def test_a_run(hub, client, texts, tmp_path, tiny, monkeypatch):
    folder = tmp_path / "run"
    for name, value in NAMES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: MACHINE)
    monkeypatch.setattr(platform, "node", lambda: MACHINE)
    regard.train_bert(folder, tiny)
    before = (folder / "model" / "README.md").read_text()
    client(push, folder, "me/run", message="Share the run")
    pushed = texts("me/run")
    assert (folder / "model" / "README.md").read_text() == before
    assert pushed["README.md"] == before.replace("PATH_OR_ID", "me/run")
    assert 'model="me/run"' in pushed["README.md"]
    assert [name for name in pushed if name.startswith(("checkpoints", "settings", "logs", "history"))] == []
    commits = hub.store.repos["me/run"]["commits"]
    assert list(commits.values())[-1]["title"] == "Share the run"
    # Nothing tells whose machine it was, or with which token it came.
    private = [str(tmp_path), str(Path.home()), TOKEN, ACCOUNT, MACHINE, *tiny["data"]]
    for name, text in pushed.items():
        assert [secret for secret in private if secret in text] == [], name


# What the cards of a model and of a fine-tuned one say.
WITHOUT_THE_PACKAGE = """
import sys

sys.modules["regard"] = None
exec(sys.argv[1])
print(type(model).__module__, type(model).__name__)
exec(sys.argv[2])
print(type(classify.model).__module__, classify("a red cat")[0]["label"])
"""


def test_a_fine_tuned_run_and_the_cards_without_the_package(hub, client, texts, tmp_path):
    client(push, save_model(tmp_path / "base", *make_model("regard_bert")), "me/base")
    rows = [{"text": f"a {animal} sat", "label": f"is {animal}"} for animal in ("cat", "dog")] * 8
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {"model": "me/base", "data": [str(tmp_path / "rows.jsonl")], "epochs": 1, "batch_size": 4}
    client(finetune, "classification", tmp_path / "run", {**settings, "validation": "0.25", "log_with": ["none"]})
    client(push, tmp_path / "run", "me/tuned", language="en")
    pushed = texts("me/tuned")
    card = ModelCard(pushed["README.md"])
    assert (card.data.base_model, card.data.language) == ("me/base", "en")
    assert "into 2 classes: is cat, is dog." in card.text
    private = [str(tmp_path), str(Path.home()), TOKEN, ACCOUNT]
    for name, text in pushed.items():
        assert [secret for secret in private if secret in text] == [], name
    # As the cards say of where the package is not installed.
    codes = [
        code_of(texts(name)["README.md"]).replace("import regard", "# import regard")
        for name in ("me/base", "me/tuned")
    ]
    codes = [re.sub(r'("me/\w+")\)', r"\1, trust_remote_code=True)", code) for code in codes]
    command = [sys.executable, "-c", WITHOUT_THE_PACKAGE, *codes]
    environment = hub.environment(tmp_path / "home")
    ended = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    plain, tuned = ended.stdout.splitlines()
    module, name = plain.split()
    assert module.startswith("transformers_modules.me.base.")
    assert name == "RegardBertForMaskedLM"
    module, label = tuned.split(maxsplit=1)
    assert module.startswith("transformers_modules.me.tuned.")
    assert label in ("is cat", "is dog")


def test_private_and_a_branch(hub, client, tmp_path):
    folder = save_model(tmp_path / "model", *make_model("regard_decoder"))
    client(push, folder, "me/quiet", private=True, revision="trial")
    repo = hub.store.repos["me/quiet"]
    assert repo["private"]
    assert repo["commits"][repo["refs"]["main"]]["files"].keys() == {".gitattributes"}
    assert "model.safetensors" in repo["commits"][repo["refs"]["trial"]]["files"]


def test_a_card_on_the_hub_stays(client, texts, tmp_path):
    folder = save_model(tmp_path / "model", *make_model("regard_decoder"))
    (folder / "README.md").write_text("# Written by hand\n")
    client(push, folder, "me/edited")
    (folder / "README.md").unlink()
    client(push, folder, "me/edited")
    assert texts("me/edited")["README.md"] == "# Written by hand\n"


# Licence and language


@pytest.mark.parametrize(("given", "found"), [("no", "no"), (["en"], "en"), (["en", "nds", "en"], ["en", "nds"])])
def test_licence_and_language_go_into_the_card(client, texts, tmp_path, given, found):
    folder = save_model(tmp_path / "model", *make_model("regard_decoder"))
    (folder / "README.md").write_text('---\nlanguage: fr\ntags: [regard]\n---\n\nload("PATH_OR_ID")\n')
    client(push, folder, "me/told", license="mit", language=given)
    card = ModelCard(texts("me/told")["README.md"])
    assert card.data.to_dict() == {"language": found, "license": "mit", "tags": ["regard"]}
    assert card.text.strip() == 'load("me/told")'
    # Those of the card stay where none is named.
    client(push, folder, "me/told")
    assert ModelCard(texts("me/told")["README.md"]).data.to_dict() == {"language": "fr", "tags": ["regard"]}


def test_licence_and_language_of_a_plain_card(client, texts, tmp_path):
    folder = save_model(tmp_path / "model", *make_model("regard_decoder"))
    client(push, folder, "me/plain", license="openrail++", language="multilingual")
    data = ModelCard(texts("me/plain")["README.md"]).data
    assert (data.license, data.language, data.library_name) == ("openrail++", "multilingual", "transformers")


def test_licence_and_language_go_into_the_card_on_the_hub(client, texts, tmp_path):
    """Also where the folder has none."""
    folder = save_model(tmp_path / "model", *make_model("regard_decoder"))
    (folder / "README.md").write_text("---\ntags: [mine]\n---\n\n# Written by hand\n")
    client(push, folder, "me/there", revision="trial")
    (folder / "README.md").write_text("# On the main branch\n")
    client(push, folder, "me/there")
    (folder / "README.md").unlink()
    client(push, folder, "me/there", revision="trial", license="mit", language="en")
    assert texts("me/there")["README.md"] == "# On the main branch\n"
    pushed = texts("me/there", "trial")
    card = ModelCard(pushed["README.md"])
    assert card.data.to_dict() == {"language": "en", "license": "mit", "tags": ["mine"]}
    assert "# Written by hand" in card.text
    assert not [name for name in pushed if ".cache" in name]


@pytest.mark.parametrize("license", ["", " ", "Apache 2.0", "Apache-2.0", "apache-2.0\n", "-x", "apache_2"])
def test_a_licence_of_another_form(tmp_path, license):
    folder = save_model(tmp_path / "model", *make_model("regard_decoder"))
    with pytest.raises(ValueError, match=r"\A`license` \([^\n]*\) must be as the Hub names it[^\n]*\Z") as raised:
        push(folder, "me/x", license=license, token=TOKEN)
    assert repr(license) in str(raised.value)


@pytest.mark.parametrize("language", ["", " ", "English", "EN", "e", "en us", "en-US", "en\n", "german"])
def test_a_language_of_another_form(tmp_path, language):
    folder = save_model(tmp_path / "model", *make_model("regard_decoder"))
    for given in (language, ["en", language]):
        with pytest.raises(
            ValueError, match=r"\A`language` \([^\n]*\) must be a code of two or three [^\n]*\Z"
        ) as raised:
            push(folder, "me/x", language=given, token=TOKEN)
        assert repr(language) in str(raised.value)


def error_of(function, *args, **kwargs):
    """What a function raises, on the client's side."""
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("metadata", ["tags: [mine", "date: 2020-99-99", "private: !!bool 5"])
def test_a_card_whose_metadata_does_not_parse(client, tmp_path, metadata):
    folder = save_model(tmp_path / "model", *make_model("regard_decoder"))
    (folder / "README.md").write_text(f"---\n{metadata}\n---\n\n# Mine\n")
    message = client(error_of, push, folder, "me/broken", license="mit")
    assert message.startswith("the metadata of README.md is not YAML: ")
    assert "\n" not in message


def test_the_command_hands_on_what_it_is_given(command, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "regard.commands.push.push", lambda *given, **options: calls.append((given, options)) or "address"
    )
    assert command("push", "runs/x", "me/x").out.strip() == "address"
    line = ["--license", "mit", "--language", "en", "--language", "de", "--private", "--no-bundle", "--revision", "b"]
    assert command("push", "runs/x", "me/x", *line).code == 0
    plain = {"private": False, "revision": None, "bundle": True, "license": None, "language": None}
    told = {"private": True, "revision": "b", "bundle": False, "license": "mit", "language": ["en", "de"]}
    assert calls == [(("runs/x", "me/x"), plain), (("runs/x", "me/x"), told)]


def test_a_mistake_on_the_command_line(refusal, tmp_path):
    folder = save_model(tmp_path / "model", *make_model("regard_decoder"))
    assert "`language` ('English') must be a code" in refusal("push", folder, "me/x", "--language", "English")
    assert "`license` ('') must be as the Hub names it" in refusal("push", folder, "me/x", "--license", "")


CLASSES = [(config_class, name, each) for config_class, models in FAMILIES.items() for name, each in models.items()]


@pytest.mark.parametrize(("config_class", "auto_class", "model_class"), CLASSES, ids=lambda value: str(value)[-30:])
def test_a_plain_card_names_the_class_that_loads(tmp_path, config_class, auto_class, model_class):
    config_class(architectures=[model_class.__name__]).save_pretrained(tmp_path)
    card = plain_card(tmp_path, "title", bundle=True)
    assert f"\nmodel = {auto_class}.from_pretrained(" in card
    assert f"from transformers import {auto_class}\n" in card
    tag = ModelCard(card).data.pipeline_tag
    assert tag is None or "-" in tag


def test_a_plain_card_of_an_exported_model(tmp_path):
    transformers.GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    card = plain_card(tmp_path, "title", bundle=True)
    assert "model = AutoModelForCausalLM.from_pretrained(" in card
    assert "import regard" not in card
    assert "trust_remote_code" not in card
    assert ModelCard(card).data.tags == ["regard"]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda folder: None, "`run` .* must be the folder of a run or of a model: there is no such folder"),
        (lambda folder: folder.mkdir(), "`model` .* holds no model: the run may not have ended"),
    ],
    ids=["missing", "empty"],
)
def test_what_is_no_run(tmp_path, make, complaint):
    make(tmp_path / "run")
    with pytest.raises(ValueError, match=complaint):
        push(tmp_path / "run", "me/x")
