"""The commands of `regard inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .draw_attention import draw_attention
from .inspect_faithfulness import inspect_faithfulness
from .inspect_marks import inspect_marks, mark_lines

inspect_app = typer.Typer(help="Look inside a model.", no_args_is_help=True, rich_markup_mode=None)


def _number_or_name(head: str) -> int | str:
    return int(head) if head.removeprefix("-").isdecimal() else head


@inspect_app.command()
def attention(
    model: Annotated[str, typer.Argument(help="Folder of a run or a model, or a Hub id.")],
    output: Annotated[Path, typer.Option(help="File to write: .html for all heads, .png or .svg for one layer.")],
    text: Annotated[str | None, typer.Option(help="Text to read; of an encoder-decoder the source.")] = None,
    text_pair: Annotated[str | None, typer.Option(help="Second text, for a model that reads pairs.")] = None,
    target: Annotated[str | None, typer.Option(help="What the decoder writes; generated if not given.")] = None,
    image: Annotated[Path | None, typer.Option(help="File of the image that a captioner looks at.")] = None,
    kind: Annotated[
        str | None,
        typer.Option(help="Which attention: self; cross, encoder, decoder; alignment; image. One of the model's."),
    ] = None,
    layer: Annotated[int, typer.Option(help="Layer to show first, from 0; -1 is the last.")] = -1,
    head: Annotated[str, typer.Option(help="Head to show first, from 0; or mean or max, over all heads.")] = "mean",
    words: Annotated[bool, typer.Option("--words", help="Join the pieces of words; the page has a switch.")] = False,
) -> None:
    """Draw where a model looks: each token's attention to each, or a captioner's to the image."""
    seen = draw_attention(
        model,
        output,
        text,
        text_pair=text_pair,
        target=target,
        image=image,
        kind=kind,
        layer=layer,
        head=_number_or_name(head),
        words=words,
    )
    size = output.stat().st_size / 1000
    typer.echo(
        f"Wrote {output} ({size:,.0f} kB): {seen.kind} attention, {seen.layers} layer(s) of {seen.heads} head(s), "
        f"{len(seen.queries)} queries, {len(seen.keys)} keys"
    )


@inspect_app.command(short_help="Test whether attention explains predictions.")
def faithfulness(
    model: Annotated[str, typer.Argument(help="Folder of a run or a model, or a Hub id.")],
    data: Annotated[
        str | None, typer.Option(help="Source to test on, as for `train`; else what the run held out.")
    ] = None,
    examples: Annotated[int, typer.Option(help="How many are drawn of it.")] = 50,
    layer: Annotated[int, typer.Option(help="Layer to test, from 0; -1 is the last.")] = -1,
    head: Annotated[str, typer.Option(help="Head to test, from 0; or mean or max, over all heads.")] = "mean",
    max_tokens: Annotated[int, typer.Option(help="Longer texts are cut after so many tokens.")] = 64,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    output: Annotated[Path, typer.Option(help="File of the picture.")] = Path("faithfulness.png"),
) -> None:
    """Test whether attention explains predictions: by erasing inputs, by gradients, and by shuffled weights."""
    found = inspect_faithfulness(
        model,
        output,
        data=data,
        examples=examples,
        layer=layer,
        head=_number_or_name(head),
        max_tokens=max_tokens,
        seed=seed,
    )
    typer.echo(found.summary())
    typer.echo(f"Drawn in {output}")


@inspect_app.command(short_help="See whether a captioner looks at the marks that it names.")
def marks(
    model: Annotated[str, typer.Argument(help="Folder of a run or a model, or a Hub id: a captioner of glyphs.")],
    mark: Annotated[str, typer.Option(help="The mark, by its name in the captions.")] = "DIAERESIS",
    examples: Annotated[int, typer.Option(help="How many drawings of letters with it are looked at.")] = 100,
    layer: Annotated[int, typer.Option(help="Layer to look at, from 0; -1 is the last.")] = -1,
    head: Annotated[str, typer.Option(help="Head to look at, from 0; or mean, over all heads.")] = "mean",
    output: Annotated[Path, typer.Option(help="File of the picture.")] = Path("marks.png"),
) -> None:
    """Tell how much of a captioner's attention lies on a letter's mark while it names the mark."""
    found = inspect_marks(model, output, mark, examples=examples, layer=layer, head=_number_or_name(head))
    typer.echo("\n".join(mark_lines(found)))
    typer.echo(f"Drawn in {output}")
