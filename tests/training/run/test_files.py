"""Files that are there whole or not at all: what is done in which order, and what is left by an interruption."""

import os
from pathlib import Path

import pytest

from regard.training.run import files
from regard.training.run.files import OLD, PARTIAL, rename_in, set_aside, write_text


@pytest.fixture
def order(monkeypatch):
    """What is flushed and renamed, by its name at that time."""
    done = []
    flush, replace = files.flush, os.replace
    monkeypatch.setattr(files, "flush", lambda path: done.append(("flush", path)) or flush(path))
    monkeypatch.setattr(os, "replace", lambda old, new: done.append(("replace", old)) or replace(old, new))
    return done


def folder_of(path: Path, **contents: str) -> Path:
    path.mkdir()
    (path / "inner").mkdir()
    for name, text in contents.items():
        (path / "inner" / name).write_text(text)
    return path


def test_content_is_on_the_disk_before_its_name_and_the_name_before_it_counts(tmp_path, order):
    partial = folder_of(tmp_path / "partial-a", x="1", y="2")
    content = {partial, *partial.rglob("*")}
    rename_in(partial, tmp_path / "a")
    renamed = order.index(("replace", partial))
    assert {path for _, path in order[:renamed]} == content
    assert order[renamed + 1 :] == [("flush", tmp_path)]
    order.clear()
    write_text(tmp_path / "b", "text")
    assert order == [("flush", tmp_path / "partial-b"), ("replace", tmp_path / "partial-b"), ("flush", tmp_path)]


def test_what_had_the_name_goes(tmp_path):
    for text in ("1", "2"):
        rename_in(folder_of(tmp_path / "partial-a", x=text), tmp_path / "a")
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
        assert (tmp_path / "a" / "inner" / "x").read_text() == text


def test_what_an_earlier_deletion_left_is_no_hindrance(tmp_path):
    for name in (f"{OLD}a", "a", f"{PARTIAL}a"):
        folder_of(tmp_path / name, x=name)
    rename_in(tmp_path / f"{PARTIAL}a", tmp_path / "a")
    assert (tmp_path / "a" / "inner" / "x").read_text() == f"{PARTIAL}a"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    folder_of(tmp_path / f"{OLD}a", x="older")
    assert set_aside(tmp_path / "a") == tmp_path / f"{OLD}a"
    assert [path.name for path in tmp_path.iterdir()] == [f"{OLD}a"]
    assert (tmp_path / f"{OLD}a" / "inner" / "x").read_text() == f"{PARTIAL}a"
