"""The rules that hold for the repository as a whole: who imports whom, what is installed, what stays out."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FACE = "regard"

# Each folder and what it may import of ours. `regard` alone is also the name of the package.
MAY_IMPORT = {
    "families": set(),
    "configuration": {"families"},
    "tokenization": set(),
    "model_cards": set(),
    "modeling": {"configuration"},
    "training": {"families", "configuration", "modeling", "tokenization"},
    "inspection": {"families", "configuration", "modeling", "tokenization"},
    "sharing": {"families", "configuration", "modeling", "tokenization", "model_cards"},
    FACE: {
        "families",
        "configuration",
        "tokenization",
        "model_cards",
        "modeling",
        "training",
        "inspection",
        "sharing",
    },
}
# The wings of a folder, from the top floor down: each may import those below it. Names in one tuple stand side by side
# and may not import each other; "." stands for the modules of the folder itself.
FLOORS: dict[str, list[tuple[str, ...]]] = {
    "modeling": [("loading",), (".",), ("cpu",)],
    "training": [
        *[("finetuning",), ("planning",), ("families",), ("examples",), ("reading",)],
        *[("loop",), ("generation",), ("builtin",), ("run",)],
    ],
    "inspection": [("faithfulness", "steps", "senses"), ("maps",)],
    FACE: [("__main__",), ("commands",), (".",)],
}
# Modules in one room; a reader should take them in at a glance.
ROOM = 16
# Not part of the package.
OTHER_FOLDERS = {"benchmarks", "build", "docs", "tests"}


def house_folders(root: Path) -> list[Path]:
    return [root / name for name in MAY_IMPORT if (root / name).is_dir()]


def house_modules(root: Path) -> list[Path]:
    return sorted(path for folder in house_folders(root) for path in folder.rglob("*.py"))


def imported_names(node: ast.AST, package: list[str]) -> list[str] | None:
    """The absolute names that a statement imports; None where it climbs out of the package."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        if node.level > len(package):
            return None
        base = package[: len(package) - node.level + 1] if node.level else []
        # `from .. import modeling` names a folder only in its last part.
        return [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
        return [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return []


def broken_rules(root: Path) -> list[str]:
    """One line for each import in the house at `root` that its folder may not make."""
    broken = []
    for path in house_modules(root):
        relative = path.relative_to(root)
        folder = relative.parts[0]
        package = list(relative.parts[:-1]) if folder == FACE else [FACE, *relative.parts[:-1]]
        # All statements, wherever they stand: in a function or under TYPE_CHECKING too.
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = imported_names(node, package)
            if names is None:
                broken.append(f"{relative}:{node.lineno}: the import climbs out of the package")
                continue
            inside = isinstance(node, ast.ImportFrom) and node.level > 0
            for name in names:
                top, _, rest = name.partition(".")
                if top in MAY_IMPORT and top != FACE and not inside:
                    broken.append(f"{relative}:{node.lineno}: `{name}` exists in a checkout only")
                elif top == FACE and not inside and folder != FACE:
                    broken.append(f"{relative}:{node.lineno}: `{name}` must be imported relatively")
                elif top == "" and folder != FACE:
                    broken.append(f"{relative}:{node.lineno}: `{name}` must be an import statement")
                elif top == FACE:
                    target = rest.partition(".")[0]
                    target = target if target in MAY_IMPORT else FACE
                    if target not in MAY_IMPORT[folder] | {folder}:
                        broken.append(f"{relative}:{node.lineno}: {folder} may not import {target}")
    return broken


def module_name(path: Path) -> str:
    """The dotted name of a module of the house, from its path in the checkout."""
    parts = path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if path.parts[0] == FACE else (FACE, *parts))


def arrows(root: Path) -> dict[str, dict[str, str]]:
    """What each module of the house at `root` imports of it: the modules, each with the place that does."""
    paths = {module_name(path.relative_to(root)): path for path in house_modules(root)}
    found: dict[str, dict[str, str]] = {name: {} for name in paths}
    for name, path in paths.items():
        package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom):
                continue
            for target in imported_names(node, package) or []:
                module = target if target in paths else target.rpartition(".")[0]
                if module in paths and module != name:
                    found[name].setdefault(module, f"{path.relative_to(root)}:{node.lineno}")
    return found


def wing_of(name: str) -> tuple[str, str]:
    """The folder and the wing that a module belongs to."""
    parts = name.split(".")[1:]
    if not parts or parts[0] not in MAY_IMPORT:
        parts = [FACE, *parts]
    folder, rest = parts[0], parts[1:]
    wings = {wing for floor in FLOORS.get(folder, []) for wing in floor}
    return folder, rest[0] if rest and rest[0] in wings else "."


def broken_floors(root: Path) -> list[str]:
    """One line for each import of a wing that does not lie below the module that imports it."""
    broken = []
    for name, targets in arrows(root).items():
        folder, wing = wing_of(name)
        floors = {other: number for number, floor in enumerate(FLOORS.get(folder, [])) for other in floor}
        for target, place in targets.items():
            other_folder, other = wing_of(target)
            if folder in FLOORS and other_folder == folder and other != wing and floors[other] <= floors[wing]:
                broken.append(f"{place}: {folder}/{wing} may not import {folder}/{other}")
    return broken


def circles(root: Path) -> list[list[str]]:
    """Groups of modules that import each other, each once."""
    graph = arrows(root)

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            for target in graph[waiting.pop()]:
                if target not in found:
                    found.add(target)
                    waiting.append(target)
        return found

    reach = {name: reached(name) for name in graph}
    groups = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph}
    return sorted(sorted(group) for group in groups if group)


def test_every_import_keeps_to_the_table():
    assert house_modules(ROOT)
    assert broken_rules(ROOT) == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("modeling/a.py", "from ..configuration.bert import X", None),
        ("modeling/a.py", "from . import attention\nfrom .attention import X", None),
        ("modeling/a.py", "import torch, regardless\nfrom transformers import training_args", None),
        ("modeling/deep/a.py", "from ...configuration import X\nfrom .. import attention", None),
        ("sharing/a.py", "from .. import model_cards", None),
        ("regard/a.py", "import regard.modeling\nfrom .training import data\nfrom . import b", None),
        ("modeling/a.py", "from ..training.data import X", "modeling may not import training"),
        ("modeling/a.py", "from .. import training", "modeling may not import training"),
        ("modeling/a.py", "def f():\n    from ..training import X", "modeling may not import training"),
        ("modeling/a.py", "if TYPE_CHECKING:\n    from ..sharing import X", "modeling may not import sharing"),
        ("modeling/deep/a.py", "from ...tokenization import X", "modeling may not import tokenization"),
        ("configuration/a.py", "from ..modeling import X", "configuration may not import modeling"),
        ("tokenization/a.py", "from ..configuration import X", "tokenization may not import configuration"),
        ("model_cards/a.py", "from ..configuration import X", "model_cards may not import configuration"),
        ("training/a.py", "from ..sharing import X", "training may not import sharing"),
        ("inspection/a.py", "from ..training import X", "inspection may not import training"),
        ("sharing/a.py", "from ..training import X", "sharing may not import training"),
        ("training/a.py", "from .. import __version__", "training may not import regard"),
        ("training/a.py", "from ..cli import main", "training may not import regard"),
        ("training/a.py", "import regard", "`regard` must be imported relatively"),
        ("training/a.py", "from regard.modeling import X", "must be imported relatively"),
        ("training/a.py", "import_module('regard.modeling')", "must be imported relatively"),
        ("training/a.py", "importlib.import_module('..modeling', __package__)", "must be an import statement"),
        ("training/a.py", "from modeling.bert import X", "exists in a checkout only"),
        ("regard/a.py", "import modeling", "exists in a checkout only"),
        ("training/a.py", "from ... import X", "climbs out of the package"),
    ],
)
def test_the_reader_of_imports(tmp_path, path, source, complaint):
    module = tmp_path / path
    module.parent.mkdir(parents=True)
    module.write_text(source)
    broken = broken_rules(tmp_path)
    if complaint is None:
        assert broken == []
    else:
        assert len(broken) == 1
        assert complaint in broken[0]
        assert broken[0].startswith(f"{path}:{len(source.splitlines())}: ")


def test_every_package_folder_is_in_the_table():
    found = {init.parent.name for init in ROOT.glob("*/__init__.py")}
    assert found - OTHER_FOLDERS <= MAY_IMPORT.keys()


def test_wings_import_only_what_lies_below_them():
    assert broken_floors(ROOT) == []


def test_no_modules_import_each_other():
    assert circles(ROOT) == []


def test_every_wing_has_a_floor():
    found = {
        (init.parts[-3], init.parts[-2]) for folder in MAY_IMPORT for init in ROOT.glob(f"{folder}/*/__init__.py")
    }
    wings = {(folder, wing) for folder, floors in FLOORS.items() for floor in floors for wing in floor}
    assert {wing for wing in wings if wing[1] not in (".", "__main__")} == found


def test_no_room_is_too_full_to_take_in_at_a_glance():
    rooms = {path.parent for path in house_modules(ROOT)}
    sizes = {room.relative_to(ROOT): len([p for p in room.glob("*.py") if p.stem != "__init__"]) for room in rooms}
    assert {room: size for room, size in sizes.items() if size > ROOM} == {}


@pytest.mark.parametrize(
    ("files", "floors", "circle"),
    [
        ({"training/loop/a.py": "from ..run.b import X", "training/run/b.py": ""}, [], []),
        ({"training/loop/a.py": "from .b import X", "training/loop/b.py": ""}, [], []),
        ({"modeling/a.py": "from .cpu import X", "modeling/cpu/__init__.py": ""}, [], []),
        ({"regard/commands/a.py": "from ..b import X", "regard/b.py": ""}, [], []),
        (
            {"training/run/a.py": "def f():\n    from ..loop.b import X", "training/loop/b.py": ""},
            ["training/run/a.py:2: training/run may not import training/loop"],
            [],
        ),
        (
            {"training/run/a.py": "from ..loop import b", "training/loop/__init__.py": "", "training/loop/b.py": ""},
            ["training/run/a.py:1: training/run may not import training/loop"],
            [],
        ),
        (
            {"inspection/steps/a.py": "from ..senses.b import X", "inspection/senses/b.py": ""},
            ["inspection/steps/a.py:1: inspection/steps may not import inspection/senses"],
            [],
        ),
        (
            {"modeling/cpu/a.py": "from ..b import X", "modeling/b.py": ""},
            ["modeling/cpu/a.py:1: modeling/cpu may not import modeling/."],
            [],
        ),
        (
            {"regard/a.py": "from .commands.b import X", "regard/commands/b.py": ""},
            ["regard/a.py:1: regard/. may not import regard/commands"],
            [],
        ),
        (
            {"modeling/a.py": "from .b import X", "modeling/b.py": "if TYPE_CHECKING:\n    from .a import Y"},
            [],
            [["regard.modeling.a", "regard.modeling.b"]],
        ),
        (
            {
                "sharing/a.py": "from .b import X",
                "sharing/b.py": "from .c import X",
                "sharing/c.py": "from . import a",
                "sharing/d.py": "from .a import X",
                "sharing/__init__.py": "",
            },
            [],
            [["regard.sharing.a", "regard.sharing.b", "regard.sharing.c"]],
        ),
    ],
)
def test_the_finders_of_broken_floors_and_circles(tmp_path, files, floors, circle):
    for name, source in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert broken_floors(tmp_path) == floors
    assert circles(tmp_path) == circle


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of what the package is made of, which a build may litter."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in house_folders(ROOT):
        shutil.copytree(folder, copy / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def installed(checkout, tmp_path_factory) -> Path:
    """The folder of a normal, not editable, installation of the copy."""
    target = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(checkout)], check=True)
    return target


FIND = "from importlib.util import find_spec; print(find_spec('regard').origin)"
# Takes several seconds, for torch is imported with it.
IMPORT = "import regard, regard.modeling.attention as a; print(regard.__file__); print(a.__file__)"


def origins(arguments: list[str], cwd: Path, path: Path | None = None) -> list[Path]:
    """Where a fresh Python finds the package, and one of its submodules if it is imported."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, *arguments]
    output = subprocess.run(command, cwd=cwd, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return [Path(line) for line in output.stdout.splitlines()]


def test_a_plain_checkout_imports_from_its_own_root(checkout):
    # The copy, so that an editable installation of this checkout cannot answer in its place.
    expected = [checkout / "regard/__init__.py", checkout / "modeling/attention.py"]
    assert origins(["-c", IMPORT], cwd=checkout) == expected


def test_the_installed_package_imports_from_elsewhere(installed, tmp_path):
    expected = [installed / "regard/__init__.py", installed / "regard/modeling/attention.py"]
    assert origins(["-c", IMPORT], cwd=tmp_path, path=installed) == expected


def test_the_installed_package_imports_from_the_checkout_root(checkout, installed, tmp_path):
    # A script, like the `regard` command, does not look into the current folder ...
    script = tmp_path / "probe.py"
    script.write_text(FIND)
    assert origins([str(script)], cwd=checkout, path=installed) == [installed / "regard/__init__.py"]
    # ... `python -c` and `python -m` look there first, and then all of the package is the checkout's.
    assert origins(["-c", FIND], cwd=checkout, path=installed) == [checkout / "regard/__init__.py"]


def test_all_of_it_is_installed(checkout, installed):
    def contents(root: Path) -> set[str]:
        paths = (path for path in root.rglob("*") if path.suffix in (".html", ".md", ".py", ".typed"))
        return {path.relative_to(root).as_posix() for path in paths}

    expected = set()
    for folder in house_folders(checkout):
        prefix = "" if folder.name == FACE else f"{folder.name}/"
        expected |= {prefix + name for name in contents(folder)}
    assert contents(installed / FACE) == expected


def test_the_command_is_installed(installed, tmp_path):
    command = [sys.executable, str(installed / "bin" / "regard"), "--help"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL)


def test_no_module_is_too_long_to_read_at_one_sitting():
    lengths = {path.relative_to(ROOT): path.read_text(encoding="utf-8").count("\n") for path in house_modules(ROOT)}
    assert {path: length for path, length in lengths.items() if length > 500} == {}


MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:root|work)/")


def test_no_file_names_a_folder_of_one_machine():
    assert MACHINE_PATH.search("see " + "/".join(["", "work", "main"]))
    assert not MACHINE_PATH.search("/".join(["https://example.org", "work", "main"]))
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    # New files as well as committed ones: better found before the commit than after.
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\0")
    paths = [ROOT / name for name in names if name and (ROOT / name).is_file()]
    assert Path(__file__) in paths
    guilty = [str(path.relative_to(ROOT)) for path in paths if MACHINE_PATH.search(path.read_text(errors="ignore"))]
    assert guilty == []


# What runs code that was read: of files, of the Hub, or of a text.
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "subprocess", "pty", "code"}
FORBIDDEN_CALLS = re.compile(
    r"(builtins\.)?(eval|exec|compile|__import__)|os\.(system|popen|exec\w+|spawn\w+|posix_spawn\w*)"
    r"|yaml\.(load|load_all|full_load|full_load_all|unsafe_load|unsafe_load_all)"
)
# What is loaded by `from_pretrained` and has no weights.
WITHOUT_WEIGHTS = {"AutoConfig", "AutoTokenizer", "AutoProcessor", "processor_loader", "auto_class"}


def unsafe_lines(root: Path) -> list[str]:
    """One line for each place in the house at `root` where a file could run code."""
    found = []
    for path in house_modules(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            complaints = []
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                inside = isinstance(node, ast.ImportFrom) and node.level > 0
                # To tell an error of that name apart is no use of the module.
                errors_alone = all(alias.name.endswith("Error") for alias in node.names)
                complaints += [
                    name
                    for name in modules
                    if not inside and not errors_alone and name.split(".")[0] in FORBIDDEN_MODULES
                ]
            elif isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if FORBIDDEN_CALLS.fullmatch(name):
                    complaints.append(name)
                if name == "torch.load" and given.get("weights_only") != "True":
                    complaints.append("torch.load of what is no weights")
                complaints += [name for name in ("shell", "trust_remote_code") if given.get(name, "False") != "False"]
                receiver, _, method = name.rpartition(".")
                if method == "from_pretrained" and receiver not in WITHOUT_WEIGHTS:
                    complaints += [] if given.get("use_safetensors") == "True" else ["weights that are no safetensors"]
            found += [f"{path.relative_to(root)}:{node.lineno}: {complaint}" for complaint in complaints]
    return found


def test_nothing_that_is_read_runs_code():
    assert unsafe_lines(ROOT) == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("model.eval()\nre.compile('a')\nyaml.safe_load(text)", None),
        ("from .code import x\nload(path, shell=False)", None),
        ("torch.load(path, weights_only=True)", None),
        ("Model.from_pretrained(path, use_safetensors=True)\nAutoConfig.from_pretrained(path)", None),
        ("eval(text)", "eval"),
        ("def f():\n    import pickle", "pickle"),
        ("from subprocess import run", "subprocess"),
        ("os.system(text)", "os.system"),
        ("yaml.load(text, yaml.SafeLoader)", "yaml.load"),
        ("torch.load(path)", "torch.load of what is no weights"),
        ("run(text, shell=True)", "shell"),
        ("AutoConfig.from_pretrained(path, trust_remote_code=trusted)", "trust_remote_code"),
        ("AutoModel.from_pretrained(path)", "weights that are no safetensors"),
    ],
)
def test_the_finder_of_what_runs_code(tmp_path, source, complaint):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "a.py").write_text(source)
    assert unsafe_lines(tmp_path) == (
        [] if complaint is None else [f"training/a.py:{len(source.splitlines())}: {complaint}"]
    )
