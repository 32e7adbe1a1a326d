"""axe-core, which checks pages for people who use a keyboard or a screen reader. Fetched once from npm's registry."""

import base64
import hashlib
import io
import tarfile
import urllib.request
from typing import Any

from tests.support import ROOT
from tests.support.browser import Page

VERSION = "4.14.1"
SHA512 = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="  # in npm's form
PACKAGE = ROOT / ".venv-clients" / f"axe-core-{VERSION}.tgz"
FETCH_S = 60.0


def violations(page: Page) -> list[str]:
    """Return the serious and critical violations on the visible page, one line for each rule."""
    if not page.value("typeof axe === 'object'"):
        page.value(f"{_source()}; 0")
    results: list[dict[str, Any]] = page.value(
        "axe.run(document, {resultTypes: ['violations']}).then(({violations}) => violations)"
    )
    return [
        f"{result['id']} ({result['impact']}): {[node['html'][:200] for node in result['nodes']]}"
        for result in results
        if result["impact"] in ("serious", "critical")
    ]


def _source() -> str:
    if not PACKAGE.is_file():
        url = f"https://registry.npmjs.org/axe-core/-/axe-core-{VERSION}.tgz"
        with urllib.request.urlopen(url, timeout=FETCH_S) as response:
            package = response.read()
        PACKAGE.parent.mkdir(exist_ok=True)
        PACKAGE.write_bytes(package)
    package = PACKAGE.read_bytes()
    digest = base64.b64encode(hashlib.sha512(package).digest()).decode()
    assert digest == SHA512, f"{PACKAGE} has the SHA-512 {digest}; remove it"
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()
