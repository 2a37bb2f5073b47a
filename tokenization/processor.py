"""The captioner's processor: images of any kind to pixel values, captions to ids."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from transformers import BatchFeature, PreTrainedTokenizerBase, ProcessorMixin
from transformers.image_utils import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

# An image, an array of pixels (height, width) or (height, width, channels), or the path of an image file.
ImageSource = Image.Image | np.ndarray | str | os.PathLike

WHITE = (255, 255, 255, 255)


def open_image(source: ImageSource) -> Image.Image:
    """Reads an image, turned the way that its EXIF data says.

    Raises:
        ValueError: if it cannot be read, naming the file where there is one.
        FileNotFoundError: if there is no such file.
        TypeError: if it is nothing that an image can be read from.
    """
    if not isinstance(source, ImageSource):
        raise TypeError(f"an image must be a PIL image, an array or a path, not {type(source).__name__}")
    name = _name_of(source)
    try:
        if isinstance(source, np.ndarray):
            source = Image.fromarray(source)
        image = source if isinstance(source, Image.Image) else Image.open(source)
        return ImageOps.exif_transpose(image)
    except FileNotFoundError:
        raise
    # Pillow's decoders raise these for what they cannot read, and the last for an image that is suspiciously large.
    except (OSError, SyntaxError, ValueError, TypeError, Image.DecompressionBombError) as error:
        raise ValueError(f"the image {name} cannot be read: {error}") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """An image in RGB, of 8 bits each.

    What is transparent is laid onto white. Grey of 16 bits is scaled to 8, and so are the pixels of 32 bits that it is
    sometimes read as. Floating-point pixels go from 0 to 1, or if there are larger ones to 255.

    Raises:
        ValueError: if pixels are outside that range, or of a kind that has no RGB.
    """
    if image.mode.startswith(("I", "F")):
        pixels = np.asarray(image, dtype=np.float64)
        whole = image.mode.startswith("I")
        highest = 65535.0 if whole else 1.0 if pixels.max(initial=0) <= 1 else 255.0
        # Not a number is neither.
        if not ((pixels >= 0) & (pixels <= highest)).all():
            allowed = "0 to 65535" if whole else "0 to 1, or 0 to 255"
            raise ValueError(f"an image of the mode {image.mode} has pixels outside of {allowed}")
        image = Image.fromarray((pixels * (255 / highest)).round().astype(np.uint8))
    if image.has_transparency_data:
        # Not all of these modes have a way to RGBA of their own.
        image = image.convert({"PA": "RGBA", "La": "LA", "RGBa": "RGBA"}.get(image.mode, image.mode)).convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image)
    return image.convert("RGB")


def read_rgb(source: ImageSource) -> Image.Image:
    """Reads an image, turned the way that its EXIF data says, in RGB; see `open_image` and `to_rgb`.

    Raises:
        ValueError: if it cannot be read, or has no RGB, naming the file where there is one.
    """
    image = open_image(source)
    try:
        return to_rgb(image)
    except ValueError as error:
        raise ValueError(f"the image {_name_of(source)} cannot be read: {error}") from None


def _name_of(source: ImageSource) -> str:
    name = getattr(source, "filename", None) or (source if isinstance(source, str | os.PathLike) else "given")
    return os.fspath(name)


class RegardCaptionerProcessor(ProcessorMixin):
    """An image processor and a tokenizer in one, saved beside the model; `AutoProcessor` loads it.

    Args:
        image_processor: scales and normalises RGB images.
        tokenizer: has a beginning and an end token; whatever else it puts around a text is left out.
    """

    def __init__(self, image_processor: Any = None, tokenizer: Any = None) -> None:
        super().__init__(image_processor, tokenizer)
        for name in ("bos_token", "eos_token"):
            if getattr(tokenizer, name) is None:
                raise ValueError(
                    f"`tokenizer` must have a `{name}`: captions begin with `bos_token`, end with `eos_token`"
                )

    @property
    def model_input_names(self) -> list[str]:
        """What `generate` takes."""
        return ["pixel_values", "decoder_input_ids"]

    def __call__(
        self,
        images: ImageSource | Sequence[ImageSource] | None = None,
        text: str | Sequence[str] | None = None,
        *,
        labels: str | Sequence[str] | None = None,
        max_length: int | None = None,
        return_tensors: str | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Prepares images and texts, to train on or to generate from; one is a batch of one.

        Args:
            images: images, arrays or paths of image files: `pixel_values`, (B, 3, height, width).
            text: how the captions begin, for `generate` to continue: `decoder_input_ids`, the beginning token and the
                text's. From an empty text `generate` writes the whole caption.
            labels: whole captions to train on: `labels`, their tokens and the end token.
            max_length: the most tokens of a label, the end token included; longer captions are cut. None: no limit.
            return_tensors: "pt" for tensors, in which -100 pads labels; None for lists, which keep their lengths.
            **kwargs: what the image processor takes.

        Raises:
            ValueError: if an image cannot be read; if a caption has no token but unknown ones; or if the texts of a
                batch differ in their number of tokens.
        """
        if images is None and text is None and labels is None:
            raise ValueError("give `images`, `text` or `labels`")
        if text is not None and labels is not None:
            raise ValueError("give `text`, to generate from, or `labels`, to train on, and not both")
        kwargs.pop("padding", None)
        data: dict[str, Any] = {}
        if images is not None:
            sources = [images] if isinstance(images, ImageSource) else images
            converted = [read_rgb(source) for source in sources]
            data |= self.image_processor(converted, return_tensors=return_tensors, **kwargs)
        if text is not None:
            data["decoder_input_ids"] = self._beginnings([text] if isinstance(text, str) else text)
        if labels is not None:
            rows = [self._label(caption, max_length) for caption in ([labels] if isinstance(labels, str) else labels)]
            if return_tensors is not None:
                longest = max(map(len, rows))
                rows = [row + [-100] * (longest - len(row)) for row in rows]
            data["labels"] = rows
        return BatchFeature(data, tensor_type=return_tensors)

    def _beginnings(self, texts: Sequence[str]) -> list[list[int]]:
        rows = [[self.tokenizer.bos_token_id, *(self._ids(text) if text else [])] for text in texts]
        lengths = [len(row) - 1 for row in rows]
        if len(set(lengths)) > 1:
            # Padding would stand between a beginning and what continues it.
            raise ValueError(
                f"the texts of a batch must have equally many tokens, not {lengths}: give them one by one"
            )
        return rows

    def _label(self, caption: str, max_length: int | None) -> list[int]:
        words = self._ids(caption)
        return [*(words if max_length is None else words[: max_length - 1]), self.tokenizer.eos_token_id]

    def _ids(self, caption: str) -> list[int]:
        ids = self.tokenizer(caption, add_special_tokens=False, verbose=False)["input_ids"]
        if all(number == self.tokenizer.unk_token_id for number in ids):
            raise ValueError(f"the caption {caption!r} has no token of the vocabulary")
        return ids


def make_captioner_processor(
    tokenizer: PreTrainedTokenizerBase,
    image_size: int | tuple[int, int],
    mean: Sequence[float] = IMAGENET_STANDARD_MEAN,
    std: Sequence[float] = IMAGENET_STANDARD_STD,
    resample: Image.Resampling = Image.Resampling.BICUBIC,
) -> RegardCaptionerProcessor:
    """Builds a captioner's processor around a stock image processor, which needs Pillow alone.

    Args:
        tokenizer: see `RegardCaptionerProcessor`.
        image_size: height and width that every image is scaled to, one number if they are equal.
        mean: of each channel, subtracted from pixels of 0 to 1.
        std: of each channel, which the difference is divided by.
        resample: how images are scaled.
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    image_processor = ViTImageProcessorPil(
        size={"height": height, "width": width},
        image_mean=list(mean),
        image_std=list(std),
        resample=resample,
        do_convert_rgb=True,
    )
    return RegardCaptionerProcessor(image_processor, tokenizer)
