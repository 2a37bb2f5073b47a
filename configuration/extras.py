"""The optional extras of the package, and a check that the packages of one are installed."""

from __future__ import annotations

from importlib.util import find_spec

# Of each extra of setup.cfg: the subject of an error, and the distribution of each module that the extra installs.
EXTRAS: dict[str, tuple[str, dict[str, str]]] = {
    "faithfulness": ("tests of faithfulness", {"captum": "captum", "scipy": "scipy"}),
    "senses": ("word senses", {"gensim": "gensim", "sklearn": "scikit-learn"}),
}


def require_extra(extra: str) -> None:
    """Raises if a package of an extra is not installed.

    Args:
        extra: name of the extra, a key of `EXTRAS`.

    Raises:
        ValueError: if one is missing, with the command that installs it.
    """
    purpose, modules = EXTRAS[extra]
    missing = [distribution for module, distribution in modules.items() if find_spec(module) is None]
    if missing:
        raise ValueError(f"{purpose} need {' and '.join(missing)}: pip install 'regard[{extra}]'")
