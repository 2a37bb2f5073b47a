"""The image captioner: a backbone's feature map, and a recurrent or a Transformer decoder that attends to it.

Xu et al. (2015), https://arxiv.org/abs/1502.03044

Dimension letters: B batch, P positions of the feature map, T target length, C channels of the feature map, E width of
the decoder, H heads (one for a recurrent decoder), N layers that attend (one for a recurrent decoder), V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoBackbone, Cache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_BACKBONE_MAPPING
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults

from ..configuration.captioner import RegardCaptionerConfig
from .base import CACHE, FastGenerationMixin, RegardPreTrainedModel, named_cache, takes_cache
from .cpu import Linear
from .losses import cross_entropy, mean_loss, shift_right
from .recurrent import RecurrentCache, RegardRecurrentDecoder
from .transformer import RegardTransformerDecoder


def _make_backbone(config: RegardCaptionerConfig) -> Any:
    own: Any = config.backbone_config
    if type(own) not in MODEL_FOR_BACKBONE_MAPPING:
        raise ValueError(
            f"`backbone_config` has the model type {own.model_type!r}, for which transformers has no AutoBackbone"
        )
    # A backbone that supports only eager attention, such as a convolutional one, raises an error for any other.
    backbone_class: Any = MODEL_FOR_BACKBONE_MAPPING[type(own)]
    kernel = own._attn_implementation if backbone_class._supports_sdpa else None
    return AutoBackbone.from_config(own, attn_implementation=kernel)


class RegardCaptionerPreTrainedModel(RegardPreTrainedModel):
    """Base of the captioner's classes."""

    config_class = RegardCaptionerConfig
    config: RegardCaptionerConfig
    main_input_name = "pixel_values"
    input_modalities = ["image", "text"]
    _no_split_modules = ["TransformerBlock", "RecurrentDecoderStep"]


class RegardCaptionerEncoder(RegardCaptionerPreTrainedModel):
    """Computes the features of an image: the backbone's last feature map, projected to the decoder's width."""

    input_modalities = ["image"]

    def __init__(self, config: RegardCaptionerConfig) -> None:
        super().__init__(config)
        self.backbone = _make_backbone(config)
        channels = self.backbone.channels[-1]
        same = channels == config.hidden_size
        self.projection: nn.Module = nn.Identity() if same else Linear(channels, config.hidden_size)
        self.post_init()
        self.train()

    def train(self, mode: bool = True) -> "RegardCaptionerEncoder":
        """Sets the mode; a frozen backbone stays in evaluation, or its normalization would go on learning."""
        super().train(mode)
        if self.config.freeze_backbone:
            # Loading a checkpoint enables gradients again, and then changes the mode.
            self.backbone.eval().requires_grad_(False)
        return self

    @can_return_tuple
    def forward(self, pixel_values: Tensor | None = None, **kwargs: Unpack[TransformersKwargs]) -> BaseModelOutput:
        """Encodes images (B, channels, height, width): features (B, P, E), row by row of the feature map.

        Raises:
            ValueError: if the images are missing, have another shape, or are too small for the backbone.
        """
        channels = getattr(self.backbone.config, "num_channels", None)
        if pixel_values is None:
            raise ValueError("give `pixel_values`, or the `encoder_outputs` computed from them")
        if pixel_values.dim() != 4 or pixel_values.shape[1] != (channels or pixel_values.shape[1]):
            raise ValueError(
                f"`pixel_values` has the shape {tuple(pixel_values.shape)}, but must be "
                f"(images, {channels or 'channels'}, height, width)"
            )
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.config.freeze_backbone):
            try:
                feature_map = self.backbone(pixel_values.to(self.dtype), return_dict=True).feature_maps[-1]
            except RuntimeError:
                # Raises a clearer error if the size of the images is the reason.
                self.feature_grid(*pixel_values.shape[2:])
                raise
        features = self.projection(feature_map.flatten(2).transpose(1, 2))  # (B, P, E)
        return BaseModelOutput(last_hidden_state=features)

    def feature_grid(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the feature map of an image of this size.

        Raises:
            ValueError: if the backbone cannot read such an image, most often because it is too small.
        """
        # Each backbone has its own arithmetic, so it runs, but without any data.
        with torch.device("meta"), torch.no_grad():
            backbone = _make_backbone(self.config).eval()
            images = torch.empty(1, getattr(backbone.config, "num_channels", 3), height, width)
            try:
                grid = backbone(images, return_dict=True).feature_maps[-1].shape[2:]
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise ValueError(f"the backbone cannot read images of {height} x {width} pixels: {reason}") from error
        if 0 in grid:
            raise ValueError(f"images of {height} x {width} pixels are too small: the feature map is empty")
        return tuple(grid)


def mean_features(features: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean over all positions of the features (B, P, E), an image in one vector: (B, E). There is no mask."""
    return features.mean(dim=1)


def attention_penalty(weights: Tensor, labels: Tensor) -> Tensor:
    """The doubly stochastic regularizer, which is 0 for an image whose positions each get a total weight of 1.

    Args:
        weights: cross-attention weights of each target token, (B, H, T, P).
        labels: target ids, (B, T), -100 for padding.

    Returns:
        The mean over heads and positions of (1 - the sum of the weights over the caption) squared, (B,) in float32.
    """
    real = (labels != -100)[:, None, :, None].to(weights.device)
    looks = (weights.float() * real).sum(dim=2)  # (B, H, P)
    return (1 - looks).square().mean(dim=(1, 2))


class RegardCaptionerForConditionalGeneration(RegardCaptionerPreTrainedModel, FastGenerationMixin):
    """Writes a caption of an image: encoder, decoder and output layer."""

    def __init__(self, config: RegardCaptionerConfig) -> None:
        super().__init__(config)
        self.encoder = RegardCaptionerEncoder(config)
        self.decoder: RegardRecurrentDecoder | RegardTransformerDecoder
        own: Any = config.make_decoder_config()
        if config.decoder_type == "recurrent":
            self.decoder = RegardRecurrentDecoder(own, context_size=config.hidden_size, summarize=mean_features)
            tokens = "decoder.tokens"
        else:
            own._attn_implementation = config._attn_implementation
            self.decoder = RegardTransformerDecoder(own)
            tokens = "decoder.embeddings.tokens"
        self._tied_weights_keys = {"lm_head.weight": f"{tokens}.weight"}
        self._is_stateful = self.decoder._is_stateful
        self._can_compile_fullgraph = self.decoder._can_compile_fullgraph
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Changes the attention implementation, also of the backbone if it supports more than eager attention."""
        if isinstance(attn_implementation, str) and not self.encoder.backbone._supports_sdpa:
            attn_implementation = {"": attn_implementation, "backbone_config": "eager"}
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        """The token embeddings of the decoder."""
        return self.decoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the token embeddings of the decoder."""
        self.decoder.set_input_embeddings(value)

    def feature_grid(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the feature map of an image of this size, which `spatial_maps` needs.

        Raises:
            ValueError: if the backbone cannot read such an image, most often because it is too small.
        """
        return self.encoder.feature_grid(height, width)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The decoder's input for labels (B, T)."""
        return shift_right(labels, self.config.decoder_start_token_id, self.config.pad_token_id)

    @merge_with_config_defaults
    @can_return_tuple
    @takes_cache
    def forward(  # type: ignore[misc]
        self,
        pixel_values: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        cache: Cache | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Scores the vocabulary after each token of a caption.

        The loss is the mean cross-entropy over all target tokens. For a recurrent decoder with an alignment,
        `attention_regularization` times the mean `attention_penalty` is added. An image's penalty is weighted by its
        number of target tokens, so that the losses of parts of a batch add up to that of the whole batch.

        Args:
            pixel_values: images, (B, channels, height, width).
            decoder_input_ids: target ids, (B, T), the start token first; with a cache, those that are not in it.
                None: made from `labels`.
            decoder_attention_mask: 1 for target tokens, 0 for padding, (B, T with those in the cache).
            encoder_outputs: earlier outputs of the encoder, instead of the images.
            cache: state of the decoder after earlier target tokens, and the projected image; it is updated.
            decoder_inputs_embeds: target token embeddings, (B, T, E), instead of `decoder_input_ids`.
            labels: target ids, (B, T), with the end token last and without the start token; -100 for padding.
            use_cache: whether to make a cache if none is given, and return it.
            num_items_in_batch: number of target tokens in the whole batch, if this is a part of it.
            **kwargs: options of the attention function and of transformers, such as `output_attentions`.

        Returns:
            `logits` (B, T, V); the `loss` if there are labels; and with `output_attentions` the `cross_attentions`,
            (B, H, T, P) for each layer that attends, which `spatial_maps` turns into maps.

        Raises:
            ValueError: if the images are missing, have a wrong shape or are too small, if ids or labels are outside
                the vocabulary, or if a caption is longer than the positions.
        """
        if encoder_outputs is None:
            encoded = self.encoder(pixel_values, return_dict=True, **kwargs)
        elif isinstance(encoder_outputs, (tuple, list)):
            encoded = BaseModelOutput(*encoder_outputs)
        else:
            encoded = encoder_outputs
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        shown = bool(kwargs.pop("output_attentions", self.config.output_attentions))
        kwargs.setdefault("output_hidden_states", self.config.output_hidden_states)
        regularized = self._is_regularized and labels is not None
        outputs = self.decoder(
            decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoded.last_hidden_state,
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache if labels is None else False,
            output_attentions=shown or regularized,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = cross_entropy(logits, labels, num_items_in_batch, label_smoothing=self.config.label_smoothing)
            if regularized:
                tokens = (labels != -100).sum(dim=1).to(loss.device)
                penalty = attention_penalty(outputs.cross_attentions[0], labels)
                total = self.config.attention_regularization * (tokens * penalty).sum()
                loss = loss + mean_loss(total, tokens.sum(), num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            **named_cache(getattr(outputs, CACHE)),
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions if shown else None,
            cross_attentions=outputs.cross_attentions if shown else None,
            encoder_last_hidden_state=encoded.last_hidden_state,
        )

    @property
    def _is_regularized(self) -> bool:
        config = self.config
        return (
            config.decoder_type == "recurrent" and config.alignment != "none" and config.attention_regularization > 0
        )

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
        if self.config.decoder_type == "transformer":
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # type: ignore[misc]
        elif model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE] = RecurrentCache()


def spatial_maps(
    cross_attentions: Sequence[Any] | None, grid: tuple[int, int], beam_indices: Tensor | None = None
) -> Tensor:
    """Turns a captioner's attention weights into maps over the image, one for each word.

    Args:
        cross_attentions: the `cross_attentions` of a captioner's output. A forward call returns the weights of all
            words for each layer; `generate(output_attentions=True, return_dict_in_generate=True)` returns such a tuple
            for each new word.
        grid: height and width of the feature map, as `RegardCaptionerForConditionalGeneration.feature_grid` returns.
        beam_indices: the `beam_indices` of the same output, after beam search. At each step the rows of the weights
            are beams, and these indices say which of them each returned caption continued. After the end of a caption
            that is shorter than others, its maps are zero.

    Returns:
        (N, B, H, words, grid height, grid width). Each map sums to one. Word t of a forward call is the one that the
        logits at t predict, which is label t. The words of `generate` are the new ones, with the end token.

    Raises:
        ValueError: if there are no weights, or their number differs from the places of the grid.
    """
    if not cross_attentions or cross_attentions[0] is None:
        raise ValueError("`cross_attentions` is empty: request `output_attentions`, from a model with attention")
    if isinstance(cross_attentions[0], Tensor):
        weights = torch.stack(tuple(cross_attentions))  # (N, B, H, T, P)
    else:
        # Without a cache, or with the first words given, a step computes earlier words too: the last is the new one.
        steps = [torch.stack([layer[:, :, -1] for layer in step]) for step in cross_attentions]  # each (N, B, H, P)
        if beam_indices is not None:
            rows = beam_indices[:, : len(steps)].unbind(dim=1)
            steps = [
                step[:, row.clamp(min=0)].masked_fill((row < 0)[:, None, None], 0.0)
                for step, row in zip(steps, rows, strict=False)
            ]
        weights = torch.stack(steps, dim=3)  # (N, B, H, T, P)
    height, width = grid
    if weights.shape[-1] != height * width:
        raise ValueError(f"`grid` ({height} x {width}) must have the {weights.shape[-1]} places of the weights")
    return weights.unflatten(-1, (height, width))  # (N, B, H, T, grid height, grid width)
