"""Captioned images: a folder or a data set on the Hub is read into one `datasets.Dataset` of images and texts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from datasets import Dataset, Features, Image, Value
from datasets.fingerprint import Hasher
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

from ...tokenization.processor import to_rgb
from .bad_records import BadRecords, counted, note
from .cache import write_dataset
from .sources import file_status, is_data_set_id, list_folder, open_hub_data_set, require_limit
from .tables import Column, find_column, listed, read_table
from .text_files import require_content

METADATA_FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")

# Part of every cache key: raise it whenever the same input gives other rows, or other errors, than before.
FORMAT_VERSION = 2

# The names of folders by which `imagefolder` recognizes splits.
SPLIT_FOLDERS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}

logger = logging.getLogger("regard.training")


def load_captions(
    folder: str | os.PathLike[str],
    *,
    caption_column: str = "text",
    split: str = "train",
    max_images: int | None = None,
    bad_records: str = "stop",
) -> Dataset:
    """Loads images and their captions: a data set with the columns `image` and `text`.

    Every image is decoded once before this returns, so that a damaged one cannot end a training run. The result of
    this check, and the list of the images, are stored in the cache of `datasets`. A later call checks again only if an
    argument that matters, or the size or time of change of a file, is different. The images stay where they are.

    Args:
        folder: One of:

            - A folder as `imagefolder` of `datasets` reads it: images, with a metadata.jsonl, metadata.csv or
              metadata.parquet that has a row for each caption. Its column `file_name` is the path of the image from
              the folder of this file. An image may have several captions; an image without one is left out, with a
              warning. Subfolders `train`, `validation` and `test`, each with its own metadata, are splits; without
              them the whole folder is `train`.
            - A data set on the Hub with a column of images: `org/name` or `org/name:config`.
        caption_column: The column that holds the captions.
        split: The split to read.
        max_images: The most rows to read, each an image with one caption. Images that do not decode are counted.
        bad_records: What to do with a row of the metadata that cannot be read or names no image, and with an image
            that does not decode: "stop" or "skip", as for `load_documents`.

    Returns:
        The rows, in an order that is always the same.

    Raises:
        ValueError: An argument or the folder is invalid, the metadata does not parse, the caption column is missing, a
            caption is empty or nothing but white space, or an image is missing or does not decode.
        OSError: A file cannot be opened, or the Hub cannot be reached.
    """
    require_limit("images", max_images)
    bad = BadRecords(bad_records)
    name = os.fspath(folder)
    if is_data_set_id(name):
        return _hub_captions(name, caption_column, split, max_images, bad)
    if not os.path.isdir(name):
        what = "a file" if os.path.exists(name) else "nothing of that name"
        raise ValueError(f"`folder` ({name!r}) must be a folder or a data set id (org/name): there is {what}")
    return _folder_captions(_split_folder(name, split), caption_column, max_images, bad)


def _hub_captions(name: str, caption_column: str, split: str, max_images: int | None, bad: BadRecords) -> Dataset:
    rows, _ = open_hub_data_set(name, split, argument="folder")
    kind = find_column(Column(caption_column, "caption_column"), rows.features, name)
    if kind != Value("string") and kind != Value("large_string"):
        raise ValueError(f"{name}: column {caption_column!r} must hold text, not {kind}")
    images = [column for column, feature in rows.features.items() if isinstance(feature, Image)]
    if len(images) != 1 and "image" not in images:
        raise ValueError(
            f"{name} must have one column of images, or one that is called 'image', "
            f"not {len(images)} among {listed(rows.features)}"
        )
    image_column = "image" if "image" in images else images[0]
    rows = rows.select_columns([image_column, caption_column])
    rows = rows.rename_columns({image_column: "image", caption_column: "text"})
    if max_images is not None:
        rows = rows.select(range(min(max_images, len(rows))))

    def check(image: dict[str, Any] | None, text: str | None, index: int) -> None:
        where = f"{name}:{index + 1}"
        require_content(text or "", caption_column, where)
        _decode(image, where)

    return _checked(rows, check, caption_column, bad)


def _split_folder(folder: str, split: str) -> str:
    """Returns the folder that holds a split."""
    subfolders = {
        entry.name: entry.path for entry in sorted(os.scandir(folder), key=lambda entry: entry.name) if entry.is_dir()
    }
    splits = {name: subfolders[word] for name, words in SPLIT_FOLDERS.items() for word in words if word in subfolders}
    if not splits:
        # `imagefolder` would also look for splits in the names of images: of a folder with an image test.png, or
        # train-at-night.jpg, it would read nothing else, and without a caption.
        splits = {"train": folder}
    elif metadata := _metadata_of(folder):
        raise ValueError(
            f"folder {folder!r} holds both {os.path.basename(metadata)!r} and the splits {listed(splits)}: "
            "move its rows into a metadata file in each split's folder, or rename these folders"
        )
    if split not in splits:
        raise ValueError(f"`split` ({split!r}) must be one of {listed(splits)}, which folder {folder!r} has")
    return splits[split]


def _metadata_of(folder: str) -> str | None:
    """Returns the path of the metadata file in a folder; None if there is none."""
    found = [path for path in (os.path.join(folder, name) for name in METADATA_FILES) if os.path.isfile(path)]
    if len(found) > 1:
        raise ValueError(
            f"folder {folder!r} holds more than one metadata file: {listed(map(os.path.basename, found))}"
        )
    return found[0] if found else None


def _folder_captions(folder: str, caption_column: str, max_images: int | None, bad: BadRecords) -> Dataset:
    paths = list_folder(folder)
    metadata = [path for parent in dict.fromkeys(map(os.path.dirname, paths)) if (path := _metadata_of(parent))]
    if not metadata:
        raise ValueError(
            f"folder {folder!r} holds no metadata file ({', '.join(METADATA_FILES)}), which has a row for each "
            f"caption with the columns 'file_name' and {caption_column!r}"
        )

    # `imagefolder` itself does not serve: it turns the captions "None" and "2020-01-01" into no value and a date, it
    # reads several metadata files in random order, and its errors name no line and not always the file.
    def rows() -> Iterator[dict[str, str]]:
        captions = (item for path in metadata for item in _read_metadata(path, caption_column, bad))
        empty = True
        for image, text in islice(captions, max_images):
            empty = False
            yield {"image": image, "text": text}
        if empty:
            raise ValueError(f"there is no caption in {listed(metadata)}{bad.hint()}")

    files = [file_status(path) for path in paths]
    captions = write_dataset(
        rows,
        features=Features({"image": Image(), "text": Value("string")}),
        key=("captions", FORMAT_VERSION, caption_column, max_images, os.path.abspath(folder), files),
        bad=bad,
    )
    captioned = {image["path"] for image in captions.cast_column("image", Image(decode=False))["image"]}
    good: set[str] = set()

    def check(image: dict[str, Any], text: str, index: int) -> None:
        if image["path"] not in good:
            _decode(image, image["path"])
            good.add(image["path"])

    # Some images may be behind a link or in a hidden folder, and so not in `files`.
    checked = _checked(captions, check, [file_status(path) for path in sorted(captioned)], bad)
    if max_images is None:
        _warn_of_images_without_caption(folder, paths, captioned)
    return checked


def _read_metadata(name: str, caption_column: str, bad: BadRecords) -> Iterator[tuple[str, str]]:
    folder = os.path.dirname(os.path.abspath(name))
    columns = [Column("file_name"), Column(caption_column, "caption_column")]

    def parse(row: tuple[str, tuple[str, ...]]) -> tuple[str, str]:
        where, (file_name, text) = row
        require_content(text, caption_column, where)
        return _image_path(folder, file_name, where), text

    return bad.parse_each(read_table(name, columns, bad), parse)


def _image_path(folder: str, file_name: str, where: str) -> str:
    require_content(file_name, "file_name", where)
    inside = os.path.normpath(file_name.replace("\\", "/"))
    if "://" in file_name or os.path.isabs(inside) or inside.split(os.sep)[0] == os.pardir:
        raise ValueError(
            f"{where}: `file_name` ({file_name!r}) must be a path from the folder of the metadata file to an "
            "image inside of it"
        )
    path = os.path.join(folder, inside)
    if not os.path.isfile(path):
        raise ValueError(f"{where} names the image {file_name!r}, but there is no file {path!r}")
    return path


def _warn_of_images_without_caption(folder: str, paths: Sequence[str], captioned: Container[str]) -> None:
    images = [path for path in paths if os.path.splitext(path)[1].lower() in ImageFolder.EXTENSIONS]
    missing = [path for path in images if os.path.abspath(path) not in captioned]
    if missing:
        logger.warning(
            "%d of the %d images in folder %r have no caption and are left out, such as %r",
            len(missing),
            len(images),
            folder,
            missing[0],
        )


def _checked(rows: Dataset, check: Callable[[Any, Any, int], None], key: Any, bad: BadRecords) -> Dataset:
    """Returns the rows that pass a check. The result is stored in the cache, under the rows and the key."""

    def passes(image: Any, text: Any, index: int) -> dict[str, bool]:
        try:
            check(image, text, index)
        except ValueError as error:
            bad.add(error)
            return {"checked": False}
        return {"checked": True}

    fingerprint = Hasher.hash(("checked", FORMAT_VERSION, rows._fingerprint, key, bad.stops))
    checks = rows.cast_column("image", Image(decode=False)).map(
        passes,
        with_indices=True,
        input_columns=["image", "text"],
        remove_columns=["image", "text"],
        features=Features({"checked": Value("bool")}),
        new_fingerprint=fingerprint,
        desc="Checking images",
    )
    passed = checks.data.column("checked").to_numpy()
    number = int((~passed).sum())
    if not number:
        return rows
    if number == len(rows):
        raise ValueError(f"there is no image that decodes: {counted(number)} left out")
    logger.warning("%s left out, as images do not decode.", counted(number))
    kept = rows.select(np.flatnonzero(passed))
    kept.info.description = f"{kept.info.description}\n{note(number, fingerprint)}"
    return kept


def _decode(image: dict[str, Any] | None, where: str) -> None:
    if image is None:
        raise ValueError(f"{where} has no image")
    try:
        # In RGB, as models read it.
        to_rgb(Image().decode_example(image))
    except Exception as error:  # Pillow's readers raise errors of many kinds
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: the image does not decode: {type(error).__name__}: {reason}") from None
