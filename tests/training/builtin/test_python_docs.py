import sys
import types

import pytest

from regard.training.builtin.python_docs import MIN_DOCUMENT_CHARACTERS, clean, iter_python_docs, python_files

LONG = "This sentence is long enough for a document of its own, and it says so at length."


@pytest.fixture(scope="module")
def standard_library():
    return list(iter_python_docs())


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a package that must not be imported, makes it findable, and takes the standard library out of the way."""
    monkeypatch.setattr(sys, "stdlib_module_names", frozenset())

    def write(files: dict[str, str], name: str = "regard_fake_package") -> str:
        for file, source in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        return name

    return write


def documents_of(name: str) -> list[tuple[str, str]]:
    return [(text, source) for text, source in iter_python_docs([name]) if source.startswith(name)]


def test_standard_library_is_a_corpus_of_real_size(standard_library):
    assert len(standard_library) > 1200
    assert sum(len(text) for text, _ in standard_library) > 1_500_000
    sources = [source for _, source in standard_library]
    assert len(set(sources)) == len(sources)
    assert {"pydoc_data.topics:assert", "json", "argparse.ArgumentParser"} <= set(sources)


def test_standard_library_has_no_tests_examples_or_repeats(standard_library):
    assert not [source for _, source in standard_library if {"test", "tests", "idle_test"} & set(source.split("."))]
    assert not [source for _, source in standard_library if source.startswith("encodings.")]
    assert not [source for text, source in standard_library if "\n>>> " in text]
    assert all(text == text.strip() != "" for text, _ in standard_library)
    assert len({text for text, _ in standard_library}) == len(standard_library)


def test_nothing_is_imported(package):
    name = package({"__init__.py": f'"""{LONG}"""\nraise SystemExit("imported")'})
    assert documents_of(name) == [(LONG, name)]
    assert name not in sys.modules


def test_nothing_of_the_standard_library_is_imported(standard_library):
    # It opens a browser when it is imported.
    assert "antigravity" in dict(python_files())
    assert "antigravity" not in sys.modules


def test_documents_are_classes_and_the_rest_of_a_module(package):
    source = f'''"""Module. {LONG}"""

def function():
    """Function. {LONG}"""
    class Local:
        """Local. {LONG}"""

if True:
    class Public:
        """Public. {LONG}"""
        async def _method(self):
            """Method."""
            def inner(): "Inner."
        class Nested:
            """Nested."""
'''
    name = package({"sub/module.py": source, "sub/__init__.py": f'"""Package. {LONG}"""', "__init__.py": ""})
    assert documents_of(name) == [
        (f"Package. {LONG}", f"{name}.sub"),
        (f"Module. {LONG}\n\nFunction. {LONG}", f"{name}.sub.module"),
        (f"Local. {LONG}", f"{name}.sub.module.Local"),
        (f"Public. {LONG}\n\nMethod.\n\nInner.\n\nNested.", f"{name}.sub.module.Public"),
    ]


def test_what_is_not_documentation_is_left_out(package):
    name = package(
        {
            "__init__.py": "",
            "tests/__init__.py": f'"""In tests. {LONG}"""',
            "sub/test/case.py": f'"""In a test. {LONG}"""',
            "template.py": "class {{ name }}:\n",
            "null.py": "\0",
            "short.py": '"""' + "x" * (MIN_DOCUMENT_CHARACTERS - 1) + '"""',
            "repeat.py": f'"""{LONG}"""',
            "original.py": f'"""{LONG}"""',
            "escape.py": f'"""Escape \\d. {LONG}"""',
        }
    )
    assert documents_of(name) == [(f"Escape \\d. {LONG}", f"{name}.escape"), (LONG, f"{name}.original")]


def test_shortest_document(package):
    name = package({"__init__.py": "", "short.py": '"""' + "x" * MIN_DOCUMENT_CHARACTERS + '"""'})
    assert documents_of(name) == [("x" * MIN_DOCUMENT_CHARACTERS, f"{name}.short")]


def test_a_package_may_be_one_module(tmp_path, monkeypatch):
    (tmp_path / "regard_fake_module.py").write_text(f'"""{LONG}"""')
    monkeypatch.syspath_prepend(tmp_path)
    assert dict(python_files(["regard_fake_module"]))["regard_fake_module"] == tmp_path / "regard_fake_module.py"


@pytest.mark.parametrize("name", ["no_such_package_at_all", "torch.nn", "scikit-learn", "module_without_spec", ""])
def test_unknown_package(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "module_without_spec", types.ModuleType("module_without_spec"))
    with pytest.raises(ValueError, match=r"is not an installed package; name top-level packages as") as error:
        next(iter(python_files([name])))
    assert f"`python-docs:{name}`" in str(error.value)
    assert "\n" not in str(error.value)


def test_package_without_source(package):
    name = package({"data.txt": "no Python"})
    with pytest.raises(ValueError, match=f"^`python-docs:{name}`: the package .* without Python source files$"):
        python_files([name])


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Before.\n\n    >>> f(1)\n    2\n    >>> f(2)\n\nAfter.", "Before.\n\nAfter."),
        ("An example: 1 >>> 2 is shown.", "An example: 1 >>> 2 is shown."),
        ("Title\n=====\n\nText.", "Title\n\nText."),
        ("See :class:`~collections.deque` and :func:`len`.", "See collections.deque and len."),
        ("See :ref:`the manual <manual>`.", "See the manual."),
        ("``None`` or `x`, but not ` y `.", "None or x, but not ` y `."),
        (".. note:: Read this.", "Read this."),
        (":param name: The name.", "name: The name."),
        ("Sum.\n\n.. math::\n    x = \\sum_i y\n\n    z\n\nText.", "Sum.\n\nText."),
        ("At 10:30 it's a:b:c.", "At 10:30 it's a:b:c."),
    ],
)
def test_clean(docstring, expected):
    assert clean(docstring) == expected
