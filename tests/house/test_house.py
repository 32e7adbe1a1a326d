"""The house rules: who may import whom, where ctypes lives, what is loaded only when needed."""

import ast
import re
import subprocess
import sys
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
# What computes on arrays loads numpy; whoever imports it is about to run a model, or to plan how.
PLANNING = (
    "changes cost explain measures onnx_planner onnx_predict planner predict search search_best search_bounds"
    " search_labels search_tables stage_group"
)
ON_ARRAYS = {"quant.gguf.imatrix", "quant.wire", "transport.collective"} | {
    f"partition.{name}" for name in PLANNING.split()
}
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "edge" / "demo" / "README.md"]
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """The top-level names of everything a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_direction_of_the_design(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    assert imported(path) & set(PACKAGES) <= MAY_IMPORT[package] | {package}


def test_ctypes_lives_in_six_files() -> None:
    users = {str(path.relative_to(ROOT)) for path in FILES if "ctypes" in imported(path)}
    ggml = {"edge/llama/ggml.py", "edge/llama/buffers.py", "edge/llama/products.py"}
    assert users == ggml | {"edge/llama/llama.py", "edge/llama/quantizer.py", "edge/llama/sampling.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_is_longer_than_400_lines(path: Path) -> None:
    if path.name.endswith("_pb2.py"):
        return  # generated
    assert len(path.read_text().splitlines()) <= 400


def test_no_pickle_eval_or_shell() -> None:
    for path in FILES:
        tree = ast.parse(path.read_text())
        assert not imported(path) & {"pickle", "marshal", "shelve"}, path
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                assert not (isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec")), path
                assert not any(k.arg == "shell" for k in node.keywords), path


@pytest.mark.parametrize("package", ["quant", "partition", "transport", "devices"])
def test_the_lower_packages_load_nothing_heavy(package: str) -> None:
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES if path.parts[-2] == package]
    modules = [name for name in modules if name not in ON_ARRAYS]
    heavy = {"numpy", "llama_cpp", "rich", "torch", "gguf"}
    code = f"import sys, {', '.join(modules)}; print(sorted(sys.modules.keys() & {heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
