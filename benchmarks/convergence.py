"""Time to a given loss of masked tokens in held-out text: pretraining with regard, and with transformers' `Trainer`.

A unit of work is a whole run, from new weights to the first evaluation at which the loss is low enough. Evaluations
are not counted, nor is what comes before training: both have the same tokenizer and the same sentence pairs, with
their next-sentence labels, an epoch's worth after another, as `regard train bert` plans them.

Both have its default size and recipe: batches of 32 pairs of up to 64 tokens, of which 15% are predicted, AdamW with
the same momenta and decay, the same learning rate, which rises and then falls in a line over the same steps, the same
clipping of the gradient, the same dropout. Ours is `regard.training.loop.loop.Loop`, which masks and packs the
pairs as it goes. The peer is stock `BertForPreTraining`, `DataCollatorForLanguageModeling`, which masks and pads them
as it goes, and `Trainer`, which shuffles them.

What else differs is part of what is compared: our weights start as regard has them start, wider in narrow models, with
position embeddings that are sinusoids, and stock's as stock BERT's do.

Both are evaluated by the same function on the same padded batches, which is also what the check compares, with weights
that both read.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .compare import Case
from .pretraining import padded
from .sides import Side, Work

TITLE = "Time to a held-out loss of masked tokens"

SHARED_FIELDS = """vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act
hidden_dropout_prob attention_probs_dropout_prob max_position_embeddings pad_token_id""".split()

CASES = {
    "tiny": Case(
        "BERT-tiny on Python's documentation, to a loss of 5.6",
        {"settings": {"size": "tiny"}, "steps": 4000, "every": 50, "target": 5.6},
        quick={
            "settings": {
                "config": {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64},
                "vocab_size": 1000,
                "max_documents": 40,
                "batch_size": 8,
            },
            "steps": 6,
            "every": 2,
            "target": 8.0,
        },
        units="runs",
        warm_up=0,
        repetitions=1,
        figures={"trainer": {"speed": 3.0}},
    ),
}


def make_settings(parameters: dict[str, Any]) -> Any:
    """The settings of the run."""
    from regard.training.families.bert import BertSettings

    unwatched = {"log_with": ["none"], "save_every": 0}
    return BertSettings(
        **parameters["settings"], **unwatched, steps=parameters["steps"], evaluate_every=parameters["every"]
    )


def write_inputs(parameters: dict[str, Any], folder: Path) -> None:
    """Writes the documents, the tokenizer, the pairs of all steps, the held-out batches and weights to check with."""
    from datasets import Dataset
    from transformers import BertConfig, BertForPreTraining

    from regard.training.families.bert import BERT

    settings = make_settings(parameters)
    rows, held_out = BERT.load_data(settings)
    tokenizer = BERT.make_processor(settings, rows)
    tokenizer.save_pretrained(folder / "tokenizer")
    rows.save_to_disk(folder / "rows")
    held_out.save_to_disk(folder / "held_out")
    task, _ = BERT.make_objective(settings, tokenizer, rows, held_out)
    pairs = _pairs(task, settings.steps * settings.batch_size, np.array(tokenizer.all_special_ids))
    Dataset.from_dict(pairs).save_to_disk(folder / "pairs")
    examples, size = task.held_out(), settings.batch_size
    starts = range(0, len(examples), size)
    batches = [[examples[place] for place in range(len(examples))[start : start + size]] for start in starts]
    torch.save([padded(batch) for batch in batches], folder / "held_out.pt")

    config = BERT.make_config(settings, tokenizer)
    stock_config = BertConfig(**{name: getattr(config, name) for name in SHARED_FIELDS})
    torch.manual_seed(0)
    BertForPreTraining(stock_config).save_pretrained(folder / "stock")


def _pairs(task: Any, number: int, special_ids: np.ndarray) -> dict[str, list[Any]]:
    """The pairs that ours trains on, one epoch after another, without their masks."""
    pairs: dict[str, list[Any]] = {
        name: [] for name in ("input_ids", "token_type_ids", "special_tokens_mask", "next_sentence_label")
    }
    epoch = 0
    while len(pairs["input_ids"]) < number:
        examples = task.epoch(epoch)
        for place in range(len(examples)):
            example = dict(examples[place])
            labels = example.pop("labels")
            ids = np.where(labels == -100, example.pop("input_ids"), labels)
            example |= {"input_ids": ids, "special_tokens_mask": np.isin(ids, special_ids).astype(np.int64)}
            for name, value in example.items():
                pairs[name].append(value)
        epoch += 1
    return pairs


class Watch:
    """Adds up the time before and between evaluations, and tells when the loss is low enough.

    Args:
        held_out: padded batches.
        target: the loss to reach.
    """

    def __init__(self, held_out: list[dict[str, Tensor]], target: float) -> None:
        self.held_out, self.target = held_out, target
        self.seconds = 0.0
        self.loss = float("inf")

    def start(self) -> None:
        """Starts the clock."""
        self._began = time.perf_counter()

    def reached(self, model: nn.Module) -> bool:
        """Evaluates the model, off the clock."""
        self.seconds += time.perf_counter() - self._began
        self.loss = held_out_loss(model, self.held_out)
        self.start()
        return self.loss <= self.target


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    """The mean loss of masked tokens over padded batches; the model is left in training."""
    total, count = 0.0, 0
    model.eval()
    for batch in batches:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
        predicted = batch["labels"] != -100
        logits = model(**inputs).prediction_logits[predicted]
        total += nn.functional.cross_entropy(logits, batch["labels"][predicted], reduction="sum").item()
        count += len(logits)
    model.train()
    return total / count


class ConvergenceSide(Side):
    """Trains to the target; what differs is the model and the loop."""

    def __init__(self, parameters: dict[str, Any], folder: Path) -> None:
        from transformers import AutoTokenizer

        super().__init__(parameters, folder)
        self.settings = make_settings(parameters)
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self.held_out = torch.load(folder / "held_out.pt")

    def load(self) -> nn.Module:
        """The model with the weights to check with."""
        raise NotImplementedError

    def train(self, watch: Watch, turn: int) -> None:
        """Trains new weights, drawn with the seed `turn`, until the watch says that the loss is reached."""
        raise NotImplementedError

    def check(self) -> dict[str, Any]:
        """The loss that the evaluation finds for the same weights, and the number of them."""
        model = self.load()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return {"loss": held_out_loss(model, self.held_out), "parameters": parameters}

    def run(self, turn: int) -> Work:
        """A run to the target.

        Raises:
            RuntimeError: if its steps end before.
        """
        watch = Watch(self.held_out, self.parameters["target"])
        self.train(watch, turn)
        if watch.loss > watch.target:
            raise RuntimeError(f"the loss is {watch.loss:.3f} after all steps, and not {watch.target}")
        return Work(watch.seconds, 1)


class RegardConvergence(ConvergenceSide):
    """`RegardBertForPreTraining` in regard's own loop."""

    def __init__(self, parameters: dict[str, Any], folder: Path) -> None:
        from datasets import disable_caching, load_from_disk

        from regard.training.families.bert import BERT

        super().__init__(parameters, folder)
        disable_caching()
        rows, held_out = (load_from_disk(folder / name) for name in ("rows", "held_out"))
        self.task, _ = BERT.make_objective(self.settings, self.tokenizer, rows, held_out)

    def load(self) -> nn.Module:
        """See `ConvergenceSide`."""
        from regard.training.families.bert import BERT

        return BERT.load_model(self.settings, str(self.folder / "stock"))

    def train(self, watch: Watch, turn: int) -> None:
        """See `ConvergenceSide`."""
        from accelerate.utils import set_seed

        from regard.training.families.bert import BERT
        from regard.training.loop.launch import make_accelerator
        from regard.training.loop.loop import Loop
        from regard.training.loop.schedule import Budget

        class Race(Loop):
            def evaluate(self) -> dict[str, float]:
                if watch.reached(self.model):
                    self.budget = Budget(steps=self.progress.step)
                return {"masked_loss": watch.loss}

        set_seed(turn)
        model = BERT.make_model(self.settings, self.tokenizer)
        folder = self.folder / f"regard-{turn}"
        folder.mkdir()
        accelerator = make_accelerator(self.settings, folder)
        race = Race(self.task, model, self.settings, Budget(steps=self.settings.steps), folder, accelerator)
        watch.start()
        race.run()


class TrainerConvergence(ConvergenceSide):
    """Stock `BertForPreTraining` in `Trainer`."""

    def load(self) -> nn.Module:
        """See `ConvergenceSide`."""
        from transformers import BertForPreTraining

        return BertForPreTraining.from_pretrained(self.folder / "stock")

    def train(self, watch: Watch, turn: int) -> None:
        """See `ConvergenceSide`."""
        from datasets import load_from_disk
        from transformers import (
            BertConfig,
            BertForPreTraining,
            DataCollatorForLanguageModeling,
            Trainer,
            TrainerCallback,
            TrainingArguments,
            set_seed,
        )

        every = self.parameters["every"]

        class Race(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
                if state.global_step % every == 0 and watch.reached(model):
                    control.should_training_stop = True

        settings = self.settings
        set_seed(turn)
        arguments = TrainingArguments(
            str(self.folder / f"trainer-{turn}"),
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            warmup_steps=int(settings.warmup * settings.steps),
            weight_decay=settings.weight_decay,
            adam_beta2=0.98,
            adam_epsilon=1e-6,
            max_grad_norm=settings.clip,
            seed=turn,
            use_cpu=True,
            # The collator takes less time with a mask of special tokens, which the model does not take.
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            BertForPreTraining(BertConfig.from_pretrained(self.folder / "stock")),
            arguments,
            data_collator=DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=settings.mask_rate),
            train_dataset=load_from_disk(self.folder / "pairs"),
            callbacks=[Race()],
        )
        watch.start()
        trainer.train()


SIDES = {"regard": RegardConvergence, "trainer": TrainerConvergence}
