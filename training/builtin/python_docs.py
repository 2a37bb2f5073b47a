"""The documentation in every installation of Python, as a corpus of English text.

Nothing is downloaded, and nothing is imported except `pydoc_data.topics`, a module with one dictionary: docstrings are
read from the source files with `ast`.
"""

import ast
import importlib.util
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

# Shorter documents are one line of an exception or a stub; once packed, they would be more padding than text.
MIN_DOCUMENT_CHARACTERS = 64

_SKIPPED_FOLDERS = {"test", "tests", "idle_test"}
_SKIPPED_MODULES = {"encodings"}  # the same sentence for every code page

_MARKUP: tuple[tuple[re.Pattern[str], str], ...] = (
    # An example extends from its prompt to the next blank line. It is removed, as it is code and numbers, not English.
    (re.compile(r"^[ \t]*>>>.*(?:\n.*\S.*)*", re.MULTILINE), ""),
    (re.compile(r"^[ \t]*\.\. (?:code|code-block|math|testcode)::.*(?:\n(?:[ \t]+.*|[ \t]*$))*", re.MULTILINE), ""),
    # rules under headings and around tables
    (re.compile(r"^[ \t]*[-=~^*#+]{3}[-=~^*#+ ]*$", re.MULTILINE), ""),
    # `.. note::` and `:param name:`
    (re.compile(r"^[ \t]*(?:\.\. [A-Za-z-]+::|:(?:param|type|raises)(?= ))[ \t]*", re.MULTILINE), ""),
    # :class:`~collections.deque`, ``literal``, `reference`_
    (re.compile(r"(?<!\w):[A-Za-z][\w:+.-]*:`[~!]?([^`<]*)(?: <[^`]*>)?`"), r"\1"),
    (re.compile(r"``([^`]+)``|`([^`\s][^`]*)`_{0,2}"), r"\1\2"),
)


def python_files(packages: Iterable[str] = ()) -> list[tuple[str, Path]]:
    """Returns the source files of the standard library and of installed packages, without tests.

    Args:
        packages: Top-level import names, such as `torch`. They are looked up, not imported.

    Returns:
        (module name, path) of every module, in a fixed order.

    Raises:
        ValueError: A package is not installed, or has no Python source.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files: dict[str, Path] = {}
    for name in sorted(sys.stdlib_module_names - _SKIPPED_MODULES):
        files.update(_module_files(name, [library / name, library / f"{name}.py"]))
    for name in packages:
        found = dict(_module_files(name, _locations(name)))
        if not found:
            raise ValueError(f"`python-docs:{name}`: the package {name!r} is installed without Python source files")
        files.update(found)
    return list(files.items())


def iter_python_docs(packages: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
    """Yields the documents of the Python documentation.

    A document is a topic of the language reference, a class (its docstring and those inside it) or a module (its
    docstring and those of its functions). A text that occurred before is left out.

    Args:
        packages: Top-level import names of installed packages to read besides the standard library.

    Yields:
        (text, source), in a fixed order; the source is the name of the topic, class or module.

    Raises:
        ValueError: A package is not installed, or has no Python source.
    """
    seen: set[str] = set()
    for source, texts in _sections(packages):
        fresh = [text for text in dict.fromkeys(map(clean, texts)) if text not in seen]
        seen.update(fresh)
        document = "\n\n".join(filter(None, fresh))
        if len(document) >= MIN_DOCUMENT_CHARACTERS:
            yield document, source


def _sections(packages: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    for topic, text in sorted(topics.items()):
        yield f"pydoc_data.topics:{topic}", [text]
    for module, path in python_files(packages):
        yield from _docstrings(module, path).items()


def clean(docstring: str) -> str:
    """Returns the prose of reStructuredText, without doctests, code blocks, rules, directives and inline markup."""
    for pattern, replacement in _MARKUP:
        docstring = pattern.sub(replacement, docstring)
    return re.sub(r"\n\s*\n", "\n\n", docstring).strip()


def _docstrings(module: str, path: Path) -> dict[str, list[str]]:
    """Returns the docstrings of a module: those of each outermost class, and the rest under the module's own name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for example of invalid escape sequences in the source
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # in templates, and in files for other versions of Python
            return {}
    documents: dict[str, list[str]] = {}
    stack: list[tuple[ast.AST, str]] = [(tree, module)]
    while stack:
        node, owner = stack.pop()
        if isinstance(node, ast.ClassDef) and owner == module:
            owner = f"{module}.{node.name}"
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                documents.setdefault(owner, []).append(docstring)
        children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
        stack.extend((child, owner) for child in reversed(children))
    return documents


def _locations(package: str) -> list[Path]:
    try:
        # find_spec imports the parents of a dotted name
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
    except ValueError:  # __main__ and the like have no spec
        spec = None
    if spec is None:
        raise ValueError(
            f"`python-docs:{package}`: {package!r} is not an installed package; name top-level packages as they are "
            "imported, such as `python-docs:torch,transformers`"
        )
    return [Path(place) for place in spec.submodule_search_locations or [spec.origin or package]]


def _module_files(name: str, locations: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    for location in locations:
        if location.suffix == ".py" and location.is_file():
            yield name, location
        for folder, subfolders, files in os.walk(location):
            subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
            inner = Path(folder).relative_to(location).parts
            for file in sorted(files):
                if file.endswith(".py"):
                    module = ".".join((name, *inner, file.removesuffix(".py")))
                    yield module.removesuffix(".__init__"), Path(folder, file)
