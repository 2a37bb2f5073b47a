"""Records that can't be read in the middle of a corpus: each is stopped at with its place, or left out and counted."""

import gzip
import json
import logging
import random

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from regard.training.reading import documents as documents_module
from regard.training.reading import sources, tables, text_files
from regard.training.reading.bad_records import SHOWN, skipped_records
from regard.training.reading.captioned_images import load_captions
from regard.training.reading.documents import load_documents
from regard.training.reading.splits import load_split
from regard.training.reading.text_pairs import load_pairs
from regard.training.run.settings import TrainingSettings
from tests.support.reading import refusal_by, write, write_lines
from tests.training.reading.test_captioned_images import draw


@pytest.fixture
def skipping(folder, caplog):
    """Reads documents, leaving out bad records: their texts, how many were left out, and what was logged of each."""

    def read(*args, **kwargs) -> tuple[list[str], int, list[str]]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "regard.training"):
            corpus = load_documents(*args, bad_records="skip", **kwargs)
        logged = [message.removeprefix("Left out: ") for message in caplog.messages if "Left out: " in message]
        return corpus["text"][:], skipped_records(corpus), logged

    return read


# One record in the middle

GOOD = '{"text": "fine"}'
LINES = {
    "undecodable": (b'{"text": "caf\xe9"}', "t.jsonl:2 is not UTF-8: byte 0xe9 after 13 characters"),
    "not JSON": (b'{"text": "cut', "t.jsonl:2 does not parse as JSON (one object a line): Invalid control character"),
    "no object": (b'["text"]', "t.jsonl:2 must be a JSON object, not list (['text'])"),
    "other type": (b'{"text": 3}', "t.jsonl:2: column 'text' must hold text, not int (3)"),
    "nothing": (b'{"text": null}', "t.jsonl:2: column 'text' must hold text, not NoneType (None)"),
    "no column": (b'{"body": "b"}', "t.jsonl:2 has no column 'text'; `text_column` can be 'body'"),
    "surrogate": (rb'{"text": "a\ud800"}', "t.jsonl:2: character 1 is half a surrogate pair, which is no text"),
    "deep": (b"[" * 100_000, "t.jsonl:2 does not parse as JSON (one object a line): "),
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_json_line(skipping, name, suffix):
    line, message = LINES[name]
    write(f"t.jsonl{suffix}", b"\n".join([GOOD.encode(), line, b"", GOOD.replace("fine", "good").encode()]))
    texts, skipped, logged = skipping(f"t.jsonl{suffix}")
    assert (texts, skipped) == (["fine", "good"], 1)
    assert len(logged) == 1
    assert logged[0].startswith(message.replace("t.jsonl", f"t.jsonl{suffix}"))
    # By default it is an error, which names the place or, of what is not UTF-8, the byte in the file.
    place = "byte 30" if name == "undecodable" else f"t.jsonl{suffix}:2"
    assert place in refusal_by(load_documents, f"t.jsonl{suffix}")


def test_escaped_pair_of_surrogates_is_one_character(skipping):
    write("t.jsonl", rb'{"text": "\ud83d\ude00"}')
    assert skipping("t.jsonl") == (["😀"], 0, [])


@pytest.mark.parametrize(
    ("rows", "left", "messages"),
    [
        (b"1,one\n2,b\xff\n3,three\n", ["one", "three"], ["t.csv:3 is not UTF-8: byte 0xff after 3 characters"]),
        # In a column that is not read, as well.
        (b"1,one\n\xff,b\n3,three\n", ["one", "three"], ["t.csv:3 is not UTF-8: byte 0xff after 0 characters"]),
        (b"1,one\n2\n3,three\n", ["one", "three"], ["t.csv:3: column 'text' must hold text, not NoneType (None)"]),
        (b"1,one\n2,b,c\n3,three\n", ["one", "three"], ["t.csv:3 has more fields than the header, 'id', 'text'"]),
        (b'1,one\n2,"b"c\n3,three\n', ["one", "three"], ["t.csv:3 does not parse as CSV (excel): ',' expected"]),
        # A quote that nothing closes takes all that follows.
        (b'1,one\n2,"b\n3,three\n', ["one"], ["t.csv:3 does not parse as CSV (excel): unexpected end of data (and"]),
        (b'1,"o\xff\nne"\n2,two\n', ["two"], ["t.csv:2 is not UTF-8: byte 0xff after 4 characters"]),
    ],
)
def test_csv_row(skipping, rows, left, messages):
    write("t.csv", b"id,text\n" + rows)
    texts, skipped, logged = skipping("t.csv")
    assert (texts, skipped) == (left, len(messages))
    assert [shown[: len(message)] for shown, message in zip(logged, messages, strict=True)] == messages
    assert "t.csv" in refusal_by(load_documents, "t.csv")


def test_parquet_rows(skipping):
    texts = pa.array([b"one", b"caf\xe9", None, b"four"]).view(pa.string())
    pa.parquet.write_table(pa.table({"text": texts}), "t.parquet")
    expected = ["t.parquet:2 is not UTF-8", "t.parquet:3: column 'text' must hold text, not NoneType (None)"]
    assert skipping("t.parquet") == (["one", "four"], 2, expected)


@pytest.mark.parametrize("documents", ["file", "blank-line", "line"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_text_that_is_not_utf8(skipping, documents, newline):
    write("1.txt", f"one{newline}{newline}two".encode() + b"\xff" + f"{newline}three{newline}{newline}four".encode())
    write("2.txt", "five")
    expected = {
        "file": (["five"], "./1.txt is not UTF-8: byte 0xff after 8 characters"),
        "blank-line": (["one\n", "four", "five"], "./1.txt:3 is not UTF-8: byte 0xff after 3 characters"),
        "line": (["one", "three", "four", "five"], "./1.txt:3 is not UTF-8: byte 0xff after 3 characters"),
    }
    left, message = expected[documents]
    assert skipping(".", documents=documents) == (left, 1, [message])


def test_place_of_a_bad_line_far_into_a_file(skipping):
    # Beyond the decoder's buffer; and the last character is cut off.
    write("t.txt", "é\n".encode() * 30_000 + b"\xff\n" + "ok\n é".encode()[:-1])
    texts, skipped, logged = skipping("t.txt", documents="line")
    assert (texts[-2:], len(texts), skipped) == (["é", "ok"], 30_001, 2)
    assert [message.split(" is not")[0] for message in logged] == ["t.txt:30001", "t.txt:30003"]


# Too large


@pytest.mark.parametrize("documents", ["file", "blank-line", "line"])
def test_document_that_is_too_large(skipping, monkeypatch, documents):
    monkeypatch.setattr(documents_module, "MAX_DOCUMENT_BYTES", 10)
    write("1.txt", "12345678901\n\nsmall")
    write("2.txt", "é" * 5)
    write("3.txt", "é" * 6)
    left = ["éé" + "é" * 3] if documents == "file" else ["small", "é" * 5]
    texts, skipped, logged = skipping(".", documents=documents)
    assert (texts, skipped) == (left, 2)
    assert all("one document of more than 10 bytes" in message for message in logged)


@pytest.mark.parametrize(("documents", "size"), [("file", 50), ("blank-line", 50), ("line", 50)])
def test_no_more_of_a_text_is_held_than_is_needed(skipping, monkeypatch, documents, size):
    # What the file object is asked for at once, and what is made of it.
    monkeypatch.setattr(documents_module, "MAX_DOCUMENT_BYTES", 10)
    largest = 0
    original = text_files.read_pieces

    def pieces(*args):
        nonlocal largest
        for number, piece in original(*args):
            largest = max(largest, len(piece))
            yield number, piece

    monkeypatch.setattr(text_files, "read_pieces", pieces)
    monkeypatch.setattr(documents_module, "read_pieces", pieces)
    write("1.txt", "x" * size + "\ny\n" + "z" * size)
    write("2.txt", "fine")
    texts, skipped, _ = skipping(".", documents=documents)
    assert largest == 11
    left, number = {"file": (["fine"], 1), "blank-line": (["fine"], 1), "line": (["y", "fine"], 2)}[documents]
    assert (texts, skipped) == (left, number)


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv"])
def test_line_of_a_table_that_is_too_long(skipping, monkeypatch, name):
    monkeypatch.setattr(tables, "MAX_LINE", 40)
    text = {"t.jsonl": '{"text": "%s"}\n', "t.csv": "%s\n"}[name]
    write(name, ("text\n" if name == "t.csv" else "") + "".join(text % word for word in ("one", "x" * 200, "two")))
    texts, skipped, logged = skipping(name)
    assert (texts, skipped) == (["one", "two"], 1)
    assert logged == [f"{name}:{2 if name == 't.jsonl' else 3}: a line of more than 40 characters"]


# A file that can't be read on


@pytest.mark.parametrize("documents", ["file", "line"])
@pytest.mark.parametrize("damage", ["truncated", "no checksum", "no magic", "bad block"])
def test_damaged_gzip_file_counts_once(skipping, documents, damage):
    lines = [f"{number} {random.Random(number).random()}" for number in range(5000)]
    data = gzip.compress("\n".join(lines).encode())
    damaged = {
        "truncated": data[: len(data) // 2],
        "no checksum": data[:-4],
        "no magic": data[1:],
        "bad block": data[:10] + b"\xff" + data[11:],
    }
    with open("1.txt.gz", "wb") as file:
        file.write(damaged[damage])
    write("2.txt", "after")
    texts, skipped, logged = skipping(".", documents=documents)
    assert texts[-1] == "after"
    assert (skipped, len(logged)) == (1, 1)
    if documents == "file" or damage in ("no magic", "bad block"):
        assert len(texts) == 1
        assert logged[0].startswith("'./1.txt.gz' is not a complete gzip file: ")
    else:
        # What was read before stays.
        assert 1000 < len(texts) < 5001
        assert texts[:-1] == lines[: len(texts) - 1]
        assert logged[0].startswith(f"'./1.txt.gz' is not a complete gzip file, after line {len(texts) - 1:,}: ")


def test_damaged_row_group_of_parquet_counts_once(skipping):
    rows = pa.table({"text": [f"{number}" * 40 for number in range(30)]})
    pa.parquet.write_table(rows, "1.parquet", row_group_size=10, compression="zstd", use_dictionary=False)
    group = pa.parquet.read_metadata("1.parquet").row_group(1).column(0)
    with open("1.parquet", "r+b") as file:
        file.seek(group.data_page_offset)
        file.write(b"\xff" * 8)
    pa.parquet.write_table(pa.table({"text": ["after"]}), "2.parquet")
    texts, skipped, logged = skipping(".")
    assert texts == [f"{number}" * 40 for number in (*range(10), *range(20, 30))] + ["after"]
    assert skipped == len(logged) == 1
    assert logged[0].startswith("'./1.parquet', rows 11 to 20, does not read as Parquet: ")
    assert "rows 11 to 20" in refusal_by(load_documents, "1.parquet")


@pytest.mark.parametrize("content", [b"no", b"", b"PAR1" + b"\0" * 100 + b"PAR1"])
def test_file_that_is_not_parquet_counts_once(skipping, content):
    write("1.parquet", content)
    pa.parquet.write_table(pa.table({"text": ["after"]}), "2.parquet")
    texts, skipped, logged = skipping(".")
    assert (texts, skipped) == (["after"], 1)
    assert logged[0].startswith("'./1.parquet' does not read as Parquet: ")


def test_what_is_wrong_with_a_whole_source_is_an_error(skipping):
    refused = [
        ("no.jsonl", "there is nothing of that name"),
        (write("a.csv", "id,body\n1,one\n"), "a.csv:2 has no column 'text'"),
        (write("b.csv", "text,text\none,two\n"), "has 2 columns 'text'"),
        (write("c.csv", '"text\none\n'), "c.csv:1 does not parse as CSV"),
        (write("d.csv", b"text\xff\none\n"), "d.csv:1 is not UTF-8"),
    ]
    pa.parquet.write_table(pa.table({"body": ["one"]}), "e.parquet")
    refused.append(("e.parquet", "e.parquet has no column 'text'"))
    for name, message in refused:
        assert message in refusal_by(load_documents, name, bad_records="skip")


# What is told of them


def test_nothing_left(folder):
    write("t.jsonl", '{"body": "a"}\n{"text": 1}\n')
    assert refusal_by(load_documents, "t.jsonl", bad_records="skip") == (
        "the corpus is empty: no text in 't.jsonl' (1 file); 2 bad records were left out, the first: "
        "t.jsonl:1 has no column 'text'; `text_column` can be 'body'"
    )


def test_action_must_be_known(folder):
    message = "`bad_records` ('ignore') must be one of 'stop', 'skip'"
    write("t.txt", "a")
    for load in (load_documents, load_pairs, load_captions):
        assert refusal_by(load, "t.txt", bad_records="ignore") == message
    with pytest.raises(ValueError, match=r"`bad_records` \('ignore'\) must be one of stop, skip"):
        TrainingSettings(bad_records="ignore")


def test_first_few_are_logged_and_all_are_counted(folder, caplog):
    write("t.jsonl", "{}\n" * 1200 + GOOD)
    with caplog.at_level(logging.WARNING, "regard.training"):
        corpus = load_documents("t.jsonl", bad_records="skip")
    places = [f"Left out: t.jsonl:{line} has no column 'text'; `text_column` can be " for line in range(1, SHOWN + 1)]
    assert caplog.messages == [*places, "1,200 bad records were left out."]
    assert skipped_records(corpus) == 1200


def test_count_comes_from_the_cache(folder, caplog, monkeypatch):
    write("t.jsonl", "{}\n{}\n" + GOOD)
    write("good.jsonl", GOOD)
    first = load_documents("t.jsonl", bad_records="skip")
    monkeypatch.setattr(text_files, "open_file", None)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "regard.training"):
        second = load_documents("t.jsonl", bad_records="skip")
    assert second._fingerprint == first._fingerprint
    assert skipped_records(second) == 2
    assert caplog.messages == ["2 bad records were left out."]
    monkeypatch.undo()


def test_choice_is_part_of_the_key(folder):
    write("t.jsonl", "{}\n" + GOOD)
    assert load_documents("t.jsonl", bad_records="skip")["text"][:] == ["fine"]
    assert "t.jsonl:1" in refusal_by(load_documents, "t.jsonl")
    write("good.jsonl", GOOD)
    stopped, skipped = (load_documents("good.jsonl", bad_records=action) for action in ("stop", "skip"))
    assert stopped._fingerprint != skipped._fingerprint


def test_each_source_counts_once(folder):
    write("t.jsonl", "{}\n" + "\n".join([GOOD] * 20))
    write("u.jsonl", "{}\n{}\n" + GOOD)
    t, u = (load_documents(name, bad_records="skip") for name in ("t.jsonl", "u.jsonl"))
    parts = t.train_test_split(test_size=4, seed=0)
    assert skipped_records(parts["train"], parts["test"]) == 1
    assert skipped_records(parts["train"], u) == 3
    assert skipped_records(datasets.concatenate_datasets([parts["train"], u]), parts["test"]) == 3
    assert skipped_records(datasets.Dataset.from_dict({"text": ["a"]})) == 0


def test_most_documents_are_good_ones(skipping):
    write("t.jsonl", "\n".join(["{}", GOOD] * 4))
    assert skipping("t.jsonl", max_documents=3)[:2] == (["fine"] * 3, 3)


# Pairs and images


def test_pairs(folder):
    rows = [{"source": "a", "target": "b"}, {"source": "c"}, {"source": "d", "target": " "}]
    write_lines("t.jsonl", *rows, {"source": "e", "target": "f"})
    pairs = load_pairs("t.jsonl", bad_records="skip", max_pairs=2)
    assert (pairs["source"][:], skipped_records(pairs)) == (["a", "e"], 2)
    write_lines("u.jsonl", *rows[1:])
    assert refusal_by(load_pairs, "u.jsonl", bad_records="skip").startswith(
        "there is no pair in 'u.jsonl' (1 file); 2 bad records were left out, the first: u.jsonl:1 has no column"
    )


def make_photos() -> None:
    for number in range(4):
        draw(f"photos/{number}.png", number)
    with open("photos/1.png", "r+b") as file:
        file.truncate(100)
    names = ["0.png", "1.png", "1.png", "no.png", "2.png", "3.png"]
    rows = [{"file_name": name, "text": f"caption {number}"} for number, name in enumerate(names)]
    write_lines("photos/metadata.jsonl", *rows[:5], {"file_name": "2.png", "text": " "}, rows[5])


def test_images(folder, caplog):
    make_photos()
    for _ in range(2):  # read, and from the cache
        captions = load_captions("photos", bad_records="skip")
        assert captions["text"][:] == ["caption 0", "caption 4", "caption 5"]
        # Two rows of metadata, and two with one image that does not decode.
        assert skipped_records(captions) == 4
        assert [image.size for image in captions["image"]] == [(7, 13)] * 3
        settings = TrainingSettings(data=["photos"], validation="0.4")
        parts = load_split(settings, lambda *_, rows=captions: rows)
        assert skipped_records(*parts) == 4
    assert "photos/metadata.jsonl:4 names the image 'no.png'" in refusal_by(load_captions, "photos")


def test_images_of_which_none_is_left(folder):
    draw("photos/0.png")
    with open("photos/0.png", "r+b") as file:
        file.truncate(100)
    write_lines("photos/metadata.jsonl", {"file_name": "0.png", "text": "caption"})
    assert refusal_by(load_captions, "photos", bad_records="skip") == (
        "there is no image that decodes: 1 bad record was left out"
    )


def test_images_of_the_hub(folder, monkeypatch):
    make_photos()
    images = [{"image": {"path": f"photos/{n}.png", "bytes": None}, "text": f"{n}"} for n in (0, 1, 2)]
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    rows = datasets.Dataset.from_list([*images, images[0] | {"text": None}, images[0] | {"image": None}], features)
    rows.info.description = "Photos."
    monkeypatch.setattr(sources, "load_dataset", lambda path, config, split: rows)
    captions = load_captions("org/name", bad_records="skip")
    assert (captions["text"][:], skipped_records(captions)) == (["0", "2"], 3)


# Runs


def test_run_tells_how_many_were_left_out(tmp_path, pretrain, texts):
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "texts.jsonl").write_text("\n".join([*lines[:6], '{"text": 1}', *lines[6:], "{"]))
    given = {"data": [str(tmp_path / "texts.jsonl")], "steps": 1, "evaluation_batches": 1}
    with pytest.raises(ValueError, match=r"texts.jsonl:7: column 'text' must hold text"):
        pretrain(tmp_path / "stopped", **given)
    for name in ("first", "cached"):
        results = pretrain(tmp_path / name, **given, bad_records="skip")
        assert results["data"]["skipped_records"] == 2
        assert results["data"]["documents"] + results["data"]["held_out_documents"] == len(texts)
    (tmp_path / "good.jsonl").write_text("\n".join([*lines, "{"]))
    held_out = pretrain(tmp_path / "apart", **given, bad_records="skip", validation=str(tmp_path / "good.jsonl"))
    assert held_out["data"]["skipped_records"] == 3


@pytest.mark.parametrize("family", ["transformer"])
def test_run_on_pairs_tells_it_too(tmp_path, train_pairs, family):
    lines = [json.dumps({"source": f"s{i}", "target": f"t{i}"}) for i in range(20)]
    (tmp_path / "pairs.jsonl").write_text("\n".join([*lines, "{}"]))
    given = {"data": [str(tmp_path / "pairs.jsonl")], "steps": 1, "max_length": 20, "bad_records": "skip"}
    assert train_pairs(family, tmp_path / "run", **given)["data"]["skipped_records"] == 1


# What is odd, and yet text


@pytest.mark.parametrize("action", ["stop", "skip"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", ["t.jsonl", "t.csv", "t.csv.gz", "t.txt"])
def test_marks_and_line_ends_are_no_text(folder, name, mark, newline, action):
    lines = {"t.jsonl": ['{"text": "one"}', '{"text": "two"}'], "t.txt": ["one", "two"]}
    write(name, mark + "".join(line + newline for line in lines.get(name, ["text", "one", '"two"'])))
    corpus = load_documents(name, documents="line", bad_records=action)
    assert corpus["text"][:] == ["one", "two"]
    assert skipped_records(corpus) == 0


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_null_characters_are_kept(folder, action):
    write("t.jsonl", '{"text": "a\\u0000b"}')
    write("t.txt", "a\0b")
    assert load_documents(["t.jsonl", "t.txt"], bad_records=action)["text"][:] == ["a\0b"] * 2


@pytest.mark.parametrize("action", ["stop", "skip"])
@pytest.mark.parametrize("name", ["t.txt", "t.jsonl", "t.csv", "t.txt.gz", "t.jsonl.gz"])
@pytest.mark.parametrize("documents", ["file", "blank-line", "line"])
def test_empty_files_are_no_bad_records(folder, name, documents, action):
    write(name, "")
    write("u.txt", "one")
    corpus = load_documents([name, "u.txt"], documents=documents, bad_records=action)
    assert (corpus["text"][:], skipped_records(corpus)) == (["one"], 0)


@pytest.mark.parametrize("documents", ["file", "blank-line", "line"])
def test_one_line_of_many_megabytes(folder, documents):
    text = "word " * 2**21
    write("t.txt", text)
    assert load_documents("t.txt", documents=documents)["text"][:] == [text]
