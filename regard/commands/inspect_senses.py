"""Setting a word's contextual vectors beside its static one: what `regard inspect senses` does."""

from __future__ import annotations

from pathlib import Path

from ..configuration.extras import require_extra
from ..families.seeds import require_seed
from ..inspection.senses.figure import draw_senses, example_line, title_of
from ..inspection.senses.senses import WordSenses, word_senses
from ..loading import for_attention, load_network, require_ending
from ..modeling.loading.load import require_text
from ..training.examples.sentences import split_sentences
from ..training.reading.documents import load_documents


def inspect_senses(
    model: str | Path,
    word: str,
    output: str | Path,
    *,
    data: str = "python-docs",
    documents: int = 10_000,
    language: str = "en",
    layer: int = -1,
    senses: int | None = None,
    examples: int = 3,
    max_length: int = 64,
    seed: int = 0,
) -> WordSenses:
    """Clusters a word's contextual vectors, beside its word2vec neighbours, and draws them.

    Args:
        model: folder of a run or of a model, or a Hub id.
        word: the word.
        output: file of the picture, .png or .svg.
        data: source of texts, as for training.
        documents: largest number of its documents to read.
        language: ISO 639 code of the texts' language, for splitting sentences.
        layer: the layer, from 0, the embeddings; -1 is the last.
        senses: number of clusters; chosen from the data if None.
        examples: number of examples to keep of each cluster.
        max_length: largest number of tokens around the word to read.
        seed: seed of samples, clusters and word2vec.

    Raises:
        ValueError: if there is no such model, an argument is out of range, the file can't be written, or a package
            that is needed is not installed.
    """
    require_ending(output, (".png", ".svg"))
    require_text(word, "word")
    require_seed(seed)
    require_extra("senses")
    network, tokenizer = load_network(model, for_attention)
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
    # However wide a font is, nothing is cut off.
    figure.savefig(output, dpi=110, bbox_inches="tight", pad_inches=0.15)
    return found


def sense_lines(found: WordSenses) -> list[str]:
    """Describes a word's uses in words and numbers."""
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
