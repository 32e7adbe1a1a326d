"""Test access to the server: host names, pages of other origins, keys, and the size of requests."""

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from devices.errors import TrustError
from edge.serve.app import create_app
from edge.serve.http import bodies, own_names
from edge.serve.http.own_names import OwnNames
from edge.serve.http.security import usual_path
from edge.serve.options import ServeOptions, check
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving

KEY, OTHER_KEY = "sk-first", "sk-second"
OPTIONS = ServeOptions(
    api_keys=(KEY, OTHER_KEY),
    allow_hosts=("edge.example",),
    allow_origins=("https://app.example",),
    max_body_bytes=100_000,
)
ASK = {"messages": [{"role": "user", "content": "Hi"}]}
MODELS, CHAT, MESSAGES = "/v1/models", "/v1/chat/completions", "/v1/messages"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(create_app(ScriptedModels(), OPTIONS)) as address:
        yield address


MACHINE = socket.gethostname().partition(".")[0]


OF_MACHINE = (socket.gethostname(), MACHINE.upper(), f"{MACHINE}.local", f"{MACHINE}.LOCAL.:8080")
OF_LOOPBACK = ("localhost:1", "LOCALHOST", "localhost.", "edge.localhost", "a.b.localhost:8080")
OF_CONTAINERS = ("host.docker.internal", "gateway.docker.internal:8080", "Host.Containers.Internal.")
NEARLY = (
    "evillocalhost",
    "other.local",
    f"{MACHINE}.local.evil.example",
    "evil.docker.internal",
    "edge.example..",
    ".",
)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]:8080", "10.1.2.3", "edge.example", *OF_MACHINE, *OF_LOOPBACK, *OF_CONTAINERS]
)
def test_names_of_this_server(url: str, host: str) -> None:
    assert httpx.get(url + MODELS, headers={**BEARER, "Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "[", "", *NEARLY],
)
def test_a_name_that_is_not_its_own_is_refused_also_for_the_page(url: str, host: str) -> None:
    for path in (MODELS, "/health"):
        refused = httpx.get(url + path, headers={**BEARER, "Host": host})
        assert refused.status_code in (400, 403)


def test_browser_under_a_foreign_name_gets_a_page_with_the_option(url: str) -> None:
    browser = {"Accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}
    refused = httpx.get(url, headers={**browser, "Host": "box.example:8080"})
    assert (refused.status_code, refused.headers["content-type"]) == (403, "text/html; charset=utf-8")
    assert "edge serve ... --allow-host box.example<" in refused.text
    assert refused.headers["x-content-type-options"] == "nosniff"
    for odd in ("<script>alert(1)</script>", "a;reboot", "$(reboot)", "-x", "a`b"):
        refused = httpx.get(url, headers={**browser, "Host": odd})
        assert refused.status_code == 403
        assert "<script" not in refused.text
        assert "--allow-host NAME<" in refused.text
    linked = httpx.get(url + MODELS, headers={**BEARER, **browser, "Origin": "https://evil.example"})
    assert "--allow-origin https://evil.example<" in linked.text
    assert httpx.get(url, headers={"Host": "box.example"}).json()["error"]["type"] == "permission_error"


PRIVATE = ("edge", "edge-server:8080", "my_edge", "edge.default.svc", "edge.default.svc.cluster.local:80", "pi.lan",
           "other.local", "ai.corp.internal", "nas.home.arpa")  # fmt: skip


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.1"])
def test_server_that_others_reach_has_names_of_private_networks_alone(host: str) -> None:
    names = OwnNames(ServeOptions(host=host, api_keys=(KEY,)))
    assert {name for name in PRIVATE if name in names} == (set() if host == "127.0.0.1" else set(PRIVATE))
    for public in ("evil.example", "local.evil.example", "internal.com", "lan.", "edge.svc.example", "", "."):
        assert public not in names or public == "lan.", public


@pytest.mark.parametrize(("version", "status"), [("1.0", 200), ("1.1", 400)])
def test_probe_without_a_host_is_answered_in_http_1_0_alone(url: str, version: str, status: int) -> None:
    head = f"GET /health HTTP/{version}\r\nConnection: close\r\n"
    assert raw(url, f"{head}\r\n").startswith(f"HTTP/1.1 {status} ")
    for origin in ("null", "", "https://evil.example"):
        assert raw(url, f"{head}Origin: {origin}\r\n\r\n").split()[1] in ("400", "403")


def raw(url: str, request: str) -> str:
    at = urlsplit(url)
    with socket.create_connection((at.hostname, at.port), 30) as connection:
        connection.sendall(request.encode())
        return connection.makefile("rb").read().decode()


APPS = ("app://obsidian.md", "tauri://localhost", "http://tauri.localhost", "capacitor://localhost", "file://",
        "vscode-webview://1a2b3c")  # fmt: skip


@pytest.mark.parametrize("origin", APPS)
def test_programs_with_a_browser_inside_are_answered(url: str, origin: str) -> None:
    request = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-stainless-os",
    }
    preflight = httpx.options(url + CHAT, headers={"Origin": origin, **request})
    assert (preflight.status_code, preflight.headers["access-control-allow-headers"]) == (
        204,
        "authorization,x-stainless-os",
    )
    assert preflight.headers["access-control-allow-origin"] == origin
    answered = httpx.post(url + CHAT, json=ASK, headers={**BEARER, "Origin": origin})
    assert (answered.status_code, answered.headers["access-control-allow-origin"]) == (200, origin)
    assert httpx.post(url + CHAT, json=ASK, headers={"Origin": origin}).status_code == 401  # a key is needed still


@pytest.mark.parametrize("path", ["/healthz", "/livez", "/readyz", "/ping", "/v1/health"])
def test_probes_need_no_key(url: str, path: str) -> None:
    assert httpx.get(url + path).json()["status"] == "ok"


SAME_PATHS = {
    "/v1/chat/completions": (
        "/api/v1/chat/completions", "/api/v0/chat/completions", "/openai/v1/chat/completions",
        "/engines/v1/chat/completions", "/engines/llama.cpp/v1/chat/completions",
        "/openai/deployments/gpt/chat/completions", "/api/chat/completions",
        "/v1/chat/completions/chat/completions", "/v1/chat/completions/v1/chat/completions", "/v1/v1/chat/completions/",
        "http://localhost/v1/chat/completions", "https://edge.example:8080//v1/chat/completions",
    ),
    "/v1/models": ("/api/v1/models", "/api/v0/models", "/api/models", "/v1/chat/completions/models", "//v1/models/"),
    "/v1/models/a/b": ("/api/v0/models/a/b", "/api/v1/models/a/b"),
    "/v1/embeddings": ("/api/v0/embeddings", "/openai/deployments/e/embeddings"),
    "/v1/messages/count_tokens": ("/v1/messages/v1/messages/count_tokens", "/api/v1/messages/count_tokens"),
    "/api/chat": ("/v1/api/chat", "/v1/v1/api/chat", "//api/chat//", "http://localhost/api/chat"),
    "/": ("/", "//", "http://localhost", "http://localhost/"),
}  # fmt: skip
UNCHANGED = ("/v1", "/api", "/api/embeddings", "/api/v1x/models", "/v1/models/v1/x", "/v1/models/api/v1/models",
             "/v1/messages", "/v1/messages/count_tokens", "/engines", "/openai/deployments/x/models",
             "/http:/x/v1/models")  # fmt: skip


def test_what_people_leave_in_an_address_does_not_matter() -> None:
    for usual, others in SAME_PATHS.items():
        assert {other: usual_path(other) for other in (usual, *others)} == dict.fromkeys((usual, *others), usual)
    assert {path: usual_path(path) for path in UNCHANGED} == {path: path for path in UNCHANGED}


@pytest.mark.parametrize("target", ["/api/v1/models", "/openai/v1/models", "http://localhost/v1/models"])
def test_other_addresses_of_an_endpoint_need_the_key(url: str, target: str) -> None:
    head = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    assert raw(url, f"{head}\r\n").startswith("HTTP/1.1 401 ")
    assert raw(url, f"{head}Authorization: Bearer {KEY}\r\n\r\n").startswith("HTTP/1.1 200 ")
    assert raw(url, f"{head}Host: evil.example\r\n\r\n").split()[1] in ("400", "403")


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("api-key", KEY, 200),
        ("authorization", KEY, 200),
        ("authorization", f"bearer  {KEY}", 200),
        ("authorization", "Bearer", 401),
        ("authorization", f"Basic {KEY}", 401),
        ("api-key", "sk-wrong", 401),
    ],
)
def test_key_in_the_headers_of_other_clients(url: str, name: str, value: str, status: int) -> None:
    assert httpx.get(url + MODELS, headers={name: value}).status_code == status


@pytest.mark.parametrize("prefix", ["/", "//", "/v1", "/v1/v1", "//v1//"])
@pytest.mark.parametrize("end", ["", "/", "//"])
def test_odd_slashes_reach_every_endpoint_without_a_redirect(url: str, prefix: str, end: str) -> None:
    for path in ("/v1/chat/completions", "/api/chat"):
        answered = httpx.post(f"{url}{prefix}{path}{end}", json={**ASK, "stream": False}, headers=BEARER)
        assert (answered.status_code, answered.json()["model"]) == (200, "scripted")
    for path in (MODELS, "/api/tags", "/v1/models/scripted"):
        answered = httpx.get(f"{url}{prefix}{path}{end}", headers=BEARER)
        assert answered.status_code == 200
    assert httpx.get(f"{url}//health{end}").json()["status"] == "ok"


def test_odd_slashes_do_not_get_past_the_key(url: str) -> None:
    at = urlsplit(url)
    paths = [
        *(f"{a}{MODELS}{b}" for a in ("", "/", "/v1", "/health/..", "/index.html/..", "/%2f") for b in ("", "/", "//"))
    ]
    for path in [
        *paths,
        "/health%2f..%2fv1/models",
        "/v1/models%3f/health",
        "/v1/models/health",
        "//v1/models;/health",
    ]:
        with socket.create_connection((at.hostname, at.port), 30) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            assert sock.recv(100).startswith(b"HTTP/1.1 401 "), path


def test_pages_of_other_origins_may_not_ask(url: str) -> None:
    own = {"Origin": url}
    assert httpx.post(url + CHAT, json=ASK, headers={**BEARER, **own}).status_code == 200
    for origin in ("https://evil.example", "null", "http://localhost:1", "http://[", url.replace("http:", "http:x")):
        refused = httpx.post(url + CHAT, json=ASK, headers={**BEARER, "Origin": origin})
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_a_browser_asks_for_another_page_without_an_origin_is_refused(url: str, site: str) -> None:
    picture = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    for path in (MODELS, "/health", "/"):
        refused = httpx.get(url + path, headers={**BEARER, **picture})
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    link = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert httpx.get(url + "/", headers=link).status_code == 200  # somebody follows a link to the page
    assert httpx.get(url + MODELS, headers={**BEARER, **link}).status_code == 403
    assert httpx.post(url + "/health", headers={**BEARER, **link}).status_code == 403
    allowed = {**BEARER, "Origin": "https://app.example", "Sec-Fetch-Site": site}
    assert httpx.get(url + MODELS, headers=allowed).status_code == 200
    for own in ("same-origin", "none"):
        assert httpx.get(url + MODELS, headers={**BEARER, "Sec-Fetch-Site": own}).status_code == 200


def test_a_page_that_is_allowed_may_ask(url: str) -> None:
    origin = {"Origin": "https://app.example"}
    answered = httpx.post(url + CHAT, json=ASK, headers={**BEARER, **origin})
    assert answered.status_code == 200
    assert answered.headers["access-control-allow-origin"] == "https://app.example"
    assert "Origin" in answered.headers["vary"]
    request = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = httpx.options(url + CHAT, headers={**origin, **request})
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    refused = httpx.options(url + CHAT, headers={"Origin": "https://evil.example", **request})
    assert refused.status_code == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (BEARER, 200),
        ({"Authorization": f"bearer {OTHER_KEY}"}, 200),
        ({"x-api-key": OTHER_KEY}, 200),
        ({}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"Authorization": f"Bearer {KEY}x"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": KEY[:-1]}, 401),
    ],
)
def test_keys(url: str, headers: dict[str, str], status: int) -> None:
    assert httpx.get(url + MODELS, headers=headers).status_code == status
    answered = httpx.post(url + MESSAGES, json={**ASK, "max_tokens": 1}, headers=headers)
    assert answered.status_code == status
    if status == 401:
        assert answered.json() == {
            "type": "error",
            "error": {"type": "authentication_error", "message": answered.json()["error"]["message"]},
        }


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", MODELS),
        ("POST", CHAT),
        ("POST", MESSAGES),
        ("POST", "/api/chat"),
        ("DELETE", "/v1/prefixes/a"),
        ("GET", "/none"),
    ],
)
def test_refusal_for_want_of_a_key_says_how_a_key_is_sent(url: str, method: str, path: str) -> None:
    for headers in ({}, {"x-api-key": "sk-wrong"}, {"Accept": "text/html"}):
        refused = httpx.request(method, url + path, headers=headers)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"


def test_names_of_this_machine_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(
        "127.0.0.1 localhost\n10.0.0.5 Box.Lab.Example box # box.comment.example\n10.0.0.6 other.lab.example\n\n"
    )
    resolv = tmp_path / "resolv.conf"
    resolv.write_text(
        "# search comment.example\nnameserver 1.1.1.1\ndomain one.example\nsearch two.example three.example .\n\n"
    )
    files = {"/etc/hosts": hosts, "/etc/resolv.conf": resolv}
    monkeypatch.setattr(own_names, "Path", lambda name: files[name])
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    names = OwnNames(ServeOptions())
    for host in ("box", "box.lab.example", "box.one.example", "BOX.two.example:8080", "box.three.example."):
        assert host in names, host
    for host in ("box.comment.example", "other.lab.example", "box.four.example", "one.example", "box.1.1.1.1"):
        assert host not in names, host
    resolv.write_bytes(b"search \xff\n")  # neither of the files is needed
    hosts.unlink()
    assert "box.local" in OwnNames(ServeOptions())


def test_health_needs_no_key_and_everything_is_served_with_strict_headers(url: str) -> None:
    response = httpx.get(url + "/health")
    assert response.json() == {"status": "ok", "models": [{"state": "waiting"}]}
    assert httpx.get(url + "/v1/health").json() == response.json()
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    for path in ("/slots", "/metrics", "/props", "/v1/cluster", "/openapi.json", "/nothing"):
        assert httpx.get(url + path).status_code == 401, path


@pytest.mark.parametrize("path", ["/", "/index.html", "/main.js", "/page.css", "/vendor/marked.esm.js"])
def test_the_page_needs_no_key(url: str, path: str) -> None:
    response = httpx.get(url + path, headers={"Accept": "text/html"})
    assert response.status_code == 200
    kinds = {".js": "text/javascript", ".css": "text/css"}
    assert response.headers["content-type"].startswith(kinds.get(path[path.rfind(".") :], "text/html"))
    assert response.headers["x-content-type-options"] == "nosniff"
    assert httpx.get(f"{url}/page/{path}").status_code == 401
    assert httpx.get(f"{url}/..%2f..%2foptions.py", headers=BEARER).status_code == 404


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_body_that_is_too_large_is_refused(url: str, path: str) -> None:
    large = b" " * (OPTIONS.max_body_bytes + 1)
    response = httpx.post(url + path, content=large, headers=BEARER)
    assert response.status_code == 413
    in_chunks = httpx.post(url + path, content=iter([large[:60_000], large[60_000:]]), headers=BEARER)
    assert in_chunks.status_code == 413
    assert f"more than {OPTIONS.max_body_bytes} bytes" in in_chunks.text


def test_a_body_that_says_it_is_too_large_is_not_waited_for(url: str) -> None:
    at = urlsplit(url)
    with socket.create_connection((at.hostname, at.port), 30) as sock:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 9999999\r\n\r\n"
        )
        sock.sendall(head.encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_request_that_does_not_come_is_not_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.2)
    at = urlsplit(url)
    with socket.create_connection((at.hostname, at.port), 30) as sock:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 99\r\n\r\n{{"
        sock.sendall(head.encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_other_machines_are_answered_only_with_a_key(host: str) -> None:
    with pytest.raises(TrustError, match="--api-key"):
        create_app(ScriptedModels(), ServeOptions(host=host))
    check(ServeOptions(host=host, api_keys=(KEY,)))
    check(ServeOptions(host=host, insecure=True))
    check(ServeOptions(host="::1"))


@pytest.mark.parametrize("key", ["", " ", "schlüssel", "a\nb"])
def test_keys_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(TrustError, match="HTTP header"):
        check(ServeOptions(api_keys=(key,)))
