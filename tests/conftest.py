"""What every test runs under: no network, no cache of the user's, one thread a worker, one seed."""

import os
import tempfile

import pytest

_cache = tempfile.TemporaryDirectory(prefix="regard-tests-")

# The libraries read their settings when they are imported, so all this stands before any of them is. The user's own
# (a token, a mirror, a cache, an accelerate configuration) must neither change a test nor be touched by one.
for _name in list(os.environ):
    if _name.startswith(("ACCELERATE_", "HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_")):
        del os.environ[_name]
os.environ.update(
    HF_HOME=_cache.name,
    # `datasets` follows this one. A test that talks to a server of its own starts a subprocess without it.
    HF_HUB_OFFLINE="1",
    HF_EVALUATE_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    DISABLE_SAFETENSORS_CONVERSION="1",
    TOKENIZERS_PARALLELISM="false",
)
# Models this small gain nothing from threads, and workers that each take every core slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_unconfigure():
    # A worker may end without running exit handlers.
    _cache.cleanup()


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)
