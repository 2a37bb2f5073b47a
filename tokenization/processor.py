"""The captioner's processor, which turns images of any kind into pixel values and captions into ids."""

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
    """Reads an image, rotated as its EXIF data says.

    Raises:
        ValueError: if the image cannot be read, naming its file if it has one.
        FileNotFoundError: if the file does not exist.
        TypeError: if `source` is not an `ImageSource`.
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
    # Pillow's decoders raise these for an image that they cannot read, the last for one that is suspiciously large.
    except (OSError, SyntaxError, ValueError, TypeError, Image.DecompressionBombError) as error:
        raise ValueError(f"the image {name} cannot be read: {error}") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image to RGB with 8 bits per channel.

    Transparent pixels are put on white. Gray pixels of 16 bits, which Pillow sometimes reads as 32 bits, are scaled to
    8 bits. The range of floating-point pixels is 0 to 1, or 0 to 255 if any is larger than 1.

    Raises:
        ValueError: if pixels are outside that range, or the image's mode cannot be converted to RGB.
    """
    if image.mode.startswith(("I", "F")):
        pixels = np.asarray(image, dtype=np.float64)
        whole = image.mode.startswith("I")
        highest = 65535.0 if whole else 1.0 if pixels.max(initial=0) <= 1 else 255.0
        # Written so that NaN fails the check too.
        if not ((pixels >= 0) & (pixels <= highest)).all():
            allowed = "0 to 65535" if whole else "0 to 1, or 0 to 255"
            raise ValueError(f"an image of the mode {image.mode} has pixels outside of {allowed}")
        image = Image.fromarray((pixels * (255 / highest)).round().astype(np.uint8))
    if image.has_transparency_data:
        # Pillow does not convert all of these modes to RGBA directly.
        image = image.convert({"PA": "RGBA", "La": "LA", "RGBa": "RGBA"}.get(image.mode, image.mode)).convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image)
    return image.convert("RGB")


def read_rgb(source: ImageSource) -> Image.Image:
    """Reads an image, rotated as its EXIF data says, and converts it with `to_rgb`.

    Raises:
        ValueError: if the image cannot be read or converted, naming its file if it has one.
        FileNotFoundError: if the file does not exist.
        TypeError: if `source` is not an `ImageSource`.
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
        image_processor: an image processor that scales and normalizes RGB images.
        tokenizer: a tokenizer with a beginning and an end token; other special tokens that it adds are left out.

    Raises:
        ValueError: if the tokenizer has no beginning or no end token.
    """

    def __init__(self, image_processor: Any = None, tokenizer: Any = None) -> None:
        super().__init__(image_processor, tokenizer)
        for name in ("bos_token", "eos_token"):
            if getattr(tokenizer, name) is None:
                raise ValueError(
                    f"`tokenizer` must have a `{name}`: captions begin with `bos_token` and end with `eos_token`"
                )

    @property
    def model_input_names(self) -> list[str]:
        """The names of the inputs of `generate`."""
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
        """Prepares images and texts for training or generation; a single image or text is a batch of one.

        Args:
            images: images, arrays or paths of image files; returned as `pixel_values`, (B, 3, height, width).
            text: beginnings of captions for `generate` to continue; returned as `decoder_input_ids`, the beginning
                token followed by the text's tokens. From an empty text `generate` writes the whole caption.
            labels: whole captions to train on; returned as `labels`, their tokens followed by the end token.
            max_length: the largest number of tokens in a label, the end token included; longer captions are cut. None:
                no limit.
            return_tensors: "pt" for tensors, in which -100 pads labels; None for lists, which keep their lengths.
            **kwargs: options of the image processor.

        Returns:
            A batch with those of the three that have an input.

        Raises:
            ValueError: if an image cannot be read, if all tokens of a caption are unknown, or if the texts of a batch
                differ in their number of tokens.
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
            # Padding would separate a beginning from its continuation.
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
    """Builds a captioner's processor with a stock image processor, which needs no library but Pillow.

    Args:
        tokenizer: a tokenizer with a beginning and an end token.
        image_size: height and width that every image is scaled to, or one number for both.
        mean: mean of each channel, which is subtracted from pixels between 0 and 1.
        std: standard deviation of each channel, by which the difference is divided.
        resample: Pillow's filter for scaling.

    Raises:
        ValueError: if the tokenizer has no beginning or no end token.
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
