"""Which rows are trained on and which are held out."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from datasets import Dataset, concatenate_datasets

from ..run.settings import TrainingSettings, held_out_share


def load_split(
    settings: TrainingSettings,
    read: Callable[[list[str], bool], Dataset],
    built_in: dict[str, Callable[[str, str], Dataset]] | None = None,
    *,
    least: int = 1,
    unit: str = "row",
    remedy: str = "add some",
) -> tuple[Dataset, Dataset]:
    """Loads the training rows and the held-out ones that the settings name.

    Built-in data has splits of its own, which share no row. Of other data, a share is drawn at random.

    Args:
        settings: name the sources, the held-out share or source, and the seed of the draw.
        read: reads sources, given their names and whether they are for training; what is held out is read in full.
        built_in: makes the built-in data of a name, given that name or `name:...` for a part of it, and the split.
        least: the fewest rows on either side where a share is drawn.
        unit: what a row is, for the error.
        remedy: what to do about too few rows, for the error.

    Raises:
        ValueError: if `validation` is neither a share nor a source, or there are too few rows.
    """
    makers = built_in or {}
    if not settings.data:
        suggested = "".join(f"{name!r}, " for name in makers)
        raise ValueError(f"`data` names no source: give {suggested}files of your own, or a data set of the Hub")
    share = held_out_share(settings.validation)
    made = [(name, make) for name in settings.data if (make := makers.get(name.partition(":")[0]))]
    own = [name for name in settings.data if name.partition(":")[0] not in makers]
    rows, held_out = [make(name, "train") for name, make in made], []
    if share is None:
        name = settings.validation
        # The training split of the Hub's data sets is the default; built-in data has its own for this.
        split = "validation" if settings.split == "train" else settings.split
        validation = makers.get(name.partition(":")[0])
        held_out.append(read([name], False) if validation is None else validation(name, split))
    else:
        held_out += [make(name, "validation") for name, make in made]
    if own:
        found = read(own, True)
        if share is not None:
            number = max(least, round(share * len(found)))
            if len(found) < number + least:
                there_are = f"there is 1 {unit}" if len(found) == 1 else f"there are {len(found)} {unit}s"
                raise ValueError(
                    f"{there_are} in {', '.join(own)}, too few to hold out {number} and train on {least} or more: "
                    f"{remedy}, or name a source for `validation`"
                )
            parts = found.train_test_split(test_size=number, seed=settings.seed)
            found = parts["train"]
            held_out.append(parts["test"])
        rows.append(found)
    return concatenate_datasets(rows), concatenate_datasets(held_out)


def sample_rows(groups: Sequence[Hashable], share: float, seed: int) -> list[int]:
    """Draws a share of the rows of each group, but never all of a group, and at least one row in all.

    Args:
        groups: the group of each row.
        share: the share to draw, between 0 and 1.
        seed: another seed draws other rows.

    Returns:
        The numbers of the rows drawn, from 0, in ascending order.

    Raises:
        ValueError: if each row is the only one of its group.
    """
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        places[group].append(place)
    rng = random.Random(f"held out {seed}")
    # Shuffled within the groups and spread evenly over them: the share of each group is exact to the row.
    spread = []
    for members in places.values():
        rng.shuffle(members)
        spread += [((rank + 0.5) / len(members), place) for rank, place in enumerate(members[:-1])]
    if not spread:
        if len(groups) == 1:
            raise ValueError(f"`data` has 1 usable row, too few to hold one out (`validation` is {share:g}) and train")
        raise ValueError(
            f"`data` has {len(groups)} usable rows, each with another label: none can be held out "
            f"(`validation` is {share:g}) whose label is learnt from the others"
        )
    number = max(1, round(share * len(groups)))
    return sorted(place for _, place in sorted(spread)[:number])
