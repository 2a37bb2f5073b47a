"""The command that sets a word's contextual vectors beside its static one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..configuration.extras import require_extra
from ..configuration.seeds import require_seed
from ..inspection.senses.figure import draw_senses, example_line, title_of
from ..inspection.senses.senses import WordSenses, word_senses
from ..loading import require_ending
from ..modeling.loading.load import require_text
from ..training.examples.sentences import split_sentences
from ..training.reading.documents import load_documents
from .draw_attention import load_attentive

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.command(short_help="Show the uses of a word, by its contextual vectors.")
def senses(
    model: Annotated[str, typer.Argument(help="Folder of a run or a model, or a Hub id.")],
    word: Annotated[str, typer.Argument(help="The word.")],
    data: Annotated[str, typer.Option(help="Source of texts, as for `train`.")] = "python-docs",
    documents: Annotated[int, typer.Option(help="How many of its documents are read at most.")] = 10_000,
    language: Annotated[str, typer.Option(help="The texts' ISO 639 code, by which they are split.")] = "en",
    layer: Annotated[int, typer.Option(help="Layer, from 0, the embeddings; -1 is the last.")] = -1,
    senses: Annotated[int | None, typer.Option(help="Number of clusters; what seems right, if not given.")] = None,
    examples: Annotated[int, typer.Option(help="How many are shown of each cluster.")] = 3,
    max_length: Annotated[int, typer.Option(help="How many tokens around the word the model reads at most.")] = 64,
    seed: Annotated[int, typer.Option(help="Of samples, clusters and word2vec.")] = 0,
    output: Annotated[Path, typer.Option(help="File of the picture, .png or .svg.")] = Path("senses.png"),
) -> None:
    """Cluster a word's contextual vectors, beside its word2vec neighbours, and split their variance by contexts."""
    require_ending(output, (".png", ".svg"))
    require_text(word, "word")
    require_seed(seed)
    require_extra("senses")
    network, tokenizer = load_attentive(model)
    texts = load_documents(data, max_documents=documents)["text"]
    found = word_senses(
        network,
        tokenizer,
        (sentence for text in texts for sentence in split_sentences(text, language)),
        word,
        layer=layer,
        senses=senses,
        examples=examples,
        max_length=max_length,
        seed=seed,
    )
    figure = draw_senses(found, f"{title_of(found)} · {model}")
    # However wide a font is, nothing is cut.
    figure.savefig(output, dpi=110, bbox_inches="tight", pad_inches=0.15)
    typer.echo("\n".join(sense_lines(found)))
    typer.echo(f"Drawn in {output}")


def sense_lines(found: WordSenses) -> list[str]:
    """A word's uses in words and numbers."""
    clusters, own = found.clusters, found.layers[found.layer]
    lines = [
        f"{found.word}: {len(found.occurrences)} of the {found.contexts} sentences that have it, layer {found.layer} "
        f"of {len(found.layers) - 1}",
        f"word2vec's one vector is near: {', '.join(word for word, _ in found.static_neighbours)}",
    ]
    for number, sense in enumerate(found.senses):
        lines.append(f"use {number + 1}: {sense.occurrences} ({sense.occurrences / len(found.occurrences):.0%})")
        if sense.companions:
            lines.append(f"  more often with: {', '.join(sense.companions)}")
        lines += [f"  {example_line(example, 110)}" for example in sense.examples]
    lines.append(
        f"Silhouette {clusters.silhouette:.2f}; clouds of one cluster reach {clusters.chance_silhouette:.2f} at most"
    )
    if len(found.senses) > 1:
        lines.append(
            f"Between the uses lies {clusters.share:.0%} of the variance of its vectors; of such a cloud, cut into as "
            f"many: {clusters.chance_share:.0%}"
        )
    lines += [
        f"Its place and the length of what was read explain {found.position_share:.0%} of that variance",
        f"The variance between its contexts is {own.share:.0%} of that of all words' vectors "
        f"(of {found.words} other words: {own.mean_share:.0%}; of a static vector: 0%)",
        "layer  between contexts  other words  self-similarity  two words  corrected",
    ]
    for number, layer in enumerate(found.layers):
        lines.append(
            f"{number:5}  {layer.share:16.3f}  {layer.mean_share:11.3f}  {layer.self_similarity:15.3f}  "
            f"{layer.anisotropy:9.3f}  {layer.corrected_similarity:9.3f}"
        )
    return lines
