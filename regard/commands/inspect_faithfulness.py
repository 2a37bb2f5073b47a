"""Testing on held-out data whether a trained model's attention explains what it predicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from ..configuration.captioner import RegardCaptionerConfig
from ..configuration.extras import require_extra
from ..configuration.seeds import require_seed
from ..inspection.faithfulness.faithfulness import Faithfulness, faithfulness
from ..inspection.faithfulness.prediction import Example, special_ids
from ..loading import load_network, require_ending
from ..training.families.registry import TRAINABLE
from ..training.run.folder import SETTINGS_FILE
from ..training.run.settings import make_settings, require_source
from ..training.run.settings_file import read_yaml

# Of texts that are drawn, shorter ones are passed over.
LEAST_TOKENS = 8
# Data that has a test split of its own, and the setting that says how much of it is for training.
_BUILT_IN = {"dates": "max_pairs", "glyphs": "max_images"}


def load_predicting(model: str | Path) -> tuple[Any, Any]:
    """Loads a model with its output layer, ours or stock, and its tokenizer or processor.

    Raises:
        ValueError: if there is no such model.
    """
    return load_network(model, _class_that_predicts)


def _class_that_predicts(config: PreTrainedConfig) -> Any:
    def ends(*endings: str) -> bool:
        return any(name.endswith(endings) for name in config.architectures or ())

    if isinstance(config, RegardCaptionerConfig):
        return AutoModelForImageTextToText
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    if ends("ForSequenceClassification"):
        return AutoModelForSequenceClassification
    return AutoModelForMaskedLM if ends("ForMaskedLM", "ForPreTraining", "BertModel") else AutoModelForCausalLM


def held_out_rows(model: str | Path, data: str | None, network: Any) -> Dataset:
    """The rows to test a model on.

    Args:
        model: folder of a run or of a model, or a Hub id.
        data: a source like those of training, whole, of `dates` and `glyphs` the test split; None: what the run held
            out, or of a model that is no run the family's default data; of `dates` and `glyphs` again the test split.
        network: the model, which tells the family where the folder does not.

    Raises:
        ValueError: for a source that won't do.
    """
    file = Path(model) / SETTINGS_FILE
    values = read_yaml(file) if file.is_file() else {}
    name = values.pop("family", None)
    if name not in TRAINABLE:
        # Not pretrained here, it still reads what a family here does.
        values, name = {}, _family_like(network)
    family = TRAINABLE[name]
    known = make_settings(family.settings_class, values)
    sources = [data] if data is not None else known.data
    few = _BUILT_IN.get(sources[0].partition(":")[0], "") if len(sources) == 1 else ""
    if hasattr(known, few):
        # The training rows, which are not looked at, need not be made.
        values |= {"data": sources, "validation": sources[0], "split": "test", few: 1}
    elif data is not None:
        values |= {"validation": data}
    return family.load_data(make_settings(family.settings_class, values))[1]


def _family_like(network: Any) -> str:
    if hasattr(network, "feature_grid"):
        return "captioner"
    if network.config.is_encoder_decoder:
        return "transformer"
    return "decoder" if network.can_generate() else "bert"


def _as_examples(rows: Dataset, processor: Any, seed: int) -> Iterator[Example]:
    """The rows in a random order, of texts those that are long enough."""
    pairs = (("image", "text"), ("source", "target"))
    columns = next((pair for pair in pairs if set(pair) <= set(rows.column_names)), None)
    for number in np.random.default_rng(seed).permutation(len(rows)).tolist():
        row = rows[number]
        if columns is not None:
            yield row[columns[0]], row[columns[1]]
            continue
        text = row["text"]
        ids = processor(text, truncation=True, max_length=4 * LEAST_TOKENS)["input_ids"]
        if sum(token not in special_ids(processor) for token in ids) >= LEAST_TOKENS:
            yield text


def inspect_faithfulness(
    model: str | Path,
    output: str | Path,
    *,
    data: str | None = None,
    examples: int = 50,
    layer: int = -1,
    head: int | str = "mean",
    max_tokens: int = 64,
    seed: int = 0,
) -> Faithfulness:
    """Tests a trained model's attention on held-out data, and draws what came of it.

    Args:
        model: folder of a run or of a model, or a Hub id.
        output: the picture to write (.png, .svg or .pdf).
        data: see `held_out_rows`.
        examples: how many are drawn; all that there are, if these are fewer.
        layer: see `faithfulness`, as for the three after it.
        head: see there.
        max_tokens: see there.
        seed: see there; of the draw of examples too.

    Returns:
        What was found.

    Raises:
        ValueError: for a model or data that won't do, a layer or a head that is not there, a file of another kind, or
            packages that are not installed.
    """
    file = Path(output)
    require_ending(file)
    if examples < 2:
        raise ValueError(f"`examples` ({examples}) must be at least 2: the verdict is about their mean")
    require_seed(seed)
    if data is not None:
        require_source(data)
    require_extra("faithfulness")
    network, processor = load_predicting(model)
    rows = held_out_rows(model, data, network)
    drawn: Sequence[Example] = list(islice(_as_examples(rows, processor, seed), min(examples, len(rows))))
    if len(drawn) < 2:
        raise ValueError(f"`data` ({data or 'held out'}) has {len(drawn)} texts of {LEAST_TOKENS} tokens or more")
    found = faithfulness(
        network,
        processor,
        drawn,
        layer=layer,
        head=head,
        max_tokens=max_tokens,
        seed=seed,
        title=str(model),
        progress=lambda given: tqdm(given, desc="examples", leave=False, delay=1),
    )
    found.figure().savefig(file, dpi=110)
    return found
