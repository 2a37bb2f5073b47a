"""What the tests of the captioner share: images with captions, and the settings of tiny runs."""

import json

import numpy as np
from datasets import Dataset, Features, Image, Value
from PIL import Image as PillowImage

from regard.tokenization.processor import make_captioner_processor
from regard.tokenization.words import train_words
from regard.training.examples.captions import CaptionExamples

MODES = ("L", "RGBA", "P", "I;16", "RGB", "LA", "1")
SIZED = {
    "recurrent": {"hidden_size": 24},
    "transformer": {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40},
}
TINY = {
    "image_size": 33,
    "max_length": 7,
    "batch_size": 4,
    "steps": 3,
    "validation": "0.25",
    "log_with": ["none"],
    "config": SIZED["recurrent"],
}


def draw(mode: str, seed: int) -> PillowImage.Image:
    """An image of noise, of a size of its own."""
    rng = np.random.default_rng(seed)
    if mode == "I;16":
        return PillowImage.fromarray(rng.integers(2**16, size=(37, 41 + seed), dtype=np.uint16))
    return PillowImage.fromarray(rng.integers(256, size=(29 + seed, 43, 3), dtype=np.uint8)).convert(mode)


def write_images(folder, captions: list[str], modes=MODES, column: str = "text") -> str:
    folder.mkdir(parents=True)
    for number in range(len(captions)):
        image = draw(modes[number % len(modes)], number)
        image.save(folder / f"{number}.png")
        assert PillowImage.open(folder / f"{number}.png").mode == image.mode
    rows = ({"file_name": f"{number}.png", column: caption} for number, caption in enumerate(captions))
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(folder)


CAPTIONS = [f"a {'grey' if number % 2 else 'bright'} image no. {number % 5}" for number in range(20)]


def make_rows(captions: list[str]) -> Dataset:
    columns = {"image": [draw("RGB", number) for number in range(len(captions))], "text": captions}
    return Dataset.from_dict(columns, features=Features({"image": Image(), "text": Value("string")}))


def make_examples(captions: list[str], known: list[str] | None = None, max_length: int = 9, seed: int = 0):
    processor = make_captioner_processor(train_words(known or captions), (15, 21))
    return CaptionExamples(make_rows(captions), processor, max_length, seed)
