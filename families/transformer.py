"""The family of the encoder-decoder Transformer."""

from .card import PAIRS
from .family import Family

FAMILY = Family(
    name="transformer",
    help="Train an encoder-decoder Transformer on pairs of texts.",
    config=".configuration.transformer:RegardTransformerConfig",
    models={
        "AutoModel": ".modeling.transformer:RegardTransformerModel",
        "AutoModelForSeq2SeqLM": ".modeling.transformer:RegardTransformerForConditionalGeneration",
    },
    settings=".training.families.settings:PairSettings",
    recipe=".training.families.seq2seq:TRANSFORMER",
    export=".sharing.export:transformer_to_stock",
    card=PAIRS._replace(title="Encoder-decoder Transformer", template="transformer"),
)
