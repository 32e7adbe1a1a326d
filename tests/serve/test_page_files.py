"""Test the page of `edge serve` without a browser."""

import hashlib
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from edge.pictures.page import AXES
from tests.support import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = ROOT / "edge" / "serve" / "page"
VENDOR = FOLDER / "vendor"
FILES = sorted([*(file for file in FOLDER.iterdir() if file != VENDOR), AXES])
SCRIPTS = sorted(file for file in FILES if file.suffix == ".js")
STANDARD = {"http://www.w3.org/2000/svg"}  # the name of SVG's elements, never loaded

FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|\beval\b|new Function"
    r"|setAttribute\(\"(?:style|on)"
)


class Read(HTMLParser):
    """The elements of a page, and the text inside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.code: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        if self.lasttag in ("script", "style") and data.strip():
            self.code.append(data)


INDEX = Read((FOLDER / "index.html").read_text())
IDS = [attributes["id"] for _, attributes in INDEX.elements if "id" in attributes]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_comes_from_another_host(file: Path) -> None:
    text = file.read_text(encoding="ascii")
    assert set(re.findall(r"""https?://[^\s"'`<>\\]+""", re.sub(r"/(?:\\.|[^/\n])+/[a-z]*", "", text))) <= STANDARD
    assert not re.search(r"""@import|url\(|["']//""", text)


def test_the_page_has_no_code_of_its_own_that_a_strict_policy_would_refuse() -> None:
    assert INDEX.code == []
    for tag, attributes in INDEX.elements:
        assert tag != "style"
        assert not [name for name in attributes if name == "style" or name.startswith("on")], tag
        if tag == "script":
            assert attributes["src"]


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_scripts_never_make_elements_or_code_of_text(file: Path) -> None:
    assert FORBIDDEN.findall(file.read_text()) == []


def test_every_library_is_listed_with_its_version_licence_and_checksum() -> None:
    libraries = tomllib.loads((VENDOR / "vendor.toml").read_text())
    listed = {name: digest for library in libraries.values() for name, digest in library["files"].items()}
    files = {file.name: file.read_bytes() for file in VENDOR.iterdir() if file.name != "vendor.toml"}
    assert {name: hashlib.sha256(content).hexdigest() for name, content in files.items()} == listed
    for library in libraries.values():
        assert library["license"]
        assert any(library["version"] in files[name][:300].decode() for name in library["files"])


def test_every_file_that_the_page_names_is_there_and_every_file_is_named() -> None:
    named = {"index.html"}
    for _, attributes in INDEX.elements:
        address = attributes.get("src", attributes.get("href", ""))
        if address and not address.startswith("#"):
            assert not urlsplit(address).scheme
            named.add(address)
    for script in SCRIPTS:
        named |= set(re.findall(r"""(?:from|import) "\./([\w./]+)";""", script.read_text()))
    libraries = {f"vendor/{file.name}" for file in VENDOR.glob("*.js")}
    assert named == {file.name for file in FILES} | libraries


def test_every_element_that_a_script_asks_for_is_there_once() -> None:
    assert len(IDS) == len(set(IDS))
    requests = {name for script in SCRIPTS for name in re.findall(r"""\$\("([\w-]+)"\)""", script.read_text())}
    built = set(re.findall(r"""id: "([\w-]+)\"""", "".join(script.read_text() for script in SCRIPTS)))
    assert requests
    assert requests <= set(IDS) | built


def test_what_a_person_fills_in_has_a_name() -> None:
    labelled = {attributes["for"] for tag, attributes in INDEX.elements if tag == "label"}
    for tag, attributes in INDEX.elements:
        if tag in ("input", "select", "textarea") and "hidden" not in attributes:
            assert attributes.get("aria-label") or attributes.get("id") in labelled, attributes
