"""`regard inspect senses`, from the command line."""

import pytest
from PIL import Image

pytest.importorskip("gensim")
pytest.importorskip("sklearn")


def test_senses(command, run_folder, corpus_folder, tmp_path):
    picture = tmp_path / "senses.png"
    ended = command("inspect", "senses", run_folder, "house", "--data", corpus_folder, "--output", picture)
    assert ended.code == 0, ended.err
    first, *lines = ended.out.splitlines()
    assert first.startswith("house: ")
    assert lines[-1] == f"Drawn in {picture}"
    # The embeddings and the one layer.
    assert [line.split()[0] for line in lines[-3:-1]] == ["0", "1"]
    assert sum("[house]" in line.lower() for line in lines) >= 3
    assert Image.open(picture).size


def test_what_is_refused(refusal, run_folder, corpus_folder, tmp_path):
    given = ("inspect", "senses", run_folder)
    assert "`word` ('absent') occurs in 0 of " in refusal(*given, "absent", "--data", corpus_folder)
    assert "must end with .png or .svg" in refusal(*given, "house", "--output", tmp_path / "senses.txt")
    assert "`word` ('\\udcff') is no text: it holds bytes that are not UTF-8" in refusal(*given, "\udcff")
