"""Test the project's dependencies: each has version bounds, and a known licence that permits our use.

`make audit` asks whether vulnerabilities are known; that needs the network.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, metadata

import pytest
from packaging.requirements import Requirement

from tests.support import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
USED = [Requirement(text) for text in PROJECT["dependencies"]]
USED += [Requirement(text) for extra in ("quantize", "onnx", "serve") for text in EXTRAS[extra]]
TOOLS = [Requirement(text) for extra in ("train", "dev", "mutation") for text in EXTRAS[extra]]
ALL = [item for item in (*USED, *TOOLS) if item.name != PROJECT["name"]]

# A new major version of these breaks nothing that is used here, or is no more than the next year.
UNBOUNDED = {"cryptography", "packaging"}

# By what a package's own metadata say. LGPL: zeroconf is used as it comes, and can be replaced. MPL: hypothesis is a
# tool of the tests, and no part of the program.
LICENCES = {
    "Apache": "anthropic cryptography grpcio grpcio-health-checking grpcio-reflection grpcio-tools huggingface-hub onnx"
    " onnx-ir openai packaging prometheus-client sentencepiece tokenizers",
    "BSD": "httpx jinja2 numpy prompt-toolkit protobuf psutil scipy segno sse-starlette starlette torch uvicorn",
    "ISC": "pexpect",
    "LGPL": "zeroconf",
    "MIT": "cosmic-ray gguf llama-cpp-python llguidance mypy ollama onnxruntime pillow pydantic pytest pytest-xdist"
    " rich ruff schemathesis setuptools tomli",
    "MPL": "hypothesis",
    "Python Software Foundation": "matplotlib",
}
LICENCE = {name: licence for licence, names in LICENCES.items() for name in names.split()}


@pytest.mark.parametrize("requirement", ALL, ids=str)
def test_it_has_bounds(requirement: Requirement) -> None:
    operators = {bound.operator for bound in requirement.specifier}
    assert operators & {">=", "=="}, (
        f"{requirement} needs a lower bound: the oldest version that it is known to work with"
    )
    if requirement in USED and requirement.name not in UNBOUNDED:
        assert operators & {"<", "=="}, (
            f"{requirement} needs an upper bound: the next version that may break what is used"
        )
    assert requirement.url is None, f"{requirement} comes from an address, which no index vouches for"


def test_each_is_named_once_with_a_licence() -> None:
    names = [item.name for item in ALL]
    assert sorted(names) == sorted(set(names))
    assert set(names) == set(LICENCE), "write down the licence of what is new, and delete what is gone"


def licence_words(name: str) -> str | None:
    """Return an installed package's own words on its licence; None where it is not installed, as those for training."""
    try:
        said = metadata(name)
    except PackageNotFoundError:
        return None
    classifiers = [line for line in said.get_all("Classifier", []) if line.startswith("License ::")]
    short = (said.get("License") or "")[:100]  # type: ignore[attr-defined]
    return " ".join((said.get("License-Expression") or "", short, *classifiers))  # type: ignore[attr-defined]


def test_licences_are_those_that_are_written_down() -> None:
    results = {name: words for name in LICENCE if (words := licence_words(name)) is not None}
    others = {name: words for name, words in results.items() if not re.search(rf"\b{LICENCE[name]}", words)}
    assert not others
    assert len(results) > len(USED)


def test_no_other_index_is_asked() -> None:
    """An index that has a package of the same name with a higher version would give us that one."""
    for path in (ROOT / "Makefile", ROOT / ".ci" / "run", ROOT / "pyproject.toml"):
        assert "index-url" not in path.read_text(), path
