"""Registration of the model families with transformers' Auto classes."""

from __future__ import annotations

from .families.family import Family, resolve
from .families.registry import FAMILIES


def register_families() -> None:
    """Registers every family.

    Raises:
        ValueError: if transformers already has a model type of the same name.
    """
    for family in FAMILIES.values():
        register_family(family)


def register_family(family: Family) -> None:
    """Registers the configuration, models, tokenizer and processor of a family.

    Raises:
        ValueError: if transformers already has a model type of the same name.
    """
    # Imported here, because the import of transformers may be what calls this function.
    import transformers

    config_class = resolve(family.config)
    transformers.AutoConfig.register(config_class.model_type, config_class)
    for auto_class, model_class in family.models.items():
        getattr(transformers, auto_class).register(config_class, resolve(model_class))
    if family.tokenizer is not None:
        transformers.AutoTokenizer.register(config_class, resolve(family.tokenizer))
    if family.processor is not None:
        transformers.AutoProcessor.register(config_class, resolve(family.processor))
