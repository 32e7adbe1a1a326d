"""A real browser for tests: headless Chromium, controlled by its DevTools protocol."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0  # for anything the browser or the page is to do: many times what it takes
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# The protocol goes over descriptors 3 and 4.
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
HIGH = 10  # descriptors from here on are not in the way of 3 and 4


class Page:
    """One page. `complaints` has what the browser's console was told as an error, and errors that no script caught."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._ids = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> int:
        """Send a command without waiting for its answer. Return its number."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        return number

    def call(self, method: str, **params: Any) -> Any:
        """Return the browser's answer to a command. AssertionError where it refuses or takes longer than PATIENCE_S."""
        number = self.send(method, **params)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            reported = self._read(deadline, method)
            self._note(reported)
            if reported.get("id") == number:
                assert "error" not in reported, f"{method}: {reported['error']}"
                return reported["result"]

    def _read(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer {method} in {PATIENCE_S:.0f} s"
            data = os.read(self._from, 1 << 20)
            assert data, f"the browser ended at {method}"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        reported: dict[str, Any] = json.loads(message)
        return reported

    def _note(self, reported: dict[str, Any]) -> None:
        params = reported.get("params", {})
        if reported.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif reported.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"]))
        elif reported.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        """Go there, and wait until all of it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def open_tab(self, url: str) -> None:
        """Open another tab of the same browser, which nothing controls."""
        session, self._session = self._session, None
        self.call("Target.createTarget", url=url, background=True)
        self._session = session

    def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript in the page; of a promise, what it brings."""
        reported = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reported, f"{expression[:300]}: {str(reported['exceptionDetails'])[:2000]}"
        return reported["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Return the value of the expression as soon as it is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not (result := self.value(expression)):
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {expression}"
            time.sleep(0.02)
        return result

    def type(self, text: str) -> None:
        """Put a text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, text: str = "", modifiers: int = 0) -> None:
        """Press a key and let it go; `text` is what it writes, modifiers 8 is Shift."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, 0), "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def look(self, width: int, height: int, *, dark: bool = False, zoom: float = 1) -> None:
        """The size of the window in CSS pixels, and whether the person wants dark pages."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=zoom, mobile=width < 600
        )
        wish = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[wish])

    def picture(self, path: Path) -> None:
        """Write what is seen, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a Chromium that keeps its profile in a folder. AssertionError where there is no Chromium."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program, f"no browser: expected one of {', '.join(NAMES)}, as `apt install chromium` gives"
    command = (program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    options = (f"--user-data-dir={folder}", "--disable-background-networking", "--remote-debugging-pipe", "about:blank")
    ends = [fd for _ in range(2) for fd in os.pipe()]
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH) for fd in ends]
    for fd in ends:
        os.close(fd)
    its_in, to_browser, from_browser, its_out = high
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(its_in), str(its_out), *command, *options],
        pass_fds=(its_in, its_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(its_in)
    os.close(its_out)
    try:
        page = Page(to_browser, from_browser)
        yield page
        page._session = None
        with suppress(AssertionError):  # a busy browser ends before it answers
            page.call("Browser.close")
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
