"""The house rules: who may import whom, where ctypes lives, what is loaded only when needed."""

import ast
import functools
import re
import subprocess
import sys
import warnings
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGES = ("apps", "edge", "partition", "transport", "quant", "devices")
MAY_IMPORT = {
    "apps": {"edge", "partition", "transport", "quant", "devices"},
    "edge": {"partition", "transport", "quant", "devices"},
    "partition": {"devices", "quant"},
    "transport": set(),
    "quant": set(),
    "devices": set(),
}
# The one error tree, so that `except edge.EdgeError` catches all that a person can act on. It imports nothing.
ERRORS = "edge.errors"


def section(page: Path, title: str) -> str:
    """The text between a heading of the second level and the next one."""
    return page.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


# The tables of rooms in the page of the architecture: a room imports only itself and rooms above it in its package.
ROOM_ROWS = re.findall(r"^\| `([\w/]+)` \| .* \|$", section(ROOT / "docs" / "architecture.md", "Rooms"), re.MULTILINE)
ORDER = {row.replace("/", "."): place for place, row in enumerate(ROOM_ROWS)}
MANY_FILES = 25  # in a folder
MANY_LINES = 500  # in a file
# What computes on arrays loads numpy; whoever imports it is about to run a model, or to plan how.
ON_ARRAYS = {"quant.gguf.imatrix", "quant.wire", "transport.collective", "partition.state.parts"} | {
    "partition.state.sequence",
    "partition.state.recurrent",
    *(f"partition.predict.{name}" for name in ("cost", "measures", "onnx_predict", "predict", "replicas", "tiers")),
}
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "edge").rglob("*.md"),
    *(ROOT / "tools").rglob("*.md"),
]
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """The modules that a file imports anywhere in it: at the top, inside of functions, and for types only."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names |= {f"{module}.{a.name}" if f"{module}.{a.name}" in MODULES else module for a in node.names}
    return frozenset(names)


def packages(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def room(module: str) -> str:
    """The room of a module: the longest row of the table that its name begins with."""
    return max((name for name in ORDER if f"{module}.".startswith(f"{name}.")), key=len)


def test_imports_follow_the_direction_of_the_design() -> None:
    wrong = {}
    for path in FILES:
        package = path.relative_to(ROOT).parts[0]
        used = {name.partition(".")[0] for name in imported(path) - {ERRORS}}
        if not_allowed := used & set(PACKAGES) - MAY_IMPORT[package] - {package}:
            wrong[str(path.relative_to(ROOT))] = not_allowed
    assert not wrong, f"files, and the packages that they import and may not: {wrong}"


def test_the_error_tree_imports_nothing() -> None:
    assert not imported(MODULES[ERRORS])


def test_a_room_imports_only_rooms_above_it() -> None:
    wrong = []
    for module in MODULES.keys() - set(PACKAGES):  # `edge` names what it offers, and loads it when it is asked for
        here = room(module)
        inside = {name for name in imported(MODULES[module]) if name.partition(".")[0] == module.partition(".")[0]}
        known = inside & MODULES.keys() - set(PACKAGES)
        if below := {room(name) for name in known if ORDER[room(name)] > ORDER[here]}:
            wrong.append(f"{module} is of {here}, which is above {sorted(below)}")
    assert not wrong, "\n".join(sorted(wrong))


def test_the_table_of_rooms_has_each_folder_and_nothing_else() -> None:
    assert len(ORDER) == len(ROOM_ROWS), "a room stands twice in the table of docs/architecture.md"
    folders = {str(path.parent.relative_to(ROOT)) for path in FILES}
    files_of_apps = {f"apps/{path.stem}" for path in (ROOT / "apps").glob("*.py")} - {"apps/__init__"}
    assert set(ROOM_ROWS) == {name for name in folders if name.count("/") <= 1} - {"apps"} | files_of_apps


def test_no_module_imports_itself_by_a_detour() -> None:
    sorter = TopologicalSorter({name: imported(path) & set(MODULES) - {name} for name, path in MODULES.items()})
    sorter.prepare()  # CycleError names the circle


def test_benchmarks_and_tools_change_no_import_path() -> None:
    files = [path for name in ("benchmarks", "tools") for path in (ROOT / name).rglob("*.py")]
    assert not [path.name for path in files if "sys.path" in path.read_text()]


def test_ctypes_lives_in_few_files() -> None:
    users = {str(path.relative_to(ROOT)) for path in FILES if "ctypes" in packages(path)}
    ggml = {"edge/llama/ggml.py", "edge/llama/batch.py", "edge/llama/buffers.py", "edge/llama/products.py"}
    llama = {"edge/llama/library.py", "edge/llama/llama.py", "edge/llama/quantizer.py", "edge/llama/sampling.py"}
    backends = {"edge/llama/backends.py", "edge/llama/thread_pool.py"}
    assert users == ggml | llama | backends | {"devices/processes/limits.py"}


def test_no_file_in_git_is_larger_than_16_mb() -> None:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    large = [name for name in names.split("\0") if (ROOT / name).is_file() and (ROOT / name).stat().st_size > 16e6]
    assert not large


@pytest.mark.filterwarnings("default::UserWarning")
def test_large_files_and_rooms_give_a_warning() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in FILES if not path.name.endswith("_pb2.py")}
    rooms = Counter(path.parent for path in FILES)
    large = [f"{path.relative_to(ROOT)}: {n} lines" for path, n in lines.items() if n > MANY_LINES]
    large += [f"{path.relative_to(ROOT)}: {n} files" for path, n in rooms.items() if n > MANY_FILES]
    if large:
        warnings.warn("consider dividing " + ", ".join(large), stacklevel=1)


@pytest.mark.parametrize("folder", [*PACKAGES, "tools", "tests", "benchmarks"])
def test_docstrings_begin_with_a_verb_or_a_noun_phrase(folder: str) -> None:
    """A reader of a sentence that begins with one of these words has to guess its noun."""
    riddle = re.compile(r'"""\s*(?:What|Of|Who|Whom|Whose|How|Whether)\b.*')
    texts = {path.relative_to(ROOT): riddle.findall(path.read_text()) for path in (ROOT / folder).rglob("*.py")}
    assert not {str(path): text for path, text in texts.items() if text}


# Words that say nothing of what a name holds: a plan, a worker, a request, blocks.
EMPTY = "found|one|held|given|taken|told|asked|wanted|made|kept|of|beside|guess"
BINDS = re.compile(
    rf"^ *(?:\w+, )*(?:self\.)?(?:{EMPTY})(?:, \w+)*(?:: .+)? [|+]?= "
    rf"|\bfor (?:\w+, )*(?:{EMPTY})(?:, \w+)* in |\bdef (?:{EMPTY})\("
    rf"|[(,*] ?(?:{EMPTY}): |\blambda (?:\w+, )*(?:{EMPTY})\b|\bas (?:{EMPTY})\b|\b(?:{EMPTY}) := |^ *(?:{EMPTY}): ",
    re.MULTILINE,
)


def names_given(path: Path) -> set[str]:
    """Return the names of variables, parameters, attributes, functions and imports that a file makes."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add(node.asname or "")
    return names


@pytest.mark.parametrize("folder", [*PACKAGES, "tools", "tests", "benchmarks"])
def test_names_say_what_they_hold(folder: str) -> None:
    files = [
        path for path in (ROOT / folder).rglob("*.py") if BINDS.search(path.read_text())
    ]  # prose has some of it, too
    empty = {str(path.relative_to(ROOT)): names_given(path) & {*EMPTY.split("|")} for path in files}
    assert not {path: names for path, names in empty.items() if names}


def test_no_pickle_eval_or_shell() -> None:
    for path in FILES:
        assert not packages(path) & {"pickle", "marshal", "shelve"}, path
        text = path.read_text()
        if not any(word in text for word in ("eval", "exec", "shell")):
            continue  # parsing takes a second, of all files
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                assert not (isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec")), path
                assert not any(k.arg == "shell" for k in node.keywords), path


@pytest.mark.parametrize("package", ["quant", "partition", "transport", "devices"])
def test_the_lower_packages_load_nothing_heavy(package: str) -> None:
    modules = [name for name in MODULES if name.partition(".")[0] == package and name not in ON_ARRAYS]
    modules = [name for name in modules if not name.startswith("partition.search")]
    heavy = {"numpy", "llama_cpp", "rich", "torch", "gguf"}
    code = f"import sys, {', '.join(modules)}; print(sorted(sys.modules.keys() & {heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def anchors(page: Path) -> set[str]:
    """The anchors of a page: of its headings, as GitHub makes them, and those written by hand."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r'<a id="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        if "://" not in target:
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"


def test_pages_named_in_code_are_there() -> None:
    named = re.compile(r"(?<![\w/])docs/[\w/-]+\.md")
    files = [*FILES, *(ROOT / "docs").glob("*.toml"), ROOT / "Makefile"]
    pages = {(path.name, page) for path in files for page in named.findall(path.read_text())}
    assert not {(name, page) for name, page in pages if not (ROOT / page).exists()}


def test_files_named_in_pages_are_there() -> None:
    named = re.compile(
        rf"(?<![\w./])(?:{'|'.join([*PACKAGES, 'tests', 'tools', 'benchmarks'])})/[a-z\d_/-]+\.(?:py|toml)\b"
    )
    files = {(page.name, file) for page in PAGES for file in named.findall(page.read_text())}
    assert not {(name, file) for name, file in files if not (ROOT / file).exists()}
