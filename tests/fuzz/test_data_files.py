"""Files of any content, as data to train on: they are read, or refused in one line that names the file."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.training.reading.captioned_images import load_captions
from regard.training.reading.documents import load_documents
from regard.training.reading.tables import Column
from regard.training.reading.text_pairs import load_pairs
from regard.training.reading.typed_rows import load_table
from tests.fuzz.attempts import attempt_in_a_line
from tests.fuzz.mutations import IMAGE, WHOLE, contents, damaged

TABLES = [suffix for suffix in WHOLE if not suffix.startswith(".txt")]
REFUSALS = (ValueError, OSError)

every_kind = pytest.mark.parametrize("suffix", WHOLE)
every_table = pytest.mark.parametrize("suffix", TABLES)


@pytest.fixture
def write(folder):
    """Writes a file of a name that no other has: what was read is kept by name, size and time."""
    number = 0

    def write_one(suffix, content):
        nonlocal number
        number += 1
        file = folder / f"{number}{suffix}"
        file.write_bytes(content)
        return file

    return write_one


def rows_of(file, read, *args, **kwargs):
    """The rows that are read, or None if they are refused as they should be."""
    rows, message = attempt_in_a_line(REFUSALS, read, *args, **kwargs)
    assert message is None or file.name in message
    return rows


@every_kind
@given(data=st.data())
def test_documents(suffix, data, write):
    file = write(suffix, data.draw(contents(suffix)))
    way = data.draw(st.sampled_from(["file", "blank-line", "line"]))
    documents = rows_of(file, load_documents, file, documents=way)
    if documents is not None:
        assert len(documents)
        assert all(row["text"].strip() and str(file) in row["source"] for row in documents)


@every_table
@given(data=st.data())
def test_pairs(suffix, data, write):
    file = write(suffix, data.draw(contents(suffix)))
    pairs = rows_of(file, load_pairs, [str(file)])
    if pairs is not None:
        assert len(pairs)
        assert all(row["source"].strip() and row["target"].strip() for row in pairs)


@every_table
@given(data=st.data())
def test_tables_to_fine_tune_on(suffix, data, write):
    file = write(suffix, data.draw(contents(suffix)))
    columns = [Column("text", "text_column"), Column("label", "label_column")]
    table = rows_of(file, load_table, [str(file)], columns, "train")
    if table is not None:
        assert all(row.keys() == {"text", "label"} for row in table.rows)
        assert len(table.places) == len(table.rows) > 0


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@given(data=st.data())
def test_captions(suffix, data, folder, tmp_path_factory):
    images = tmp_path_factory.mktemp("images")
    for name in ("0.png", "1.png"):
        (images / name).write_bytes(data.draw(st.just(IMAGE) | damaged(IMAGE)))
    (images / f"metadata{suffix}").write_bytes(data.draw(contents(suffix)))
    captions, message = attempt_in_a_line(REFUSALS, load_captions, images)
    assert message is None or str(images) in message
    if captions is not None:
        assert len(captions)
        assert all(row["image"].size and row["text"].strip() for row in captions)


paths = st.one_of(
    st.text(max_size=12),
    st.lists(
        st.sampled_from(["..", ".", "/", "\\", "//", "C:", "0.png", "file://", "~", "\x00", "%2e"]), max_size=5
    ).map("".join),
)


@given(path=paths)
def test_captions_of_any_path(path, folder, tmp_path_factory):
    """An image lies in the folder of its metadata, whatever that says."""
    parent = tmp_path_factory.mktemp("images")
    images = parent / "inside"
    images.mkdir()
    for place in (parent, images):
        (place / "0.png").write_bytes(IMAGE)
    (images / "metadata.jsonl").write_text(json.dumps({"file_name": path, "text": "red"}))
    captions, message = attempt_in_a_line(REFUSALS, load_captions, images)
    assert message is None or str(images) in message
    if captions is not None:
        found = captions.cast_column("image", type(captions.features["image"])(decode=False))[0]["image"]["path"]
        assert found == str(images / "0.png")
