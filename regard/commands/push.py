"""Sharing a trained model on the Hub: what `regard push` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import transformers
from huggingface_hub import ModelCardData
from transformers import AutoConfig, PreTrainedConfig

from ..families.registry import family_of_type
from ..modeling.loading.load import load_part, model_path
from ..sharing.hub import check_folder, push_folder

# The Auto classes that a card names, and the Hub's names of their tasks. It has no name for text to text.
_TASKS = {
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSeq2SeqLM": "text-generation",
    "AutoModelForImageTextToText": "image-to-text",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForNextSentencePrediction": None,
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForPreTraining": None,
    "AutoModel": "feature-extraction",
}
_CARD = """\
---
{data}
---

# {title}

A `{architecture}`, made with regard.

## Use

```python
{registration}from transformers import {imports}

{processor}model = {auto_class}.from_pretrained("PATH_OR_ID")
```
{elsewhere}"""


def push(
    run: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    bundle: bool = True,
    token: str | None = None,
    message: str | None = None,
    license: str | None = None,
    language: str | Sequence[str] | None = None,
) -> str:
    """Pushes the model of a run, or of a folder, to the Hub.

    The model of a run has a card. If a model has none, neither here nor on the Hub, it gets one that says what it is
    and how to load it.

    Args:
        run: folder of a run or of a model.
        repo_id: id of the repository on the Hub, which is made if it does not exist: `name/model`, or `model` for the
            account's own.
        private: whether to make a repository that others can't see.
        revision: branch to push to, made if it does not exist; None: `main`.
        bundle: whether to add the model's code, so that it loads where this package is not installed.
        token: token of an account that may write; None: the one of `hf auth login` or `HF_TOKEN`.
        message: message of the commit.
        license: license of the model for the card, as the Hub names it (`apache-2.0`); None keeps the card's.
        language: language of the model's texts for the card, or several, as the Hub names them (`en`); None keeps the
            card's.

    Returns:
        The address of the commit.

    Raises:
        ValueError: if there is no such folder, it holds no model, an argument is malformed, or the Hub refuses the
            card.
        PermissionError: if there is no token, or it may not write to the repository.
        ConnectionError: if the Hub cannot be reached, or the connection breaks for good.
        OSError: if the Hub refuses for another reason.
    """
    if not Path(run).is_dir():
        raise ValueError(f"`run` ({run}) must be the folder of a run or of a model: there is no such folder")
    folder = Path(model_path(run))
    check_folder(folder)
    card = plain_card(folder, repo_id.rpartition("/")[2], bundle)
    return push_folder(
        folder,
        repo_id,
        private=private,
        revision=revision,
        bundle=bundle,
        token=token,
        message=message,
        card=card,
        license=license,
        language=language,
    )


def plain_card(folder: Path, title: str, bundle: bool) -> str:
    """Makes the card of a model that is known by its files alone.

    Args:
        folder: folder of the model.
        title: title of the card.
        bundle: whether the model's code is pushed with it.
    """
    config = load_part(AutoConfig, folder, f"`run` ({folder})")
    ours = family_of_type(config.model_type) is not None
    imports = [_auto_class(config)]
    data = ModelCardData(
        library_name="transformers",
        tags=["regard", config.model_type] if ours else ["regard"],
        pipeline_tag=_TASKS[imports[0]],
    )
    processor = ""
    for name, file in (("AutoProcessor", "processor_config.json"), ("AutoTokenizer", "tokenizer_config.json")):
        if (folder / file).exists():
            imports.append(name)
            processor = f'{name.removeprefix("Auto").lower()} = {name}.from_pretrained("PATH_OR_ID")\n'
            break
    elsewhere = (
        "\nWhere regard is not installed, leave out its import, and give each `from_pretrained`\n"
        "`trust_remote_code=True`: the code of the model is beside it.\n"
    )
    return _CARD.format(
        data=data.to_yaml(),
        title=title,
        architecture=_architecture(config) or config.model_type,
        registration="import regard  # registers the model with transformers\n" if ours else "",
        imports=", ".join(imports),
        processor=processor,
        auto_class=imports[0],
        elsewhere=elsewhere if ours and bundle else "",
    )


def _architecture(config: PreTrainedConfig) -> str | None:
    """Returns the class that a configuration names, if it is a valid name: the file may hold anything."""
    names = config.architectures
    first = names[0] if isinstance(names, list) and names else None
    return first if isinstance(first, str) and first.isidentifier() else None


def _auto_class(config: PreTrainedConfig) -> str:
    """Returns the name of the Auto class that loads the architecture of a configuration."""
    architecture = _architecture(config)
    for name in _TASKS:
        mapping = getattr(transformers, name)._model_mapping
        if type(config) in mapping:
            classes = mapping[type(config)]
            if architecture in [each.__name__ for each in (classes if isinstance(classes, tuple) else (classes,))]:
                return name
    return "AutoModel"
