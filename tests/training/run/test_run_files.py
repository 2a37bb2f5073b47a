"""The files of a run, as someone may have made or spoilt them: one line says which, and nothing else happens."""

import json
from itertools import pairwise

import pytest

from regard.training.run.checkpoints import Progress, _read_progress, is_whole, list_checkpoints
from regard.training.run.fingerprint import RunFingerprint
from regard.training.run.folder import load_results
from regard.training.run.settings_file import read_yaml

SPOILT = [b"", b"[]", b"null", b'"x"', b"[" * 5_000, b"\0\0", "{}".encode("utf-16"), b"\xef\xbb\xbf{}", b'{"a":']


DATA = {"training": {"rows": 3}, "held-out": {"rows": 3}}
WHOLE = {"data": DATA, "model": {}, "versions": {}, "tokenizer": ""}
ORIGINS = [
    json.dumps(origin).encode()
    for origin in (
        {},
        WHOLE | {"data": 5},
        WHOLE | {"data": {"training": {"rows": 3}}},
        WHOLE | {"data": {"training": {"rows": "3"}, "held-out": {"rows": 3}}},
        WHOLE | {"model": None},
        {name: value for name, value in WHOLE.items() if name != "tokenizer"},
    )
]


def refused(function, *args):
    with pytest.raises(ValueError, match=r"\A[^\n]*\Z") as raised:
        function(*args)
    return str(raised.value)


@pytest.mark.parametrize("content", [*SPOILT, b'{"metrics": 5}'])
def test_results(tmp_path, content):
    (tmp_path / "results.json").write_bytes(content)
    assert f"the run in {tmp_path} has a results.json" in refused(load_results, tmp_path)


@pytest.mark.parametrize("content", [*SPOILT, *ORIGINS])
def test_origin(tmp_path, content):
    (tmp_path / "origin.json").write_bytes(content)
    assert f"the run in {tmp_path} has an origin.json" in refused(RunFingerprint.load, tmp_path).replace(
        " a o", " an o"
    )


@pytest.mark.parametrize(
    "content",
    [
        *SPOILT,
        b'{"step": "x"}',
        b'{"step": -4}',
        b'{"step": 2.5}',
        b'{"step": true}',
        b'{"step": 1e999}',
        b'{"step": NaN}',
        b'{"seconds": NaN}',
        b'{"step": 4, "evil": 1}',
        b'{"best_step": "../../x"}',
    ],
)
def test_progress(tmp_path, content):
    (tmp_path / "progress.json").write_bytes(content)
    assert f"the checkpoint {tmp_path} has a progress.json" in refused(_read_progress, tmp_path)


def test_an_origin_that_is_whole(tmp_path):
    (tmp_path / "origin.json").write_text(json.dumps(WHOLE))
    assert RunFingerprint.load(tmp_path) == RunFingerprint(**WHOLE)


def test_progress_comes_back(tmp_path):
    progress = Progress(step=4, seconds=1.5, best_step=2, best_loss=-0.5)
    (tmp_path / "progress.json").write_text(json.dumps(vars(progress)))
    assert _read_progress(tmp_path) == progress


@pytest.mark.parametrize("content", SPOILT)
def test_checksums(tmp_path, content):
    (tmp_path / "checksums.json").write_bytes(content)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert not is_whole(tmp_path)


def test_what_is_no_checkpoint(tmp_path):
    for name in ("step-2", "step-abc", "step-", "step--1", "step-10"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "progress.json").write_text("{}")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-2", "step-10"]


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in pairwise("abcdefghi")
)


@pytest.mark.parametrize("content", [BOMB, "config: &a {b: *a}", "a: &a [*a]"])
def test_settings_that_grow_when_they_are_written_out(tmp_path, content):
    (tmp_path / "settings.yaml").write_text(content)
    message = refused(read_yaml, tmp_path / "settings.yaml")
    assert "holds more than 100,000 values, written out" in message
    assert len(message) < 300
