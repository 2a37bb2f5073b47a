import logging
import os
from functools import partial

import datasets
import numpy as np
import PIL.Image
import pytest

from regard.training.reading import captioned_images as images
from regard.training.reading import sources
from regard.training.reading.captioned_images import load_captions
from tests.support.reading import refusal_by, write, write_lines

refusal = partial(refusal_by, load_captions)


def draw(name: str, seed: int = 0) -> np.ndarray:
    """Writes an image of noise, and returns its pixels."""
    os.makedirs(os.path.dirname(name), exist_ok=True)
    pixels = np.random.default_rng(seed).integers(256, size=(13, 7, 3), dtype=np.uint8)
    image = PIL.Image.fromarray(pixels)
    image.save(name)
    return pixels


def make(name: str = "photos", *captions: str) -> str:
    """A folder of PNG images, 0.png and so on, with a caption each."""
    for number in range(len(captions)):
        draw(f"{name}/{number}.png", number)
    rows = ({"file_name": f"{number}.png", "text": caption} for number, caption in enumerate(captions))
    write_lines(f"{name}/metadata.jsonl", *rows)
    return name


def rows_of(*args, **kwargs) -> list[tuple[str, str]]:
    """The images' paths and their captions."""
    captions = load_captions(*args, **kwargs)
    assert captions.column_names == ["image", "text"]
    assert captions.features == datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    paths = captions.cast_column("image", datasets.Image(decode=False))
    return [(os.path.relpath(row["image"]["path"]), row["text"]) for row in paths]


# Folders


def test_images_and_captions(folder):
    make("photos", "one", "two, é 你")
    captions = load_captions(folder / "photos")
    assert captions["text"][:] == ["one", "two, é 你"]
    for number, image in enumerate(captions["image"]):
        assert isinstance(image, PIL.Image.Image)
        np.testing.assert_array_equal(np.asarray(image), draw("again/x.png", number))


METADATA = {
    "metadata.jsonl": '{"text": "one", "file_name": "1.png"}\n{"text": "two", "file_name": "sub/2.jpg"}\n',
    "metadata.csv": 'id,text,file_name\n1,one,1.png\n2,"two",sub/2.jpg\n',
}


@pytest.mark.parametrize("name", METADATA)
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_reads_what_imagefolder_reads(folder, name, split):
    # One folder that is all `train`, or one with splits by another of their names.
    part = "photos" if split == "train" else f"photos/{'val' if split == 'validation' else split}"
    draw(f"{part}/1.png")
    draw(f"{part}/sub/2.jpg")
    draw(f"{part}/other/3.png")
    write(f"{part}/{name}", METADATA[name])
    write(f"{part}/other/{name}", METADATA[name].replace("1.png", "3.png").replace("sub/2.jpg", "./3.png"))
    expected = datasets.load_dataset("imagefolder", data_dir="photos", split=split)
    paths = expected.cast_column("image", datasets.Image(decode=False))
    rows = rows_of("photos", split=split)
    # It reads several metadata files in any order.
    assert sorted(rows) == sorted((os.path.relpath(row["image"]["path"]), row["text"]) for row in paths)
    assert [text for _, text in rows] == ["one", "two"] * 2
    assert [path for path, _ in rows] == [f"{part}/{image}" for image in ("1.png", "sub/2.jpg", *["other/3.png"] * 2)]


def test_captions_are_kept_as_they_are(folder):
    # `imagefolder` takes these for missing values, numbers and dates.
    draw("photos/a.png")
    write("photos/metadata.csv", "file_name,text\na.png,None\na.png,12\na.png,2020-01-01\n")
    assert [text for _, text in rows_of("photos")] == ["None", "12", "2020-01-01"]


def test_names_of_images_are_no_splits(folder):
    # `imagefolder` would read test.png alone, as the split `test`, and without its caption.
    draw("photos/test.png")
    draw("photos/train-at-night.png")
    rows = [{"file_name": name, "text": name} for name in ("test.png", "train-at-night.png")]
    write_lines("photos/metadata.jsonl", *rows)
    assert rows_of("photos") == [(f"photos/{row['file_name']}", row["text"]) for row in rows]


def test_splits(folder):
    make("photos/train", "one")
    make("photos/dev", "two")
    assert rows_of("photos") == [("photos/train/0.png", "one")]
    assert rows_of("photos", split="validation") == [("photos/dev/0.png", "two")]
    message = "`split` ('test') must be one of 'train', 'validation', which folder 'photos' has"
    assert refusal("photos", split="test") == message
    make("photos", "three")
    assert refusal("photos") == (
        "folder 'photos' holds both 'metadata.jsonl' and the splits 'train', 'validation': "
        "move its rows into a metadata file in each split's folder, or rename these folders"
    )
    assert "must be one of 'train'," in refusal(make("flat", "one"), split="test")


def test_caption_column(folder):
    draw("photos/a.png")
    write_lines("photos/metadata.jsonl", {"file_name": "a.png", "short": "s", "long": "l"})
    assert rows_of("photos", caption_column="short") == [("photos/a.png", "s")]
    assert rows_of("photos", caption_column="long") == [("photos/a.png", "l")]
    assert refusal("photos") == (
        "photos/metadata.jsonl:1 has no column 'text'; `caption_column` can be 'file_name', 'short', 'long'"
    )


def test_max_images(folder, caplog):
    make("photos", "one", "two", "three", "")
    draw("photos/without.png")
    with open("photos/2.png", "wb") as file:
        file.write(b"damaged")
    assert rows_of("photos", max_images=2) == [("photos/0.png", "one"), ("photos/1.png", "two")]
    assert caplog.messages == []  # the images that were not reached may well have captions
    assert "2.png" in refusal("photos", max_images=3)
    assert (
        refusal("photos", max_images=0)
        == "`max_images` (0) must be at least 1 and less than 2**63, or None for all images"
    )


# What is wrong with a folder


@pytest.mark.parametrize("name", ["photos", "no/such/folder", "", "photos/metadata.jsonl"])
def test_folder_that_does_not_exist(folder, name):
    expected = f"`folder` ({name!r}) must be a folder or a data set id (org/name): there is nothing of that name"
    assert refusal(name) == expected


def test_folder_that_is_a_file(folder):
    make("photos", "one")
    assert refusal("photos/0.png").endswith("must be a folder or a data set id (org/name): there is a file")


def test_folder_without_metadata(folder):
    draw("photos/a.png")
    write("photos/captions.jsonl", "")
    assert refusal("photos") == (
        "folder 'photos' holds no metadata file (metadata.jsonl, metadata.csv, metadata.parquet), which has a row for "
        "each caption with the columns 'file_name' and 'text'"
    )


def test_two_metadata_files(folder):
    make("photos", "one")
    write("photos/metadata.csv", "file_name,text\n0.png,one\n")
    assert refusal("photos") == ("folder 'photos' holds more than one metadata file: 'metadata.jsonl', 'metadata.csv'")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"file_name": "b.png", "text": "b"}, " names the image 'b.png', but there is no file '{data}/photos/b.png'"),
        ({"file_name": "a.png", "text": " "}, ": column 'text' must hold text, not nothing or white space alone"),
        ({"file_name": "a.png", "text": None}, ": column 'text' must hold text, not NoneType (None)"),
        ({"file_name": "a.png", "text": ["b", "c"]}, ": column 'text' must hold text, not list (['b', 'c'])"),
        ({"file_name": "", "text": "b"}, ": column 'file_name' must hold text, not nothing or white space alone"),
        ({"file": "a.png", "text": "b"}, " has no column 'file_name'; it has 'file', 'text'"),
    ],
)
def test_row_of_metadata_that_is_wrong(folder, row, message):
    draw("photos/a.png")
    write_lines("photos/metadata.jsonl", {"file_name": "a.png", "text": "a"}, row)
    assert refusal("photos") == "photos/metadata.jsonl:2" + message.format(data=folder)


@pytest.mark.parametrize("name", ["../a.png", "sub/../../a.png", "{data}/a.png", "file://{data}/a.png"])
def test_image_outside_of_the_folder(folder, name):
    draw(f"{folder}/a.png")
    name = name.format(data=folder)
    write_lines("photos/metadata.jsonl", {"file_name": name, "text": "a"})
    assert refusal("photos") == (
        f"photos/metadata.jsonl:1: `file_name` ({name!r}) must be a path from the folder of the metadata file to an "
        "image inside of it"
    )


def test_metadata_without_a_row(folder):
    draw("photos/a.png")
    write("photos/metadata.csv", "file_name,text\n")
    assert refusal("photos") == "there is no caption in 'photos/metadata.csv'"


@pytest.mark.parametrize("kind", ["png", "jpg", "gif", "bmp"])
@pytest.mark.parametrize("damage", ["no image", "empty", "truncated"])
def test_image_that_does_not_decode(folder, kind, damage):
    name = f"photos/a.{kind}"
    draw(name)
    with open(name, "rb") as file:
        data = file.read()
    with open(name, "wb") as file:
        file.write({"no image": b"no image at all", "empty": b"", "truncated": data[: len(data) * 2 // 3]}[damage])
    write_lines("photos/metadata.jsonl", {"file_name": f"a.{kind}", "text": "a"})
    for _ in range(2):  # a failure is not remembered as a success
        assert refusal("photos").startswith(f"{folder}/{name}: the image does not decode: ")


def test_images_without_a_caption(folder, caplog):
    make("photos", "one", "two")
    with caplog.at_level(logging.WARNING, "regard.training"):
        load_captions("photos")
        assert caplog.messages == []
        draw("photos/sub/b.JPEG")
        draw("photos/c.png")
        write("photos/notes.txt", "no image")
        assert len(rows_of("photos")) == 2
    assert caplog.messages == [
        "2 of the 4 images in folder 'photos' have no caption and are left out, such as 'photos/c.png'"
    ]


# Data sets on the Hub


@pytest.fixture
def hub(folder, monkeypatch):
    """Stands in for the Hub: gives a function that makes the rows of any id."""

    def make_hub(rows, features):
        features = datasets.Features(features)
        datasets.Dataset.from_list(rows, features=features).to_parquet("rows.parquet")

        def load(path, config, split):
            return datasets.load_dataset("parquet", data_files="rows.parquet", split=split)

        monkeypatch.setattr(sources, "load_dataset", load)

    return make_hub


def photo(seed: int, text: str | None, damaged: bool = False) -> dict:
    draw("hub/x.png", seed)
    with open("hub/x.png", "rb") as file:
        data = file.read()
    return {"id": seed, "photo": {"bytes": data[:100] if damaged else data, "path": "x.png"}, "caption": text}


FEATURES = {"id": datasets.Value("int64"), "photo": datasets.Image(), "caption": datasets.Value("string")}


def test_hub_data_set(hub):
    hub([photo(i, f"caption {i}") for i in range(3)], FEATURES)
    captions = load_captions("org/name", caption_column="caption")
    assert captions.features == datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    assert captions["text"][:] == [f"caption {i}" for i in range(3)]
    np.testing.assert_array_equal(np.asarray(captions[2]["image"]), draw("again/x.png", 2))
    assert load_captions("org/name", caption_column="caption", max_images=2)["text"][:] == ["caption 0", "caption 1"]
    assert len(load_captions("org/name", caption_column="caption", max_images=9)) == 3
    assert load_captions("org/name", caption_column="caption", split="train[1:]")["text"][0] == "caption 1"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((1, " "), "org/name:2: column 'caption' must hold text, not nothing or white space alone"),
        ((1, None), "org/name:2: column 'caption' must hold text, not nothing or white space alone"),
        ((1, "text", True), "org/name:2: the image does not decode: "),
    ],
)
def test_row_of_a_hub_data_set_that_is_wrong(hub, row, message):
    hub([photo(0, "fine"), photo(*row)], FEATURES)
    assert refusal("org/name", caption_column="caption").startswith(message)
    assert len(load_captions("org/name", caption_column="caption", max_images=1)) == 1


def test_row_of_a_hub_data_set_without_an_image(hub):
    hub([photo(0, "fine") | {"photo": None}], FEATURES)
    assert refusal("org/name", caption_column="caption") == "org/name:1 has no image"


def test_columns_of_a_hub_data_set(hub):
    hub([photo(0, "fine")], FEATURES)
    assert refusal("org/name") == "org/name has no column 'text'; `caption_column` can be 'id', 'photo', 'caption'"
    message = "org/name: column 'id' must hold text, not Value('int64')"
    assert refusal("org/name", caption_column="id") == message
    hub([{"text": "a"}], {"text": datasets.Value("string")})
    assert refusal("org/name").endswith("one that is called 'image', not 0 among 'text'")
    # Of several, the one that is called `image`; and names that change places.
    row = photo(0, "fine")
    two = {"image": datasets.Image(), "photo": datasets.Image(), "caption": datasets.Value("string")}
    hub([{"image": photo(1, "")["photo"], "photo": row["photo"], "caption": "fine"}], two)
    captions = load_captions("org/name", caption_column="caption")
    np.testing.assert_array_equal(np.asarray(captions[0]["image"]), draw("again/x.png", 1))
    hub([{"image": "fine", "photo": row["photo"]}], {"image": datasets.Value("string"), "photo": datasets.Image()})
    assert load_captions("org/name", caption_column="image")["text"][:] == ["fine"]


# The cache


@pytest.fixture
def decoded(monkeypatch):
    """What is decoded by the check."""
    names = []
    original = images._decode

    def decode(image, where):
        names.append(os.path.basename(where))
        original(image, where)

    monkeypatch.setattr(images, "_decode", decode)
    return names


def test_images_are_decoded_once(folder, decoded):
    make("photos", "one", "two")
    # One that is seen by way of a link alone.
    draw("elsewhere/b.png")
    os.symlink("../elsewhere", "photos/link")
    with open("photos/metadata.jsonl", "a") as file:
        file.write('{"file_name": "0.png", "text": "another"}\n{"file_name": "link/b.png", "text": "b"}\n')
    first = load_captions("photos")
    assert decoded == ["0.png", "1.png", "b.png"]
    second = load_captions("photos")
    assert len(decoded) == 3
    assert first._fingerprint == second._fingerprint
    assert second["text"][:] == ["one", "two", "another", "b"]


@pytest.mark.parametrize("name", ["photos/1.png", "elsewhere/b.png"])
def test_image_that_changes_is_decoded_again(folder, decoded, name):
    make("photos", "one", "two")
    draw("elsewhere/b.png")
    os.symlink("../elsewhere", "photos/link")
    with open("photos/metadata.jsonl", "a") as file:
        file.write('{"file_name": "link/b.png", "text": "b"}\n')
    load_captions("photos")
    with open(name, "wb") as file:
        file.write(b"damaged")
    assert os.path.basename(name) in refusal("photos")
    os.remove(name)
    assert os.path.basename(name) in refusal("photos", error=(ValueError, FileNotFoundError))
    draw(name)
    assert len(load_captions("photos")) == 3


def test_metadata_that_changes_is_read_again(folder):
    make("photos", "one", "two")
    assert [text for _, text in rows_of("photos")] == ["one", "two"]
    make("photos", "three", "four")
    assert [text for _, text in rows_of("photos")] == ["three", "four"]


def test_hub_data_set_is_decoded_once(hub, decoded):
    hub([photo(i, f"caption {i}") for i in range(3)], FEATURES)
    for _ in range(2):
        load_captions("org/name", caption_column="caption")
    assert decoded == ["name:1", "name:2", "name:3"]
