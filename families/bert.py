"""The family of BERT."""

from .card import FREQUENCIES, LOSS, MOST_FREQUENT, PERCENT, Card, Figure
from .family import Family

FAMILY = Family(
    name="bert",
    help="Pretrain a BERT: masked language modeling and next sentence prediction.",
    config=".configuration.bert:RegardBertConfig",
    models={
        "AutoModel": ".modeling.bert:RegardBertModel",
        "AutoModelForPreTraining": ".modeling.bert_pretraining:RegardBertForPreTraining",
        "AutoModelForMaskedLM": ".modeling.bert_pretraining:RegardBertForMaskedLM",
        "AutoModelForNextSentencePrediction": ".modeling.bert_pretraining:RegardBertForNextSentencePrediction",
        "AutoModelForSequenceClassification": ".modeling.bert_tasks:RegardBertForSequenceClassification",
        "AutoModelForTokenClassification": ".modeling.bert_tasks:RegardBertForTokenClassification",
        "AutoModelForQuestionAnswering": ".modeling.bert_tasks:RegardBertForQuestionAnswering",
        "AutoModelForMultipleChoice": ".modeling.bert_tasks:RegardBertForMultipleChoice",
    },
    tokenizer="transformers:BertTokenizer",
    settings=".training.families.settings:BertSettings",
    recipe=".training.families.bert:BERT",
    export=".sharing.export:bert_to_stock",
    card=Card(
        title="BERT",
        auto_class="AutoModelForMaskedLM",
        pipeline_tag="fill-mask",
        template="bert",
        source="python-docs",
        held_out="documents",
        figures=(
            Figure(
                "masked_accuracy",
                "masked tokens predicted right",
                PERCENT,
                ("accuracy", "masked token accuracy"),
                ("masked_accuracy_baseline", MOST_FREQUENT),
            ),
            Figure(
                "masked_loss",
                "loss per masked token, nats",
                LOSS,
                ("cross_entropy", "masked token cross-entropy"),
                ("masked_loss_unigram", FREQUENCIES),
            ),
            Figure(
                "next_sentence_accuracy",
                "next sentences told from random ones",
                PERCENT,
                baseline=("next_sentence_baseline", "the more frequent kind"),
            ),
        ),
        examples=("filled", "Held-out sentences with a word masked"),
        columns={"sentence": "text", "word": "word", "guesses": "guesses"},
        line="  {text}\n    {guesses}  (was: {word})",
    ),
)
