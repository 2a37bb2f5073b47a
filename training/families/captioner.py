"""Training the image captioner: the settings, the data, the task and the family."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from datasets import Dataset, concatenate_datasets
from torch import Tensor
from transformers import AutoConfig, AutoProcessor, PreTrainedConfig, PreTrainedModel

from ...configuration.captioner import DECODER_TYPES, RegardCaptionerConfig
from ...configuration.recurrent import ALIGNMENT_NAMES, RNN_TYPES
from ...modeling.captioner import RegardCaptionerForConditionalGeneration
from ...modeling.loading.load import load_model, load_part, naming_the_model
from ...tokenization.processor import RegardCaptionerProcessor, make_captioner_processor
from ...tokenization.wordpiece import check_vocabulary
from ...tokenization.words import train_words
from ..builtin.glyphs import base_letter, load_glyphs
from ..examples.captions import CaptionCollator, CaptionExamples
from ..examples.tokenized import plain_backend
from ..generation.generate import generate_texts, require_beams
from ..generation.text_metrics import exact_match, token_f1
from ..reading.captioned_images import load_captions
from ..reading.splits import load_split
from ..run.settings import held_out_share, option
from .base import Recipe
from .seq2seq_objective import Seq2SeqObjective
from .sizes import SizedSettings
from .tokenizers import load_tokenizer, special_ids

logger = logging.getLogger("regard.training")


# A larger one would be some gigabytes of numbers.
MOST_IMAGE_SIZE = 2**14


@dataclass
class CaptionerSettings(SizedSettings):
    """What a run of the image captioner can set."""

    data: list[str] = option(
        ["glyphs"],
        "What to train on: 'glyphs', a folder of images with metadata.jsonl, or a Hub data set id. Several are "
        "joined.",
    )
    caption_column: str = option("text", "The column of the metadata or data set that holds the captions.")
    max_images: int | None = option(None, "Read no more images than this; of 'glyphs', draw so many.")
    image_size: int = option(48, "Images are brought to this width and height, in pixels.")
    max_length: int = option(32, "Longest caption, in tokens.")
    batch_size: int = option(64, "Examples per step, over all processes and accumulation.")
    tokenizer: str | None = option(None, "A tokenizer to use, a folder or Hub id, instead of making one of words.")
    min_frequency: int = option(1, "How often a word must occur to be known.")
    backbone: str | None = option(None, "A trained backbone, a folder or Hub id; else a small ResNet is trained.")
    freeze_backbone: bool = option(False, "Leave the backbone as it is.")
    decoder_type: str = option("recurrent", f"The decoder: {', '.join(DECODER_TYPES)}.")
    alignment: str = option("additive", f"How a recurrent decoder looks at the image: {', '.join(ALIGNMENT_NAMES)}.")
    rnn_type: str = option("lstm", "The recurrent layers: 'gru' or 'lstm'.")
    attention_regularization: float = option(1.0, "Weight of the doubly stochastic regulariser.")
    label_smoothing: float = option(0.0, "Share of the probability that the loss spreads over the vocabulary.")
    beams: int = option(1, "Beams with which the held-out captions are generated; 1 is greedy.")
    language: str | None = option(None, "Language of the captions (ISO 639), for the model card.")

    def check(self) -> None:
        """See `TrainingSettings.check`."""
        super().check()
        for name in ("max_images", "image_size", "min_frequency"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"`{name}` ({getattr(self, name)}) must be at least 1")
        require_beams(self.beams)
        if self.image_size > MOST_IMAGE_SIZE:
            raise ValueError(f"`image_size` ({self.image_size}) must be at most {MOST_IMAGE_SIZE}")
        if self.max_length < 2:
            raise ValueError(f"`max_length` ({self.max_length}) must be at least 2: one word and the end")
        self.require_choice("decoder_type", DECODER_TYPES)
        self.require_choice("alignment", ALIGNMENT_NAMES)
        self.require_choice("rnn_type", RNN_TYPES)
        if self.backbone is not None and "backbone_config" in self.config:
            raise ValueError(
                f"`backbone` ({self.backbone}) has a configuration: leave `backbone_config` out of `config`"
            )


def load_caption_split(settings: CaptionerSettings) -> tuple[Dataset, Dataset]:
    """The training images and the held-out ones; those of `glyphs` share no letter. See `load_split`."""

    def make(name: str, split: str) -> Dataset:
        if name != "glyphs":
            raise ValueError(f"`data` ({name!r}) asks for some of 'glyphs', which has no parts")
        size = settings.max_images if split == "train" else None
        glyphs = load_glyphs(split, image_size=settings.image_size, size=size, seed=settings.seed)
        return glyphs.select_columns(["image", "text"])

    def read(names: list[str], is_training: bool) -> Dataset:
        reading: dict[str, Any] = {
            "caption_column": settings.caption_column,
            "split": settings.split,
            "max_images": settings.max_images if is_training else None,
            "bad_records": settings.bad_records,
        }
        rows = concatenate_datasets([load_captions(name, **reading) for name in names])
        return rows.select(range(min(reading["max_images"] or len(rows), len(rows))))

    return load_split(settings, read, {"glyphs": make})


class CaptionerRecipe(Recipe[CaptionerSettings]):
    """Training the image captioner."""

    name: ClassVar[str] = "captioner"
    special_tokens: ClassVar[tuple[str, ...]] = ("pad", "bos", "eos", "unk")
    processor_class: ClassVar[Any] = AutoProcessor
    settings_class = CaptionerSettings
    default_steps = 1500

    def settings_of(self, config: PreTrainedConfig) -> dict[str, Any]:
        """See `Recipe`."""
        return {"max_length": config.max_position_embeddings}

    def make_config(
        self, settings: CaptionerSettings, processor: RegardCaptionerProcessor | None = None
    ) -> RegardCaptionerConfig:
        """The model's configuration, for the processor if it is there yet.

        Raises:
            ValueError: if the fields do not fit together, or the positions do not reach as far as the captions.
        """
        fields: dict[str, Any] = {
            **settings.transformer_fields(),
            "num_hidden_layers": 1 if settings.decoder_type == "recurrent" else settings.layers,
            "max_position_embeddings": settings.max_length,
            "freeze_backbone": settings.freeze_backbone,
            "decoder_type": settings.decoder_type,
            "alignment": settings.alignment,
            "rnn_type": settings.rnn_type,
            "attention_regularization": settings.attention_regularization,
            "label_smoothing": settings.label_smoothing,
            **special_ids(processor.tokenizer if processor else None),
        }
        if settings.backbone is not None:
            with naming_the_model("backbone", settings.backbone, settings.backbone):
                fields["backbone_config"] = load_part(
                    AutoConfig, settings.backbone, f"`backbone` ({settings.backbone})"
                )
        config = RegardCaptionerConfig(**{**fields, **settings.config})
        settings.require_positions(config.max_position_embeddings)
        return config

    def make_model(self, settings: CaptionerSettings, processor: Any = None) -> PreTrainedModel:
        """See `Recipe`."""
        model = RegardCaptionerForConditionalGeneration(self.make_config(settings, processor))
        model.generation_config.max_new_tokens = settings.max_length
        backbone = model.encoder.backbone
        if (channels := getattr(backbone.config, "num_channels", 3)) != 3:
            raise ValueError(f"the backbone (`num_channels` {channels}) must read 3 channels, as images are made RGB")
        # Refuses a size that the backbone cannot read.
        model.feature_grid(settings.image_size, settings.image_size)
        if settings.backbone is not None:
            # Read without a processor too, that what is wrong with them is told before anything is written.
            with torch.device("cpu"):
                weights = _load_backbone_weights(settings.backbone, type(backbone))
            if processor is not None:
                backbone.load_state_dict(weights)
        return model

    def load_model(self, settings: CaptionerSettings, path: str) -> PreTrainedModel:
        """See `Recipe`."""
        return load_model(RegardCaptionerForConditionalGeneration, path, f"`model` ({path})")

    def load_data(self, settings: CaptionerSettings) -> tuple[Dataset, Dataset]:
        """See `Recipe`."""
        return load_caption_split(settings)

    def make_processor(self, settings: CaptionerSettings, rows: Dataset) -> RegardCaptionerProcessor:
        """See `Recipe`."""
        if settings.tokenizer is not None:
            tokenizer = load_tokenizer(settings.tokenizer, settings.max_length, self.special_tokens)
        else:
            tokenizer = train_words(
                rows["text"], min_frequency=settings.min_frequency, model_max_length=settings.max_length
            )
        return make_captioner_processor(tokenizer, settings.image_size)

    def make_objective(
        self, settings: CaptionerSettings, processor: Any, rows: Dataset, held_out: Dataset
    ) -> tuple[Seq2SeqObjective, dict[str, Any]]:
        """See `Recipe`."""
        parts = [CaptionExamples(part, processor, settings.max_length, settings.seed) for part in (rows, held_out)]
        data = {"images": len(rows), "tokens": len(parts[0].ids), "held_out_images": len(held_out)}
        logger.info("%s images, captions of %s tokens; held out: %s images.", *(f"{n:,}" for n in data.values()))
        check_vocabulary(processor.tokenizer, self.make_config(settings, processor).vocab_size)
        return Seq2SeqObjective(parts[0], parts[1], CaptionCollator(processor)), data

    def try_out(
        self, settings: CaptionerSettings, model: PreTrainedModel, processor: Any, held_out: Dataset
    ) -> dict[str, Any]:
        """See `Recipe`: captions the held-out images."""
        number, size = len(held_out), settings.batch_size
        if settings.evaluation_batches is not None:
            number = min(number, settings.evaluation_batches * size)
        tokenizer = processor.tokenizer
        # As the tokenizer gives words back, which may lower-case them. An unknown one is never right.
        encodings = plain_backend(tokenizer).encode_batch(held_out[:number]["text"], add_special_tokens=False)
        ids = [encoding.ids or [tokenizer.unk_token_id] for encoding in encodings]
        references = tokenizer.batch_decode(ids, skip_special_tokens=False)
        batches = (
            processor(images=held_out[start : min(start + size, number)]["image"], return_tensors="pt")
            for start in range(0, number, size)
        )
        options = {"max_new_tokens": settings.max_length, "num_beams": settings.beams}
        predictions = generate_texts(model, tokenizer, batches, **options)
        metrics = {
            "exact_match": exact_match(predictions, references),
            "token_f1": token_f1(predictions, references),
        }
        if (settings.data if held_out_share(settings.validation) else [settings.validation]) == ["glyphs"]:
            letters = ([base_letter(text) for text in texts] for texts in (predictions, references))
            metrics["base_letter"] = exact_match(*letters)
        generated = zip(references, predictions, strict=True)
        return {
            "metrics": metrics,
            "generated": [{"target": target, "prediction": prediction} for target, prediction in generated],
        }


def _load_backbone_weights(name: str, backbone_class: Any) -> dict[str, Tensor]:
    # By its class: `AutoBackbone` asks the Hub, whatever it is to load.
    return load_model(backbone_class, name, f"`backbone` ({name})").state_dict()


CAPTIONER = CaptionerRecipe()
