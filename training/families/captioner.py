"""Training the image captioner: its data and its recipe."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from torch import Tensor
from transformers import AutoConfig, AutoProcessor, PreTrainedConfig, PreTrainedModel

from ...configuration.captioner import RegardCaptionerConfig
from ...modeling.captioner import RegardCaptionerForConditionalGeneration
from ...modeling.loading.load import load_model, load_part, naming_the_model
from ...tokenization.processor import RegardCaptionerProcessor, make_captioner_processor
from ...tokenization.wordpiece import check_vocabulary
from ...tokenization.words import train_words
from ..builtin.glyphs import base_letter, load_glyphs
from ..examples.captions import CaptionCollator, CaptionExamples
from ..examples.tokenized import plain_backend
from ..generation.generate import generate_texts
from ..generation.text_metrics import exact_match, token_f1
from ..reading.captioned_images import load_captions
from ..reading.splits import load_split
from ..run.settings import held_out_share
from .base import Recipe
from .seq2seq_objective import Seq2SeqObjective
from .settings import CaptionerSettings
from .tokenizers import load_tokenizer, special_ids

logger = logging.getLogger("regard.training")


def load_caption_split(settings: CaptionerSettings) -> tuple[Dataset, Dataset]:
    """Loads the training images and the held-out images; those of `glyphs` have no letter in common."""

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
    """Trains the image captioner."""

    name: ClassVar[str] = "captioner"
    special_tokens: ClassVar[tuple[str, ...]] = ("pad", "bos", "eos", "unk")
    processor_class: ClassVar[Any] = AutoProcessor
    default_steps = 1500

    def settings_of(self, config: PreTrainedConfig) -> dict[str, Any]:
        return {"max_length": config.max_position_embeddings}

    def make_config(
        self, settings: CaptionerSettings, processor: RegardCaptionerProcessor | None = None
    ) -> RegardCaptionerConfig:
        """Makes the model's configuration, for the processor's vocabulary if there is one yet.

        Raises:
            ValueError: if the fields do not fit together, or `max_length` exceeds the model's positions.
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
        model = RegardCaptionerForConditionalGeneration(self.make_config(settings, processor))
        model.generation_config.max_new_tokens = settings.max_length
        backbone = model.encoder.backbone
        if (channels := getattr(backbone.config, "num_channels", 3)) != 3:
            raise ValueError(f"the backbone (`num_channels` {channels}) must read 3 channels, as images are made RGB")
        # Raises if the backbone cannot read images of this size.
        model.feature_grid(settings.image_size, settings.image_size)
        if settings.backbone is not None:
            # Loaded without a processor too, so that an error is raised before anything is written.
            with torch.device("cpu"):
                weights = _load_backbone_weights(settings.backbone, type(backbone))
            if processor is not None:
                backbone.load_state_dict(weights)
        return model

    def load_model(self, settings: CaptionerSettings, path: str) -> PreTrainedModel:
        return load_model(RegardCaptionerForConditionalGeneration, path, f"`model` ({path})")

    def load_data(self, settings: CaptionerSettings) -> tuple[Dataset, Dataset]:
        return load_caption_split(settings)

    def make_processor(self, settings: CaptionerSettings, rows: Dataset) -> RegardCaptionerProcessor:
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
        parts = [CaptionExamples(part, processor, settings.max_length, settings.seed) for part in (rows, held_out)]
        data = {"images": len(rows), "tokens": len(parts[0].ids), "held_out_images": len(held_out)}
        logger.info("%s images, captions of %s tokens; held out: %s images.", *(f"{n:,}" for n in data.values()))
        check_vocabulary(processor.tokenizer, self.make_config(settings, processor).vocab_size)
        return Seq2SeqObjective(parts[0], parts[1], CaptionCollator(processor)), data

    def sample_outputs(
        self, settings: CaptionerSettings, model: PreTrainedModel, processor: Any, held_out: Dataset
    ) -> dict[str, Any]:
        """Captions the held-out images."""
        number, size = len(held_out), settings.batch_size
        if settings.evaluation_batches is not None:
            number = min(number, settings.evaluation_batches * size)
        tokenizer = processor.tokenizer
        # Decoded again, as the tokenizer may lower-case words. A caption with an unknown word is never right.
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

    def synthetic_batch(self, settings: CaptionerSettings, config: Any, rows: int) -> tuple[dict[str, Any], int]:
        rng = np.random.default_rng(settings.seed)
        size, length = settings.image_size, settings.max_length
        labels = torch.from_numpy(rng.integers(0, config.vocab_size, (rows, length)))
        images = torch.from_numpy(rng.standard_normal((rows, 3, size, size), dtype=np.float32))
        return {"pixel_values": images, "labels": labels}, rows * length


def _load_backbone_weights(name: str, backbone_class: Any) -> dict[str, Tensor]:
    # With its own class, as `AutoBackbone` asks the Hub even for a local folder.
    return load_model(backbone_class, name, f"`backbone` ({name})").state_dict()


CAPTIONER = CaptionerRecipe()
