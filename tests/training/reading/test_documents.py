import gzip
import json
import os
import re
import sys
from functools import partial

import datasets
import pytest

from regard.training.reading import cache, sources, text_files
from regard.training.reading import documents as documents_module
from regard.training.reading.documents import load_documents
from tests.support.reading import refusal_by, rows_of, texts_of, write

refusal = partial(refusal_by, load_documents)


# Text files


def test_one_file_is_one_document(folder):
    write("a.txt", "One line.\r\nAnother,\rand a third.\n\n\0 and \x07 are kept: é 你 😀")
    assert rows_of("a.txt") == [("One line.\nAnother,\nand a third.\n\n\0 and \x07 are kept: é 你 😀", "a.txt")]


def test_byte_order_mark_is_no_text(folder):
    assert texts_of(write("a.txt", "\ufeffText with \ufeff inside.")) == ["Text with \ufeff inside."]


def test_file_of_unknown_kind_is_text(folder):
    assert texts_of(write("NOTES.tex", "A text.")) == ["A text."]
    assert texts_of(folder / "NOTES.tex") == ["A text."]


def test_folder(folder):
    write("docs/b.txt", "b")
    write("docs/a/z.rst", "z")
    write("docs/a/y.MD.GZ", "y")
    write("docs/a.text", "a")
    write("docs/c.txt.gz", "c")
    write("docs/image.png", b"\xff\xfe")
    write("docs/.hidden.txt", "hidden")
    write("docs/.git/d.txt", "hidden")
    os.symlink("b.txt", "docs/same.txt")
    os.symlink("nowhere", "docs/broken.txt")
    os.symlink(".", "docs/loop")
    expected = [("a", "docs/a.text"), ("b", "docs/b.txt"), ("c", "docs/c.txt.gz")]
    expected += [("y", "docs/a/y.MD.GZ"), ("z", "docs/a/z.rst")]
    assert rows_of("docs") == expected


def test_glob_takes_any_suffix(folder):
    write("x/b.tex", "b")
    write("x/y/a.tex", "a")
    write("x/c.txt", "c")
    os.mkdir("x/folder.tex")
    assert rows_of("x/**/*.tex") == [("b", "x/b.tex"), ("a", "x/y/a.tex")]
    assert texts_of("x/?.tex") == ["b"]


def test_file_whose_name_looks_like_a_glob(folder):
    write("a1.txt", "glob")
    assert texts_of(write("a[1].txt", "file")) == ["file"]


TWO_PARTS = "One,\ntwo.\n\n \t \nThree.\n\n"


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ("file", [(TWO_PARTS, "a.txt"), ("Four.", "b.txt.gz")]),
        ("blank-line", [("One,\ntwo.\n", "a.txt:1"), ("Three.\n", "a.txt:5"), ("Four.", "b.txt.gz:1")]),
        ("line", [("One,", "a.txt:1"), ("two.", "a.txt:2"), ("Three.", "a.txt:5"), ("Four.", "b.txt.gz:1")]),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_documents(folder, documents, expected, newline):
    write("a.txt", TWO_PARTS.replace("\n", newline))
    write("b.txt.gz", "Four.")
    assert rows_of(".", documents=documents) == [(text, f"./{source}") for text, source in expected]


@pytest.mark.parametrize("documents", ["file", "blank-line", "line"])
@pytest.mark.parametrize("name", ["bad.txt", "bad.txt.gz", "bad.jsonl", "bad.csv"])
def test_file_that_is_not_utf8(folder, documents, name):
    # Beyond the decoder's first buffer, and after characters of several bytes.
    before = ('{"text": "你"}\n' if name == "bad.jsonl" else "text\n你\n\n") * 20_000 + "caf"
    write(name, before.encode() + b"\xe9 au lait\n\xff")
    place = f"byte {len(before.encode()):,} (0xe9)"
    expected = f"{name!r} is not UTF-8: {place}; if it is text, re-encode it (iconv -t UTF-8)"
    assert refusal(name, documents=documents) == expected


def test_file_that_ends_inside_a_character(folder):
    assert "byte 1 (0xe4)" in refusal(write("bad.txt", "a你".encode()[:-1]))


@pytest.mark.parametrize("damage", ["truncated", "no checksum", "no magic", "bad block"])
def test_damaged_gzip_file(folder, damage):
    data = gzip.compress(" ".join(map(str, range(5000))).encode())
    damaged = {
        "truncated": data[:-20],
        "no checksum": data[:-4],
        "no magic": data[1:],
        "bad block": data[:10] + b"\xff" + data[11:],
    }
    with open("a.txt.gz", "wb") as file:
        file.write(damaged[damage])
    assert refusal("a.txt.gz").startswith("'a.txt.gz' is not a complete gzip file: ")


@pytest.mark.parametrize("damage", ["truncated", "checksum"])
def test_damaged_gzip_file_of_what_is_no_utf8(folder, damage):
    """The line that does not decode goes on beyond the damage."""
    data = gzip.compress(b"\xff" + bytes(range(128, 256)) * 9)
    with open("a.txt.gz", "wb") as file:
        file.write(data[:-9] if damage == "truncated" else data[:-8] + b"none" + data[-4:])
    assert refusal("a.txt.gz").startswith("'a.txt.gz' is not a complete gzip file: ")


def test_document_that_is_too_large(folder, monkeypatch):
    monkeypatch.setattr(documents_module, "MAX_DOCUMENT_BYTES", 10)
    write("a.txt", "12345\n\n1234567890")
    assert refusal("a.txt") == (
        "a.txt: one document of more than 10 bytes; split the file, or set `documents` to 'blank-line' or 'line'"
    )
    assert texts_of("a.txt", documents="line") == ["12345", "1234567890"]
    assert "more than 10 bytes" in refusal(write("b.txt", "éééééé"), documents="line")


def test_folder_of_texts_and_tables(folder):
    write("mixed/README.md", "read me")
    write("mixed/data/a.jsonl", '{"text": "a"}')
    assert refusal("mixed") == (
        "folder 'mixed' holds both text (1 files, such as 'mixed/README.md') and tables (1, such as "
        "'mixed/data/a.jsonl'); choose by a glob, such as 'mixed/**/*.md' or 'mixed/**/*.jsonl'"
    )
    assert texts_of("mixed/**/*.jsonl") == ["a"]


# Data sets on the Hub


@pytest.fixture
def hub(folder, monkeypatch):
    """Stands in for the Hub: every id is one table of ten rows, of which the sixth is blank."""
    write(
        "hub/rows.jsonl",
        "".join(json.dumps({"id": i, "body": f"text {i}" if i != 5 else " "}) + "\n" for i in range(10)),
    )
    calls = []

    def builder(path, config):
        calls.append(("builder", path, config))
        return datasets.load_dataset_builder("json", data_files=str(folder / "hub/rows.jsonl"))

    def whole(path, config, split):
        calls.append(("whole", path, config, split))
        return datasets.load_dataset("json", data_files=str(folder / "hub/rows.jsonl"), split=split)

    monkeypatch.setattr(sources, "load_dataset_builder", builder)
    monkeypatch.setattr(sources, "load_dataset", whole)
    return calls


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_data_set(hub, streaming):
    rows = rows_of(
        "org/name:config", text_column="body", split="train[:8]" if not streaming else "train", streaming=streaming
    )
    kept = [i for i in range(10 if streaming else 8) if i != 5]
    assert rows == [(f"text {i}", f"org/name:config:{i + 1}") for i in kept]
    assert hub == [("builder", "org/name", "config") if streaming else ("whole", "org/name", "config", "train[:8]")]


def test_max_documents_streams_a_hub_data_set(hub):
    assert texts_of("org/name", text_column="body", max_documents=6) == [f"text {i}" for i in (0, 1, 2, 3, 4, 6)]
    assert hub == [("builder", "org/name", None)]


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_data_set_without_the_column(hub, streaming):
    message = refusal("org/name", streaming=streaming)
    assert re.fullmatch(r"org/name(:1)? has no column 'text'; `text_column` can be 'id', 'body'", message)
    message = refusal("org/name", text_column="id", streaming=streaming)
    assert message == "org/name:1: column 'id' must hold text, not int (0)"


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (datasets.exceptions.DatasetNotFoundError("Dataset 'org/name' doesn't exist.\nLog in?"), ValueError),
        (ValueError("Config name is missing.\nPlease pick one among ['a', 'b']"), ValueError),
        (ConnectionError("Couldn't reach 'org/name' on the Hub"), ConnectionError),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_hub_data_set_that_does_not_load(hub, monkeypatch, raised, expected, streaming):
    def fail(*args, **kwargs):
        raise raised

    monkeypatch.setattr(sources, "load_dataset", fail)
    monkeypatch.setattr(sources, "load_dataset_builder", fail)
    reason = " ".join(str(raised).split())
    assert refusal("org/name", streaming=streaming, error=expected) == (
        f"`data` ('org/name') is no file or folder here; as a data set on the Hub: {reason}"
    )


def test_path_comes_before_a_data_set_of_that_name(hub):
    write("org/name/a.txt", "local")
    assert texts_of("org/name") == ["local"]
    assert hub == []


# Python's documentation


def test_python_docs(folder, monkeypatch):
    (folder / "regard_fake_docs.py").write_text('"""' + "A docstring of a package. " * 5 + '"""')
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "stdlib_module_names", frozenset({"json"}))  # reading all of it takes seconds
    rows = rows_of("python-docs: regard_fake_docs,")
    assert rows_of(max_documents=5) == rows[:5]
    assert rows[0][1] == "pydoc_data.topics:assert"
    assert rows[-1] == (("A docstring of a package. " * 5).strip(), "regard_fake_docs")


def test_python_docs_of_an_unknown_package(folder):
    assert refusal("python-docs:json,no_such_package").startswith("`python-docs:no_such_package`: ")


# What holds for every source


def test_sources_are_joined_in_order(hub):
    write("z.txt", "z")
    write("a.jsonl", '{"body": "a"}')
    write("docs/y.txt", "y")
    data = ["z.txt", "org/name", "a.jsonl", "docs"]
    assert texts_of(data, text_column="body", max_documents=12) == [
        "z",
        *(f"text {i}" for i in range(10) if i != 5),
        "a",
        "y",
    ]


def test_file_that_is_named_twice_is_read_once(folder):
    write("docs/a.txt", "a")
    write("docs/b.txt", "b")
    os.symlink("docs", "link")
    assert texts_of(["docs/b.txt", "docs", "./docs/*.txt", "link", str(folder / "docs")]) == ["b", "a"]


def test_max_documents(folder):
    for i in range(4):
        write(f"{i}.txt", f"{i}" if i != 1 else "  ")
    write("4.txt", b"\xff")
    assert texts_of(".", max_documents=3) == ["0", "2", "3"]
    assert texts_of(".", max_documents=1) == ["0"]
    assert "4.txt' is not UTF-8" in refusal(".")


@pytest.mark.parametrize("max_documents", [0, -1])
def test_max_documents_must_be_positive(folder, max_documents):
    message = f"`max_documents` ({max_documents}) must be at least 1 and less than 2**63, or None for all documents"
    assert refusal(write("a.txt", "a"), max_documents=max_documents) == message


def test_documents_must_be_known(folder):
    message = "`documents` ('sentence') must be one of 'file', 'blank-line', 'line'"
    assert refusal(write("a.txt", "a"), documents="sentence") == message


def test_data_must_name_something(folder):
    assert refusal([]) == "`data` names no source; give a file, folder, glob, data set id or 'python-docs'"


@pytest.mark.parametrize(
    "name", ["nothing", "./nothing", "no/such/file", "data/corpus.txt", "data/corpus.jsonl.gz", "", "python_docs"]
)
def test_source_that_does_not_exist(folder, name):
    assert refusal(["python-docs", name]) == (
        f"`data` ({name!r}) is not 'python-docs', a file, a folder, a glob or a data set id (org/name): "
        "there is nothing of that name"
    )


def test_glob_without_a_match(folder):
    os.mkdir("a.txt")
    assert refusal("*.txt") == "`data` ('*.txt') is a glob that matches no file"


def test_folder_without_a_match(folder):
    write("docs/a.tex", "a")
    message = refusal("docs")
    assert message.startswith("folder 'docs' holds no file that ends in '.txt', '.text', '.md', '.rst', '.jsonl'")
    assert message.endswith("; name files of another kind by a glob")


def test_empty_corpus(folder):
    write("docs/a.txt", " \n\t")
    write("docs/b.txt", "")
    write("c.csv", "id,text\n")
    assert refusal(["docs", "c.csv"]) == "the corpus is empty: no text in 'docs' (2 files), 'c.csv' (1 file)"


def test_file_or_folder_that_cannot_be_read(folder, monkeypatch):
    def deny(*args, **kwargs):
        raise PermissionError(13, "Permission denied", "secret")

    write("docs/a.txt", "a")
    monkeypatch.setattr(text_files, "open_file", deny)
    assert "Permission denied" in refusal("docs/a.txt", error=PermissionError)
    monkeypatch.setattr(os, "scandir", deny)
    assert "Permission denied" in refusal("docs", error=PermissionError)


# The cache


@pytest.fixture
def read_files(monkeypatch):
    """The names of the files that are opened."""
    names = []
    original = text_files.open_file

    def opened(name, *args, **kwargs):
        names.append(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(text_files, "open_file", opened)
    return names


def test_files_are_read_once(folder, read_files):
    write("a.txt", "a")
    write("b.txt", "b")
    first = load_documents(".")
    second = load_documents(".")
    assert read_files == ["./a.txt", "./b.txt"]
    assert second["text"][:] == ["a", "b"]
    # What is made of the corpus is found again by this.
    assert first._fingerprint == second._fingerprint
    assert first.cache_files == second.cache_files != []


def test_what_changes_is_read_again(folder, read_files):
    status = os.stat(write("a.txt", "a\nb"))
    assert texts_of("a.txt") == ["a\nb"]
    # The same time, another size.
    write("a.txt", "a\nb\nc")
    os.utime("a.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert texts_of("a.txt") == ["a\nb\nc"]
    # The same size, another time.
    write("a.txt", "a\nb\nd")
    os.utime("a.txt", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert texts_of("a.txt") == ["a\nb\nd"]
    # The same file, other arguments.
    assert texts_of("a.txt", documents="line") == ["a", "b", "d"]
    assert texts_of("a.txt", documents="line", max_documents=1) == ["a"]
    # A file of that size and time elsewhere.
    os.makedirs("elsewhere")
    os.chdir("elsewhere")
    write("a.txt", "e\nf\ng")
    os.utime("a.txt", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert texts_of("a.txt") == ["e\nf\ng"]
    assert len(read_files) == 6


def test_text_column_is_part_of_the_key(folder):
    write("t.jsonl", '{"a": "1", "b": "2"}')
    assert texts_of("t.jsonl", text_column="a") == ["1"]
    assert texts_of("t.jsonl", text_column="b") == ["2"]


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_failure_leaves_nothing_behind(folder, monkeypatch, error):
    for i in range(40):
        write(f"{i:02}.txt", str(i))
    original = text_files.open_file

    def fails_late(name, *args, **kwargs):
        if name == "./35.txt":
            raise error
        return original(name, *args, **kwargs)

    monkeypatch.setattr(text_files, "open_file", fails_late)
    with pytest.raises(type(error)):
        load_documents(".")
    assert not list((folder.parent / "cache").rglob("*.arrow"))
    monkeypatch.setattr(text_files, "open_file", original)
    assert texts_of(".") == [str(i) for i in range(40)]


def test_rows_are_written_in_batches(folder, monkeypatch):
    write("a.txt", "".join(f"{i}\n" for i in range(3 * cache.ROWS_PER_BATCH)))
    assert load_documents("a.txt", documents="line").data.column(0).num_chunks == 3
    # Fewer rows where these are large: after each that reaches the bound.
    monkeypatch.setattr(cache, "CHARACTERS_PER_BATCH", 100)
    for i in range(7):
        write(f"docs/{i}.txt", "x" * 60)
    assert [len(chunk) for chunk in load_documents("docs").data.column(0).chunks] == [2, 2, 2, 1]


def test_packages_and_the_format_are_part_of_the_key(folder, monkeypatch):
    read = []
    monkeypatch.setattr(
        documents_module,
        "iter_python_docs",
        lambda packages: read.append(packages) or [(f"the docs of {packages}", "topic")],
    )
    for name, packages in (
        ("python-docs", []),
        ("python-docs:yaml", ["yaml"]),
        ("python-docs:yaml,tqdm", ["yaml", "tqdm"]),
    ):
        assert texts_of(name) == texts_of(name) == [f"the docs of {packages}"]
    assert read == [[], ["yaml"], ["yaml", "tqdm"]]
    monkeypatch.setattr(documents_module, "FORMAT_VERSION", documents_module.FORMAT_VERSION + 1)
    texts_of("python-docs")
    assert len(read) == 4


def test_version_configuration_and_split_of_a_streamed_data_set_are_part_of_the_key(folder, monkeypatch):
    class Builder:
        def __init__(self, path: str, config: str | None) -> None:
            self.hash, self.config_id = version, config

        def as_streaming_dataset(self, split: str) -> datasets.IterableDataset:
            text = f"{self.hash} {self.config_id} {split}"
            return datasets.IterableDataset.from_generator(lambda: iter([{"text": text}]))

    monkeypatch.setattr(sources, "load_dataset_builder", Builder)
    for version in ("v1", "v2"):
        for config in ("a", "b"):
            for split in ("train", "test"):
                found = texts_of(f"org/name:{config}", split=split, streaming=True)
                assert found == [f"{version} {config} {split}"]
