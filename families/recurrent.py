"""The family of the recurrent encoder-decoder with attention."""

from .card import PAIRS
from .family import Family

FAMILY = Family(
    name="recurrent",
    help="Train a recurrent encoder-decoder with attention on pairs of texts.",
    config=".configuration.recurrent:RegardRecurrentConfig",
    models={
        "AutoModel": ".modeling.recurrent:RegardRecurrentModel",
        "AutoModelForSeq2SeqLM": ".modeling.recurrent:RegardRecurrentForConditionalGeneration",
    },
    settings=".training.families.settings:RecurrentSettings",
    recipe=".training.families.seq2seq:RECURRENT",
    card=PAIRS._replace(title="Recurrent encoder-decoder", template="recurrent"),
)
