"""Deliberate breaks: does the suite notice when the code is wrong?

Each break replaces a few lines of the package, which are found by their text and not by their place, with a mistake
that someone could make. The tests named with it are then run, and one of them should fail. The working tree is put
back after each.

    python tests/support/breaks.py                         all of them
    python tests/support/breaks.py --only NAME NAME        some
    python tests/support/breaks.py --unbroken              the tests themselves, which must pass without any break
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# What is no part of the package.
OUTSIDE = ("benchmarks", "build", "docs", "runs", "tests")
# The longest that the tests of one break may take, in seconds.
LIMIT = 600


class Break(NamedTuple):
    """A mistake.

    Attributes:
        name: of it.
        old: a part of the code that there is once.
        new: what takes its place.
        tests: names of the test files that ought to notice, with spaces between them.
    """

    name: str
    old: str
    new: str
    tests: str


BREAKS = (
    # Configuration
    Break("seed limit off by one", "if not 0 <= seed < 2**32:", "if not 0 <= seed <= 2**32:", "test_settings.py"),
    Break(
        "token id equal to the vocabulary's size allowed",
        'if name.endswith("_token_id") and isinstance(value, int) and not 0 <= value < self.vocab_size:',
        'if name.endswith("_token_id") and isinstance(value, int) and not 0 <= value <= self.vocab_size:',
        "test_configuration.py",
    ),
    Break(
        "encoder as wide as the decoder in each direction",
        "self.encoder_hidden_size = self.hidden_size // 2",
        "self.encoder_hidden_size = self.hidden_size",
        "test_configuration.py test_recurrent.py",
    ),
    Break(
        "decoder's cache sized by the encoder's layers",
        "config.num_hidden_layers = config.num_decoder_layers",
        "config.num_decoder_layers = config.num_hidden_layers",
        "test_generating.py test_seq2seq.py",
    ),
    # Tokenization
    Break(
        "words with unknown characters learnt from",
        "spellable = {word: count for word, count in words.items() if known.issuperset(word)}",
        "spellable = dict(words)",
        "test_wordpiece.py",
    ),
    Break(
        "second text of a pair without its template",
        "pair=f\"{template} {template.replace('$A', '$B')}\",",
        'pair=f"{template} $B",',
        "test_generative_tokenizers.py",
    ),
    Break(
        "label one token longer than its limit", "words[: max_length - 1]", "words[:max_length]", "test_processor.py"
    ),
    Break(
        "composed before lower-casing",
        "normalizers.Sequence([normalizers.Lowercase(), normalizers.NFC()])",
        "normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])",
        "test_generative_tokenizers.py",
    ),
    # Modeling
    Break("weights of a row that sees nothing", "dim=-1).masked_fill(hidden, 0.0)", "dim=-1)", "test_attention.py"),
    Break(
        "gradient of the additive score's vector",
        "gradient.flatten()) - gradient.sum()",
        "gradient.flatten())",
        "test_recurrent.py",
    ),
    Break(
        "implicit causal mask shows the next token",
        "device=query.device).tril()",
        "device=query.device).tril(1)",
        "test_multi_head_attention.py",
    ),
    Break(
        "first token of a packed sequence counted with the one before",
        "return places - ends[torch.bucketize(places, ends[1:], right=True)]",
        "return places - ends[torch.bucketize(places, ends[1:], right=False)]",
        "test_packing.py test_bert_packing.py",
    ),
    Break(
        "chosen positions' bounds include the next first token",
        "selected_ends = torch.searchsorted(ordered, ends.to(ordered.dtype), out_int32=True)",
        "selected_ends = torch.searchsorted(ordered, ends.to(ordered.dtype), out_int32=True, right=True)",
        "test_packing.py test_bert_packing.py",
    ),
    Break(
        "positions of the first tokens instead of the new ones",
        "return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -length:]",
        "return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, :length]",
        "test_decoder.py test_positions_and_block.py test_generation.py",
    ),
    Break(
        "bias read as if contiguous", "is None else bias.contiguous()", "is None else bias.detach()", "test_linear.py"
    ),
    Break("gradients of dropped elements", "gradient * kept * ctx.scale,", "gradient * ctx.scale,", "test_linear.py"),
    Break(
        "vocabulary's gradient of the last part alone",
        "rows += linear(columns.t(), hidden.t())",
        "rows.copy_(linear(columns.t(), hidden.t()))",
        "test_fused_cross_entropy.py",
    ),
    Break(
        "factors of a backward pass that broke off kept",
        "self._pass, self._pairs = number, []",
        "self._pass = number",
        "test_rnn.py",
    ),
    Break(
        "states of the wrong rows kept when the short ones end",
        "state = tuple(part[: len(from_input)] for part in state)",
        "state = tuple(part[-len(from_input) :] for part in state)",
        "test_rnn.py test_recurrent.py",
    ),
    Break(
        "last token counted from the left whatever the padding",
        "last = (mask.int() * (places + 1)).argmax(dim=1)",
        "last = mask.int().sum(dim=1) - 1",
        "test_recurrent.py",
    ),
    Break(
        "state not reordered with the beams",
        "self.state, self.source = tuple(map(change, self.state)), change(self.source)",
        "self.source = change(self.source)",
        "test_recurrent.py test_generation.py",
    ),
    Break(
        "penalty of each image not weighted by its tokens",
        "total = self.config.attention_regularization * (tokens * penalty).sum()",
        "total = self.config.attention_regularization * penalty.sum()",
        "test_captioner.py test_losses.py",
    ),
    Break(
        "last token of a row predicts the padding",
        "shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]",
        "shift_labels = nn.functional.pad(labels, (0, 1), value=0)[..., 1:]",
        "test_decoder.py test_losses.py",
    ),
    Break(
        "idle bias read where the embeddings are untied",
        'tensors[:1] if kwargs["config"].tie_word_embeddings else tensors[-1:]',
        'tensors[-1:] if kwargs["config"].tie_word_embeddings else tensors[:1]',
        "test_bert_checkpoints.py",
    ),
    # Training: data
    Break(
        "number of masked tokens rounded down", "* len(ordinary) + rng.random()", "* len(ordinary)", "test_masking.py"
    ),
    Break(
        "random second segment from the same document",
        "+= other >= document",
        "+= other > document",
        "test_sentence_pairs.py",
    ),
    Break("masks the same in each epoch", "seed, number, index])", "seed, index])", "test_bert_data.py"),
    Break(
        "held-out rows drawn without the seed",
        "parts = found.train_test_split(test_size=number, seed=settings.seed)",
        "parts = found.train_test_split(test_size=number, seed=0)",
        "test_splits.py test_seq2seq_settings.py",
    ),
    Break(
        "CSV row named by its last line",
        'yield f"{name}:{line}", row',
        'yield f"{name}:{reader.reader.line_num}", row',
        "test_tables.py test_documents.py",
    ),
    Break(
        "tries not counted anew after a row", "number, tries = number + 1, 0", "number += 1", "test_hub_streaming.py"
    ),
    Break(
        "cache of skipped records taken where they are to stop",
        "fingerprint = Hasher.hash((key, counted_by.stops))",
        "fingerprint = Hasher.hash(key)",
        "test_bad_records.py",
    ),
    # Training: the loop
    Break(
        "learning rate falls as if there were no warm-up",
        "rest = min(1.0, (progress - warmup) / (1 - warmup)) if warmup < 1 else 1.0",
        "rest = min(1.0, progress - warmup) if warmup < 1 else 1.0",
        "test_schedule.py",
    ),
    Break(
        "items counted in the first part of a batch alone",
        "*(sum(counts[name] for counts in each) for name in names)",
        "*(len(each) * each[0][name] for name in names)",
        "test_loop.py",
    ),
    Break(
        "gradients clipped where they are not to be",
        'norm = full_tensor(accelerator.clip_grad_norm_(self.model.parameters(), settings.clip or float("inf")))',
        "norm = full_tensor(accelerator.clip_grad_norm_(self.model.parameters(), settings.clip or 1.0))",
        "test_loop.py",
    ),
    Break(
        "step with a gradient that is not finite taken",
        "self.optimizer.optimizer.found_inf = skipped.float()",
        "self.optimizer.optimizer.found_inf = torch.zeros_like(skipped.float())",
        "test_nonfinite.py",
    ),
    Break(
        "resumed run begins the epoch's data anew",
        "parts = iter(self._loader(examples, progress.step_in_epoch, steps, settings.workers))",
        "parts = iter(self._loader(examples, 0, steps, settings.workers))",
        "test_loop.py test_checkpoints.py",
    ),
    Break(
        "loader draws from the generator of dropout",
        "generator=torch.Generator(),",
        "generator=None,",
        "test_loop.py test_checkpoints.py test_folder.py",
    ),
    Break(
        "checkpoint of the best evaluation deleted",
        "kept |= {checkpoint_of(folder, best) for best in map(_best_step, kept) if best is not None}",
        "kept |= {checkpoint_of(folder, best) for best in map(_best_step, list(kept)[:0]) if best is not None}",
        "test_keep_best.py test_kept_checkpoints.py",
    ),
    Break(
        "file missing from a checkpoint not noticed",
        "for name in expected.keys() | found.keys()",
        "for name in expected.keys() & found.keys()",
        "test_checkpoints.py",
    ),
    Break(
        "true taken for a number in settings",
        "fits = isinstance(value, origin) and (origin is bool or not isinstance(value, bool))",
        "fits = isinstance(value, origin)",
        "test_settings.py",
    ),
    Break(
        "digest of the first rows alone",
        "places = [place * len(rows) // number for place in range(number)]",
        "places = list(range(number))",
        "test_fingerprint.py",
    ),
    Break(
        "optimizer's memory of weights that are not trained",
        "optimizer = 2 * gradients",
        "optimizer = 2 * weights",
        "test_planning.py",
    ),
    # Training: fine-tuning and generation
    Break(
        "span goes on through another type", '("I", "E") and name == kind', '("I", "E")', "test_finetune_metrics.py"
    ),
    Break(
        "tag on the last piece of a word",
        "places.setdefault(word, place)",
        "places[word] = place",
        "test_labels.py test_finetune_metrics.py test_finetune.py",
    ),
    Break(
        "part of an answer taken where a window cuts it",
        "if tokens and {window.spans[token] for token in tokens} == needed[window.row] else None",
        "if tokens else None",
        "test_question_answering.py",
    ),
    Break(
        "generated texts in the order of their lengths",
        "predictions = [text for _, text in sorted(zip(order, generated, strict=True))]",
        "predictions = list(generated)",
        "test_seq2seq.py",
    ),
    # Inspection
    Break("rows of a word's pieces added up", "queries, axis=2) / counts", "queries, axis=2)", "test_map_class.py"),
    Break(
        "labels of words by their place and not their number",
        '"wordLabels": {token.word: printable(token.word_text) for token in tokens},',
        '"wordLabels": {place: printable(token.word_text) for place, token in enumerate(tokens)},',
        "test_page.py",
    ),
    Break(
        "sufficiency of the inputs that are erased",
        "return (whole - erased_probability(prediction, ~masks)).mean(axis=-1)",
        "return (whole - erased_probability(prediction, masks)).mean(axis=-1)",
        "test_faithfulness_measures.py test_faithfulness.py",
    ),
    Break(
        "masked keys take part in the shuffle",
        "drawn = noise.masked_fill(~allowed, 2.0).argsort(dim=-1, stable=True)",
        "drawn = noise.masked_fill(~allowed, 0.5).argsort(dim=-1, stable=True)",
        "test_faithfulness_measures.py test_faithfulness.py",
    ),
    Break(
        "distance of equal weights ignores the causal mask",
        "seen = torch.ones_like(offset, dtype=torch.bool) if not _is_causal(network) else offset <= 0",
        "seen = torch.ones_like(offset, dtype=torch.bool)",
        "test_head_distances.py",
    ),
    Break(
        "variance within words without Bessel's correction", "sums) / (counts - 1)", "sums) / counts", "test_senses.py"
    ),
    Break(
        "largest score taken off by its sign", ") if scores.abs().max()", ") if scores.max()", "test_worked_example.py"
    ),
    # Sharing
    Break(
        "classes of other modules not saved together",
        "missing = sorted(classes.keys() - _published([name]).keys())",
        "missing = sorted(classes.keys() & _published([name]).keys() - {name})",
        "test_bundle.py",
    ),
    Break(
        "OPT's empty positions behind the others", "tensor, (0, 0, 2, 0))", "tensor, (0, 0, 0, 2))", "test_export.py"
    ),
    Break(
        "local folder told as a data set of the Hub",
        "return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()",
        "return _HUB_ID.fullmatch(name) is not None",
        "test_cards.py test_card_texts.py",
    ),
    Break(
        "private model pushed to a public repository",
        "if private and not api.repo_info(repo_id).private:",
        "if private and api.repo_info(repo_id).private is None:",
        "test_hub.py test_hub_refusals.py",
    ),
    Break(
        "shards of an earlier push left beside a single file",
        '_REPLACED = [WEIGHTS, INDEX, "model-*-of-*.safetensors", f"{_PACKAGE}_*.py"]',
        '_REPLACED = [WEIGHTS, INDEX, f"{_PACKAGE}_*.py"]',
        "test_hub.py",
    ),
    # The face
    Break("settings file goes before the options", "chosen |= flags", "chosen = flags | chosen", "test_app.py"),
    Break(
        "vectors left in the order of their lengths",
        "[torch.tensor(order, device=encoder.device).argsort()]",
        "[torch.tensor(order, device=encoder.device)]",
        "test_encoding.py",
    ),
)


def product_files() -> list[Path]:
    """The package's own files."""
    found = []
    for path in sorted(ROOT.rglob("*")):
        first, *_ = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") for part in path.relative_to(ROOT).parts)
        if path.suffix in (".py", ".html") and first not in OUTSIDE and not hidden and path.is_file():
            found.append(path)
    return found


def find_place(wrong: Break, contents: dict[Path, str]) -> Path:
    """The file that a break is made in.

    Raises:
        ValueError: if what it replaces is not there exactly once.
    """
    places = [path for path, text in contents.items() for _ in range(text.count(wrong.old))]
    if len(places) != 1:
        raise ValueError(f"{wrong.name!r}: {len(places)} places hold {wrong.old!r}, not 1")
    return places[0]


def find_tests(names: str) -> list[str]:
    """The paths of the test files of these names; several may have the same.

    Raises:
        ValueError: if there is none of a name.
    """
    paths = []
    for name in names.split():
        found = sorted((ROOT / "tests").rglob(name))
        if not found:
            raise ValueError(f"no test file is called {name}")
        paths += [str(path.relative_to(ROOT)) for path in found]
    return paths


@contextmanager
def broken(path: Path, wrong: Break) -> Iterator[None]:
    """Within it the working tree has the break; afterwards the file is as it was, its times included."""
    before, status = path.read_bytes(), path.stat()
    try:
        path.write_bytes(before.replace(wrong.old.encode(), wrong.new.encode()))
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def run_tests(paths: list[str]) -> str:
    """Runs test files: "caught" if one fails, "NOT caught" if none does, or else what went wrong."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
    # What is compiled of a broken file must not outlive it.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            [*command, *paths], cwd=ROOT, env=environment, timeout=LIMIT, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return f"error: more than {LIMIT} seconds"
    if ended.returncode == 1:
        failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        place, _, test = failed[0].partition(" - ")[0].partition("::") if failed else ("", "", "")
        return f"caught by {Path(place).name}::{test}" if failed else "caught"
    if ended.returncode == 0:
        return "NOT caught"
    last = (ended.stdout + ended.stderr).strip().splitlines()
    return f"error: pytest ended with {ended.returncode}: {last[-1] if last else ''}"


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main() -> int:
    """Makes the breaks; 1 if one was not caught, or could not be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of breaks, or parts of them")
    parser.add_argument("--out", type=Path, help="file to write the lines to as well")
    parser.add_argument("--unbroken", action="store_true", help="run each test file once, with nothing broken")
    given = parser.parse_args()
    chosen = [each for each in BREAKS if not given.only or any(part in each.name for part in given.only)]
    if not chosen:
        parser.error(f"no break is called {' or '.join(given.only)}")
    # So that what was broken is put back.
    signal.signal(signal.SIGTERM, _stop)
    contents = {path: path.read_text(encoding="utf-8") for path in product_files()}
    places = {each.name: find_place(each, contents) for each in chosen}
    tests = {each.name: find_tests(each.tests) for each in chosen}
    counts: Counter[str] = Counter()

    def tell(line: str) -> None:
        print(line, flush=True)
        if given.out is not None:
            with given.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    if given.unbroken:
        for path in dict.fromkeys(path for paths in tests.values() for path in paths):
            start = time.monotonic()
            found = run_tests([path])
            passed = found == "NOT caught"
            counts["passed" if passed else "failed"] += 1
            tell(f"{path:50} {time.monotonic() - start:5.0f} s  {'passes' if passed else found}")
    else:
        for each in chosen:
            start = time.monotonic()
            with broken(places[each.name], each):
                found = run_tests(tests[each.name])
            counts[found.partition(" by ")[0].partition(":")[0]] += 1
            tell(f"{each.name:60} {time.monotonic() - start:5.0f} s  {found}")
    tell("")
    for name, number in sorted(counts.items()):
        tell(f"{name:12} {number:4}")
    tell(f"{'of':12} {counts.total():4}")
    return int(bool(counts.keys() - {"caught", "passed"}))


if __name__ == "__main__":
    sys.exit(main())
