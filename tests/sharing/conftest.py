"""A stand-in for the Hub, clients of it in processes of their own, and a model to push."""

from importlib.util import find_spec

import pytest

from tests.support.hub.client import Client
from tests.support.hub.models import make_model, save_model
from tests.support.hub.server import TOKENS, HubServer


@pytest.fixture(scope="session")
def hub():
    with HubServer(TOKENS) as server:
        yield server
        assert server.errors == []
        assert server.unhandled == []
        # Addresses of the storage are signed, and it has no business with tokens.
        assert not any(request["hub_token"] for request in server.log if request["origin"] == "storage")


@pytest.fixture(scope="session")
def client(hub, tmp_path_factory):
    with Client(hub.environment(tmp_path_factory.mktemp("home"))) as process:
        yield process


@pytest.fixture(scope="session")
def xet_client(hub, tmp_path_factory):
    if find_spec("hf_xet") is None:
        pytest.skip("hf_xet is not installed")
    with Client(hub.environment(tmp_path_factory.mktemp("home"), xet=True)) as process:
        yield process


@pytest.fixture
def bert(tmp_path):
    return save_model(tmp_path / "bert", *make_model("regard_bert"))
