"""Training rows and held-out ones, of data that is built in, the user's own, or both."""

from __future__ import annotations

from collections.abc import Callable

from datasets import Dataset, concatenate_datasets

from ..run.settings import TrainingSettings, held_out_share


def load_rows(
    settings: TrainingSettings,
    built_in: str,
    make: Callable[[str, str], Dataset],
    read: Callable[[list[str], bool], Dataset],
) -> tuple[Dataset, Dataset]:
    """The training rows and the held-out ones that the settings name.

    Built-in data knows itself what to hold out; of other data a share is drawn.

    Args:
        settings: give the sources, the held-out share or source, and the seed of the draw.
        built_in: name of the built-in data; `name:...` asks for some of it.
        make: makes built-in data, from the name and the split.
        read: reads all other sources, from their names and whether they are for training; what is held out is read in
            full.

    Raises:
        ValueError: if `validation` is neither a share nor a source, or a part would be empty.
    """

    def is_built_in(name: str) -> bool:
        return name.partition(":")[0] == built_in

    if not settings.data:
        raise ValueError(f"`data` names no source: give {built_in!r}, files of your own, or a data set of the Hub")
    share = held_out_share(settings.validation)
    own = [name for name in settings.data if not is_built_in(name)]
    made = [name for name in settings.data if is_built_in(name)]
    rows, held_out = [make(name, "train") for name in made], []
    if share is None:
        name = settings.validation
        # The training split of the Hub's data sets is the default; built-in data has its own for this.
        split = "validation" if settings.split == "train" else settings.split
        held_out.append(make(name, split) if is_built_in(name) else read([name], False))
    else:
        held_out += [make(name, "validation") for name in made]
    if own:
        found = read(own, True)
        if share is not None:
            number = max(1, round(share * len(found)))
            if len(found) <= number:
                raise ValueError(
                    f"there {'is 1 row' if len(found) == 1 else f'are {len(found)} rows'} in {', '.join(own)}: "
                    f"too few to hold out {number} and train on others"
                )
            parts = found.train_test_split(test_size=number, seed=settings.seed)
            found = parts["train"]
            held_out.append(parts["test"])
        rows.append(found)
    return concatenate_datasets(rows), concatenate_datasets(held_out)
