"""What is a seed."""


def require_seed(seed: int) -> None:
    """Refuses what one of Python, NumPy and torch takes no seed of; the narrowest is NumPy.

    Raises:
        ValueError: if it is out of range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"`seed` ({seed}) must be at least 0 and less than 2**32")
