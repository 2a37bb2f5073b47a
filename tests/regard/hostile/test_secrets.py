"""The token of the Hub: it is sent to the Hub and to nobody else, and is not to be seen anywhere."""

import contextlib
import io
import json
import logging
import os
import sys

import pytest

import regard
from regard.commands.app import main
from tests.support.hub.client import Client
from tests.support.hub.models import make_model, save_model
from tests.support.hub.server import HubServer

TOKEN = "hf_recognisableTokenOfSomeone"
READ = "hf_recognisableTokenToRead"


def run_command(*arguments, token=TOKEN):
    """Runs a command line with all that its libraries log, and gives its code and all that it put out."""
    os.environ["HF_TOKEN"] = token
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setLevel(logging.DEBUG)
    loggers = [logging.getLogger(), *map(logging.getLogger, "httpx httpcore huggingface_hub transformers".split())]
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
        logger.addHandler(handler)
    sys.argv = ["regard", *arguments]
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    return code, out.getvalue()


@pytest.fixture(scope="module")
def hub():
    with HubServer({TOKEN: ("me", "write"), READ: ("me", "read")}) as server:
        yield server
        assert server.errors == []
        # The storage behind the Hub has addresses that are signed.
        assert not any(request["hub_token"] for request in server.log if request["origin"] == "storage")


@pytest.fixture(scope="module")
def client(hub, tmp_path_factory):
    verbose = {"HF_HUB_VERBOSITY": "debug", "TRANSFORMERS_VERBOSITY": "debug", "HF_DEBUG": "1"}
    with Client(hub.environment(tmp_path_factory.mktemp("home")) | verbose) as process:
        yield process


@pytest.fixture
def folder(tmp_path):
    return str(save_model(tmp_path / "model", *make_model("regard_decoder")))


def test_a_push_that_does(client, folder, hub):
    code, out = client(run_command, "push", folder, "me/told")
    assert code == 0
    # It is logged what is asked for, but not with what.
    assert "/api/models/me/told/commit/main" in out
    assert TOKEN not in out
    assert [path for path in hub.files("me/told") if TOKEN in hub.text("me/told", path)] == []


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500])
def test_a_push_that_fails(client, folder, hub, status):
    """The Hub may well say the token."""
    hub.fail("POST .*/commit/", status=status, message=f"what about {TOKEN}?")
    code, out = client(run_command, "push", folder, "me/failing")
    assert code == 2
    assert "regard: " in out.splitlines()[-1]
    assert TOKEN not in out.splitlines()[-1]


@pytest.mark.parametrize("token", [READ, "hf_recognisableTokenOfNobody"])
def test_a_token_that_does_not_do(client, folder, token):
    code, out = client(run_command, "push", folder, "me/denied", token=token)
    assert code == 2
    code, more = client(run_command, "generate", "a cat", "--model", "me/nothing", token=token)
    assert code == 2
    assert token not in out + more


def test_a_run_holds_no_token(tiny_decoder, tmp_path, monkeypatch):
    """Neither its logs and settings, nor its model and card."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, TOKEN)
    regard.train_decoder(tmp_path / "run", {**tiny_decoder, "log_with": ["tensorboard"]})
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"settings.yaml", "results.json", "history.jsonl", "README.md"} <= {path.name for path in files}
    assert any("tfevents" in path.name for path in files)
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []


def test_fine_tuning_from_the_hub_holds_no_token(client, tmp_path):
    rows = [{"text": f"a {animal} sat", "label": animal} for animal in ("cat", "dog")] * 8
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    base = save_model(tmp_path / "base", *make_model("regard_bert"))
    code, out = client(run_command, "push", str(base), "me/base")
    assert code == 0
    data = ["--data", str(tmp_path / "rows.jsonl"), "--epochs", "1", "--batch-size", "4"]
    line = ["finetune", "classification", "--model", "me/base", *data, "--output", str(tmp_path / "run")]
    code, more = client(run_command, *line)
    assert code == 0
    assert TOKEN not in out + more
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert "README.md" in {path.name for path in files}
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []
