"""The family of the image captioner."""

from .card import PERCENT, TARGET_FIGURES, Card, Figure
from .family import Family

FAMILY = Family(
    name="captioner",
    help="Train an image captioner that attends to the places of an image.",
    config=".configuration.captioner:RegardCaptionerConfig",
    models={
        "AutoModelForImageTextToText": ".modeling.captioner:RegardCaptionerForConditionalGeneration",
    },
    processor=".tokenization.processor:RegardCaptionerProcessor",
    settings=".training.families.settings:CaptionerSettings",
    recipe=".training.families.captioner:CAPTIONER",
    other=(".modeling.captioner:spatial_maps", ".tokenization.processor:make_captioner_processor"),
    card=Card(
        title="Image captioner",
        auto_class="AutoModelForImageTextToText",
        pipeline_tag="image-to-text",
        template="captioner",
        source="glyphs",
        held_out="images",
        figures=(
            Figure("exact_match", "captions generated exactly", PERCENT, ("exact_match", "exact match")),
            Figure("base_letter", "letters right, whatever their marks", PERCENT),
            Figure("token_f1", "F1 of the words of generated captions", PERCENT, ("f1", "word F1")),
            *TARGET_FIGURES,
        ),
        examples=("generated", "Captions of held-out images, and what the model generated"),
        columns={"caption": "target", "prediction": "prediction"},
        line="  {prediction}  (should be: {target})",
    ),
)
