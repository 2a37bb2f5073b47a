"""Testing on held-out data whether a trained model's attention explains what it predicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedConfig

from ..configuration.extras import require_extra
from ..families.registry import FAMILIES
from ..families.seeds import require_seed
from ..inspection.faithfulness.faithfulness import Faithfulness, faithfulness
from ..inspection.faithfulness.prediction import Example, special_ids
from ..loading import for_prediction, load_network, predicting_class, require_ending
from ..training.families.recipes import recipe_of
from ..training.run.folder import SETTINGS_FILE
from ..training.run.settings import make_settings, require_source
from ..training.run.settings_file import read_yaml

# Shorter texts are not drawn.
LEAST_TOKENS = 8
# Data with a test split of its own, and the setting that says how much of it is made for training.
_BUILT_IN = {"dates": "max_pairs", "glyphs": "max_images"}


def held_out_rows(model: str | Path, data: str | None, network: Any) -> Dataset:
    """Loads the rows to test a model on.

    Args:
        model: folder of a run or of a model, or a Hub id.
        data: a source like those of training, of which all is used; None: the rows that the run held out, or for a
            model that is no run the rows that its family holds out by default. Of `dates` and `glyphs` it is always
            the test split.
        network: the model, whose configuration decides the family if the folder does not name it.

    Raises:
        ValueError: if there is no such source, or it can't be read.
    """
    file = Path(model) / SETTINGS_FILE
    values = read_yaml(file) if file.is_file() else {}
    name = values.pop("family", None)
    if name not in FAMILIES:
        # A model that was not pretrained here still reads the data of some family here.
        values, name = {}, _family_like(network.config)
    family = recipe_of(name)
    known = make_settings(family.settings_class, values)
    sources = [data] if data is not None else known.data
    few = _BUILT_IN.get(sources[0].partition(":")[0], "") if len(sources) == 1 else ""
    if hasattr(known, few):
        # The training rows are not used, so only one is made.
        values |= {"data": sources, "validation": sources[0], "split": "test", few: 1}
    elif data is not None:
        values |= {"validation": data}
    return family.load_data(make_settings(family.settings_class, values))[1]


def _family_like(config: PreTrainedConfig) -> str:
    """Name of the family that a model belongs to, or of the first one that reads the same data."""
    name = config.model_type.removeprefix("regard_")
    if name in FAMILIES:
        return name
    auto_class = predicting_class(config)
    return next(name for name, family in FAMILIES.items() if auto_class in family.models)


def _as_examples(rows: Dataset, processor: Any, seed: int) -> Iterator[Example]:
    """Yields the rows in random order, without texts that are too short."""
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
    """Tests a trained model's attention on held-out data, and draws the result.

    Args:
        model: folder of a run or of a model, or a Hub id.
        output: file of the picture (.png, .svg or .pdf).
        data: source of the examples (`held_out_rows`).
        examples: number of examples to draw; all of them if there are fewer.
        layer: the layer to test, from 0; -1 is the last.
        head: the head to test, from 0, or "mean" or "max" over all heads.
        max_tokens: number of tokens after which longer texts are cut.
        seed: seed of all draws.

    Raises:
        ValueError: if there is no such model, data, layer or head, the file can't be written, or a package that is
            needed is not installed.
    """
    file = Path(output)
    require_ending(file)
    if examples < 2:
        raise ValueError(f"`examples` ({examples}) must be at least 2: the verdict is about their mean")
    require_seed(seed)
    if data is not None:
        require_source(data)
    require_extra("faithfulness")
    network, processor = load_network(model, for_prediction)
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
