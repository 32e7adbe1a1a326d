"""Test addresses of models on the hub: the forms that people copy, and names that point outside the cache."""

from pathlib import PurePosixPath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edge.errors import HubError
from edge.models import addresses
from edge.models.addresses import Address, checked_digest, is_address, parse

# Pieces of which names that lead somewhere else are made, and harmless ones.
_PIECES = st.sampled_from(
    ["..", ".", "/", "//", "\\", ":", "%2e%2e", "%2F", "%5c", "\0", "\n", "~", "$HOME", "C:", "a", "b-c", "x.gguf",
     "--", "hf.co/", "https://huggingface.co/", "hf://", "@", "resolve/", "blob/main/", "?", "#", "\udc80", "é", "*",
     "-", ".git", "latest", " "]
)  # fmt: skip
_TEXTS = st.lists(_PIECES, max_size=12).map("".join)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("a/b", Address("a/b")),
        ("a/b:q4_k_m", Address("a/b", "q4_k_m")),
        ("a/b:Q4/m-00001-of-00002.gguf", Address("a/b", "Q4/m-00001-of-00002.gguf")),
        ("a/b:latest", Address("a/b")),
        ("hf.co/a/b:Q4_K_M", Address("a/b", "Q4_K_M")),
        ("HF.co/a/b", Address("a/b")),
        ("https://huggingface.co/a/b/", Address("a/b")),
        ("https://huggingface.co/a/b/tree/main", Address("a/b")),
        ("https://huggingface.co/a/b/tree/main/Q4", Address("a/b", "Q4/*")),
        ("https://huggingface.co/a/b/blob/main/Q4/m.gguf", Address("a/b", "Q4/m.gguf")),
        ("https://huggingface.co/a/b/resolve/v2/m%20n.gguf?download=true#x", Address("a/b", "m n.gguf", "v2")),
        ("https://huggingface.co/a/b/blob/refs%2Fpr%2F1/m.gguf", Address("a/b", "m.gguf", "refs/pr/1")),
        ("https://huggingface.co/models/a/b/blob/main/m.gguf", Address("a/b", "m.gguf")),
        ("hf.co/models/a/b", Address("a/b")),
        ("hf.co/a/models:m.gguf", Address("a/models", "m.gguf")),
        ("hf://a/b@v1/m.gguf", Address("a/b", "m.gguf", "v1")),
        (" a/b:m.gguf ", Address("a/b", "m.gguf")),
    ],
)
def test_each_form_of_an_address_names_its_model(text: str, address: Address) -> None:
    assert is_address(text)
    assert parse(text) == address


@pytest.mark.parametrize("text", ["", "model", "a/b/c:x.gguf", ":x.gguf", "a b/c", "a/b.git", "-a/b", "a/b.", "a--b/c"])
def test_a_text_that_is_no_address_is_none(text: str) -> None:
    assert not is_address(text)
    with pytest.raises(HubError, match="OWNER/NAME:FILE"):
        parse(text)


@pytest.mark.parametrize("text", ["m.gguf", "folder/m.gguf", "folder/m.GGUF", "../a/b", "/a/b", "./a/b:x"])
def test_a_path_is_no_address(text: str) -> None:
    assert not is_address(text)


@pytest.mark.parametrize("text", ["https://example.org/a/b", "https://huggingface.co", "hf.co/a", "hf://a/b@../x"])
def test_a_wrong_address_of_a_site_is_explained(text: str) -> None:
    assert is_address(text)
    with pytest.raises(HubError):
        parse(text)


def test_the_mirror_of_the_environment_is_the_hub_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hf-mirror.example")
    assert parse("https://hf-mirror.example/a/b/blob/main/m.gguf") == Address("a/b", "m.gguf")


@given(_TEXTS)
@example("a/b:../../../etc/passwd")
@example("https://huggingface.co/a/b/resolve/main/%2e%2e/%2e%2e/x.gguf")
@example("https://huggingface.co/a/b/resolve/..%2f..%2fx/m.gguf")
@example("a/..:m.gguf")
def test_no_address_leads_out_of_its_folder(text: str) -> None:
    try:
        address = parse(text)
    except HubError:
        return
    owner, name = address.repo.split("/")
    revision = address.revision.split("/")
    for part in (owner, name, *revision, *PurePosixPath(address.file).parts):
        assert part not in ("", ".", "..", "/")
        assert not set(part) & set("\\\0\n:")
    assert not PurePosixPath(address.file).is_absolute()
    assert "--" not in address.repo
    assert parse(f"{address.repo}:{address.file}" if address.file else address.repo).file == address.file


@given(_TEXTS)
def test_no_digest_leads_out_of_its_folder(text: str) -> None:
    try:
        assert checked_digest(text) == text
    except HubError:
        return
    assert "/" not in text
    assert text not in ("", ".", "..")


def test_names_have_the_length_that_file_systems_take() -> None:
    for length, is_there in ((255, True), (256, False)):
        assert addresses.is_inside("a" * length) is is_there
    assert addresses.is_inside("é" * 127)
    assert not addresses.is_inside("é" * 128)
