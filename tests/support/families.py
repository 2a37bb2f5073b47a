"""The classes of every registered family."""

from regard.families.family import resolve
from regard.families.registry import FAMILIES as REGISTERED

# The model classes by their Auto classes, by configuration class.
FAMILIES = {
    resolve(family.config): {auto_class: resolve(model) for auto_class, model in family.models.items()}
    for family in REGISTERED.values()
}
PROCESSORS = {
    resolve(family.config): resolve(family.processor) for family in REGISTERED.values() if family.processor is not None
}
FAMILY_CARDS = {name: family.card for name, family in REGISTERED.items()}
