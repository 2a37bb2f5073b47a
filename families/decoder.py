"""The family of the decoder-only language model."""

from .card import FREQUENCIES, LOSS, MOST_FREQUENT, PERCENT, PERPLEXITY, Card, Figure
from .family import Family

FAMILY = Family(
    name="decoder",
    help="Train a decoder-only language model: each token from those before it.",
    config=".configuration.decoder:RegardDecoderConfig",
    models={
        "AutoModel": ".modeling.decoder:RegardDecoderModel",
        "AutoModelForCausalLM": ".modeling.decoder:RegardDecoderForCausalLM",
    },
    settings=".training.families.settings:DecoderSettings",
    recipe=".training.families.decoder:DECODER",
    export=".sharing.export:decoder_to_stock",
    card=Card(
        title="Decoder",
        auto_class="AutoModelForCausalLM",
        pipeline_tag="text-generation",
        template="decoder",
        source="python-docs",
        held_out="documents",
        figures=(
            Figure(
                "perplexity",
                "perplexity per token",
                PERPLEXITY,
                ("perplexity", "perplexity per token"),
                ("perplexity_unigram", FREQUENCIES),
            ),
            Figure(
                "token_accuracy",
                "next tokens predicted right",
                PERCENT,
                ("accuracy", "next token accuracy"),
                ("token_accuracy_baseline", MOST_FREQUENT),
            ),
            Figure("loss", "loss per token, nats", LOSS, ("cross_entropy", "token cross-entropy")),
        ),
        examples=(
            "generated",
            "Beginnings of held-out documents, and how the model went on when its tokens were drawn",
        ),
        columns={"beginning": "prompt", "continuation": "continuation"},
        line="  {prompt}\n    {continuation}",
    ),
)
