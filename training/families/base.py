"""The recipe of a model family: everything that its training does differently from another family's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ...families.family import resolve
from ...families.registry import FAMILIES
from ...modeling.loading.load import load_part
from ..loop.objective import Objective
from ..run.settings import TrainingSettings
from .tokenizers import require_special_tokens

Settings = TypeVar("Settings", bound=TrainingSettings)


class Recipe(ABC, Generic[Settings]):
    """How a model family is trained: its settings, its model, its data and its objective.

    Attributes:
        name: name of the family on the command line.
        special_tokens: special tokens that its tokenizers must have.
        processor_class: the Auto class that loads its tokenizers or processors.
        default_steps: length of a run whose settings give none.
    """

    name: ClassVar[str]
    special_tokens: ClassVar[tuple[str, ...]] = ()
    processor_class: ClassVar[Any] = AutoTokenizer
    default_steps: int

    @property
    def settings_class(self) -> type[Settings]:
        """The class of the settings of its runs, which the family's record names."""
        return resolve(FAMILIES[self.name].settings)

    @abstractmethod
    def make_model(self, settings: Settings, processor: Any = None) -> PreTrainedModel:
        """Makes an untrained model, for the tokenizer or processor if there is one yet.

        Raises:
            ValueError: if sizes do not fit together.
        """

    @abstractmethod
    def load_model(self, settings: Settings, path: str) -> PreTrainedModel:
        """Loads a trained model of the family, from a folder or the Hub."""

    def settings_of(self, config: PreTrainedConfig) -> dict[str, Any]:
        """The settings, by name, that follow from the configuration of a trained model."""
        return {}

    @abstractmethod
    def load_data(self, settings: Settings) -> tuple[Dataset, Dataset]:
        """Loads the training rows and the held-out rows."""

    @abstractmethod
    def make_processor(self, settings: Settings, rows: Dataset) -> Any:
        """Loads the tokenizer or processor that the settings name, or makes one from the training rows."""

    def load_processor(self, path: str | Path) -> Any:
        """Loads the tokenizer or processor of a trained model, from a folder or the Hub.

        Raises:
            ValueError: if it can't be loaded, or lacks a special token.
        """
        label = f"`model` ({path})"
        processor = load_part(self.processor_class, path, label)
        require_special_tokens(getattr(processor, "tokenizer", processor), self.special_tokens, label)
        return processor

    @abstractmethod
    def make_objective(
        self, settings: Settings, processor: Any, rows: Dataset, held_out: Dataset
    ) -> tuple[Objective, dict[str, Any]]:
        """Makes the objective of a run, and the facts about its data that go into the results."""

    @abstractmethod
    def sample_outputs(
        self, settings: Settings, model: PreTrainedModel, processor: Any, held_out: Dataset
    ) -> dict[str, Any]:
        """Lets the trained model predict or generate for held-out rows.

        Returns:
            Entries of the results. `metrics` are added to those of the last evaluation; `generated` has the outputs
            for all rows that were used.
        """

    @abstractmethod
    def synthetic_batch(self, settings: Settings, config: Any, rows: int) -> tuple[dict[str, Any], int]:
        """Makes a batch of random tokens and images, in which every example is as long as the settings allow.

        Args:
            settings: settings of the run, with the seed of the batch.
            config: configuration of the model.
            rows: number of examples.

        Returns:
            The arguments of the model, and the number of tokens as training counts them.

        Raises:
            ValueError: if the examples are too short to predict anything.
        """
