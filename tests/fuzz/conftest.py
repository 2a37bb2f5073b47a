"""How the properties are tried: few examples, the same at each run, unless REGARD_FUZZ names another profile.

`REGARD_FUZZ=thorough` tries many, drawn anew each time. Nothing is written to the checkout.
"""

import os

import datasets
import pytest
from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("quick", max_examples=15, derandomize=True, **_COMMON)
settings.register_profile(
    "thorough", max_examples=int(os.environ.get("REGARD_FUZZ_EXAMPLES", 2_000)), print_blob=True, **_COMMON
)
settings.load_profile(os.environ.get("REGARD_FUZZ", "quick"))


@pytest.fixture(scope="session", autouse=True)
def _quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, and a cache of data sets of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"
