"""The check of seeds."""


def require_seed(seed: int) -> None:
    """Checks a seed of Python's, NumPy's and torch's generators.

    Raises:
        ValueError: if `seed` is outside NumPy's range, the narrowest of the three.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"`seed` ({seed}) must be at least 0 and less than 2**32")
