"""The page in a real browser: it joins, stores, computes and says so."""

from collections.abc import Iterator

import numpy as np
import pytest

from edge.models.demo import MODEL_PATH
from tests.browser.test_page import PROMPT, SIZES, decode, deviation, natively
from tests.support.browser import Page, browser
from tests.support.page_bridge import PageBridge

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("chromium")) as page:
        page.look(390, 780)
        yield page


@pytest.fixture(params=["isolated", "not isolated"])
def bridge(request: pytest.FixtureRequest) -> Iterator[PageBridge]:
    bridge = PageBridge(isolated=request.param == "isolated")
    yield bridge
    bridge.close()


def visit(page: Page, url: str) -> None:
    """Open the page, which removes the token from its address."""
    page.call("Page.navigate", url="about:blank")
    page.call("Page.navigate", url=url)
    page.wait_for(f"location.href.startsWith({url.split('#')[0]!r}) && document.readyState === 'complete'")


def state(page: Page, text: str) -> None:
    page.wait_for(f"document.getElementById('state').textContent.includes({text!r})")


def clear_storage(page: Page, bridge: PageBridge) -> None:
    page.call("Storage.clearDataForOrigin", origin=bridge.url, storageTypes="all")


def test_page_joins_computes_and_leaves(chromium: Page, bridge: PageBridge) -> None:
    chromium.complaints.clear()
    visit(chromium, f"{bridge.url}/#token")
    hello = bridge.event("hello")
    assert hello["isolated"] is bridge.isolated
    state(chromium, "Ready, waiting for work" if bridge.isolated else "Ready with one thread")
    assert chromium.value("location.hash") == ""
    name, missing = bridge.send_file(MODEL_PATH)
    assert missing
    bridge.facts, _ = bridge.call("load", file=name, **SIZES)
    bridge.send({"op": "show", "model": "demo", "layers": "0 to 3 of 8"})
    native = natively(MODEL_PATH, PROMPT)
    assert deviation(decode(bridge, PROMPT), native) < 0.05
    state(chromium, "Computing")
    assert "tokens/s" in chromium.value("document.getElementById('speed').textContent")
    assert chromium.value("document.getElementById('layers').textContent") == "0 to 3 of 8"
    assert "MB" in chromium.value("document.getElementById('memory').textContent")
    assert chromium.value("document.documentElement.scrollWidth") <= 390

    chromium.value("document.getElementById('pause').click()")
    bridge.event("paused")
    state(chromium, "Paused")
    chromium.value("document.getElementById('pause').click()")
    bridge.event("resumed")

    # The page is closed and opened again, without a token: its key and its slices are kept.
    visit(chromium, bridge.url + "/")
    bridge.event("closed")
    assert bridge.event("hello")["loaded"] == ""
    assert bridge.send_file(MODEL_PATH)[1] == []
    bridge.call("load", file=name, **SIZES)
    assert len(decode(bridge, PROMPT)) == len(PROMPT)

    chromium.value("document.getElementById('leave').click()")
    bridge.event("leave")
    state(chromium, "This device has left")
    chromium.wait_for(
        "navigator.storage.getDirectory().then((root) => root.getDirectoryHandle('slices'))"
        ".then(() => false, () => true)"
    )
    assert chromium.value("localStorage.length") == 0
    assert not [text for text in chromium.complaints if "favicon" not in text]


def test_full_and_cleared_storage_lose_no_slice(chromium: Page) -> None:
    bridge = PageBridge()
    try:
        visit(chromium, f"{bridge.url}/#token")
        bridge.event("hello")
        chromium.call("Storage.overrideQuotaForOrigin", origin=bridge.url, quotaSize=3 << 20)
        name, missing = bridge.send_file(MODEL_PATH)
        bridge.event("full")
        state(chromium, "The storage for this page is full")
        bridge.call("load", file=name, **SIZES)
        expected = decode(bridge, PROMPT)
        assert deviation(expected, natively(MODEL_PATH, PROMPT)) < 0.05
        bridge.call("unload")
        assert 0 < len(bridge.send_file(MODEL_PATH)[1]) < len(missing)
        chromium.call("Storage.overrideQuotaForOrigin", origin=bridge.url)
        bridge.send_file(MODEL_PATH)
        clear_storage(chromium, bridge)
        bridge.call("load", file=name, **SIZES)
        clear_storage(chromium, bridge)
        assert np.array_equal(decode(bridge, PROMPT), expected)
        clear_storage(chromium, bridge)
        bridge.call("unload")
        assert bridge.send_file(MODEL_PATH)[1] == missing
        clear_storage(chromium, bridge)  # while the page has a file open
        assert bridge.send_file(MODEL_PATH)[1] == missing
        bridge.call("load", file=name, **SIZES)
        assert np.array_equal(decode(bridge, PROMPT), expected)
    finally:
        bridge.close()


def test_second_tab_takes_over_until_the_first_takes_it_back(chromium: Page) -> None:
    bridge = PageBridge()
    try:
        visit(chromium, f"{bridge.url}/#token")
        bridge.event("hello")
        chromium.open_tab(f"{bridge.url}/#token")
        bridge.event("hello")
        state(chromium, "Another tab or window of this browser has taken over")
        chromium.value("document.getElementById('here').click()")
        bridge.event("hello")
        state(chromium, "Ready, waiting for work")
        assert len(bridge.keys) == 1
    finally:
        bridge.close()


def test_page_that_is_left_says_so_and_connects_again_when_it_comes_back(chromium: Page, bridge: PageBridge) -> None:
    visit(chromium, f"{bridge.url}/#token")
    bridge.event("hello")
    state(chromium, "Ready")
    for _ in range(2):
        chromium.call("Page.navigate", url="about:blank")
        bridge.event("closed")
        chromium.value("setTimeout(() => history.back())")
        bridge.event("hello")
        chromium.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")
        state(chromium, "Ready")


def test_page_without_a_link_or_with_a_used_one_says_so(chromium: Page) -> None:
    bridge = PageBridge()
    try:
        visit(chromium, bridge.url + "/")
        state(chromium, "Open the link that the owner")
        bridge.tokens.clear()
        visit(chromium, bridge.url + "/#token")
        state(chromium, "this link was used already; ask for a new one")
    finally:
        bridge.close()


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("Object.defineProperty(window, 'isSecureContext', {value: false})", "an address that begins with https"),
        ("WebAssembly.validate = () => false", "This browser has no WebAssembly with SIMD"),
        ("delete StorageManager.prototype.getDirectory", "This browser cannot store parts of a model"),
    ],
)
def test_browser_without_what_is_needed_says_so(chromium: Page, script: str, sentence: str) -> None:
    bridge = PageBridge()
    added = chromium.call("Page.addScriptToEvaluateOnNewDocument", source=script)["identifier"]
    try:
        visit(chromium, bridge.url + "/#token")
        state(chromium, sentence)
        assert bridge.tokens == {"token"}
    finally:
        chromium.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added)
        bridge.close()
