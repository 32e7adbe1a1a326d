"""Run third-party programs against `edge serve` without network except loopback, and print a table of what works.

    python tests/clients/run.py [CLIENT ...] [--model FILE] [--record FOLDER]        # `make clients` runs this

`programs.py` installs them below `.venv-clients`, before the network is left. Each has a home of its own, and asks
through a proxy that records its requests. Exit code 1 if a client fails, or if the server refused a request of one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from agent_calls import SCRIPT
from programs import CLIENTS, HERE, ROOT, installed
from recorder import Recorder

CLIENT_S, END_S, MAKE_S = 1800, 30, 300
CHECKS = ("hello", "stream", "tools", "edits", "structured", "thoughts")
INSIDE = "EDGE_CLIENTS_INSIDE"  # set where there is no network but loopback
OWN_NETWORK = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
# Writes three models: one that thinks, one whose answers are written down, a trained one with room for long prompts.
# Also writes a network in ONNX.
MAKE = """
import json, sys, pathlib
from tests.real import weights
import onnx
from tests.support import onnx_pipelines, script_model, thinking
folder = pathlib.Path(sys.argv[1])
thinking.thinker(folder / "thinker.gguf")
script_model.script_model(folder / "script.gguf", json.loads(sys.argv[2]))
script_model.with_context(weights.SMOLLM2.path(), folder / "smollm2.gguf", 65536)
onnx.save(onnx_pipelines.mixed(), str(folder / "mixed.onnx"))
"""


@contextmanager
def serving(folder: Path, model: str | None) -> Iterator[tuple[str, str, str]]:
    """`edge serve` on free ports, with the models of a folder and one more: its addresses for HTTP and gRPC, and that
    model's name."""
    command = [sys.executable, "-m", "apps.cli", "serve", "--port", "0", "--prefix-cache", "0", "--context", "65536"]
    command += ["--grpc", "127.0.0.1:0"]
    first = model or str(ROOT / "edge" / "models" / "demo" / "edge-demo-q8_0.gguf")
    every = [*command, first, *(str(path) for path in sorted((*folder.glob("*.gguf"), *folder.glob("*.onnx"))))]
    server = subprocess.Popen(every, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        lines = server.stdout.readline() + server.stdout.readline()
        address, of_grpc = re.search(r"http://\S+", lines), re.search(r"grpc://(\S+)", lines)
        assert address, "the server did not start"
        assert of_grpc, "the server did not start"
        yield address[0], of_grpc[1], Path(first).stem
    finally:
        server.terminate()
        server.wait(END_S)


def told_of(name: str, url: str, of_grpc: str, model: str) -> dict[str, tuple[bool, str]]:
    """Return the outcome of each check of a client."""
    client = CLIENTS[name]
    with TemporaryDirectory(prefix="client-", ignore_cleanup_errors=True) as home:
        environment = {**os.environ, **homes(home), "EDGE_URL": url, "EDGE_MODEL": client.model or model}
        environment["EDGE_GRPC"] = of_grpc
        environment["PATH"] = os.pathsep.join([*map(str, client.programs), os.environ["PATH"]])
        command = [str(client.python), str(HERE / client.script[0]), *client.script[1:]]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CLIENT_S)
        except subprocess.TimeoutExpired:
            return {"": (False, f"it took more than {CLIENT_S} s")}
    if os.environ.get("EDGE_TRACE"):
        print(done.stderr, file=sys.stderr)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    if not lines:
        return {"": (False, done.stderr.strip()[-300:])}
    return {line["check"]: (line["ok"], line["reply"]) for line in lines}


def homes(home: str) -> Mapping[str, str]:
    """Return the variables that make a folder the home of a program."""
    folders = {f"XDG_{name}_HOME": f"{home}/.{name.lower()}" for name in ("CONFIG", "CACHE", "DATA", "STATE")}
    return {"HOME": home, **folders, "TMPDIR": home, "NO_PROXY": "*", "no_proxy": "*"}


def tried(names: list[str], model: str | None, record: Path | None) -> bool:
    """Print the table of these clients; return True if all is well."""
    well = True
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        making = [sys.executable, "-c", MAKE, str(folder), json.dumps(SCRIPT)]
        subprocess.run(making, cwd=ROOT, check=True, timeout=MAKE_S)
        url, of_grpc, served = stack.enter_context(serving(folder, model))
        print(f"{'':20} {'  '.join(f'{check:10}' for check in CHECKS)}  requests")
        for name in names:
            with Recorder(url) as front:
                response = told_of(name, front.url, of_grpc, served)
            cells = ["-" if item not in response else "yes" if response[item][0] else "FAILED" for item in CHECKS]
            print(f"{name:20} {'  '.join(f'{cell:10}' for cell in cells)}  {len(front.exchanges)}", flush=True)
            refused = [each for each in front.exchanges if each.refused and not CLIENTS[name].may_fail(each.path)]
            wrong = [f"{check or name}: {words}" for check, (ok, words) in response.items() if not ok]
            wrong += [f"{each.status} {each.method} {each.path}: {each.answer[:300]}" for each in refused]
            for line in wrong:
                print(f"    {line}", flush=True)
            well = well and not wrong
            if record is not None:
                front.save(record / f"{name}.jsonl")
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description="Try clients of others against `edge serve`.")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--model", help="a GGUF file for questions without tools (default: the bundled model)")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="keep each client's requests there")
    args = parser.parse_args()
    if unknown := [name for name in args.clients if name not in CLIENTS]:
        parser.error(f"there is no client {unknown[0]}; there are {', '.join(CLIENTS)}")
    names = args.clients or list(CLIENTS)
    if os.environ.get(INSIDE):
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=END_S)
        return int(not tried(names, args.model, args.record))
    for name in names:
        installed(name)
    subprocess.run(
        [sys.executable, "-c", "from tests.real import weights; weights.SMOLLM2.path()"], cwd=ROOT, check=True
    )
    if args.record is not None:
        args.record.mkdir(parents=True, exist_ok=True)
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        parser.error("a network of loopback alone needs unshare (util-linux) and ip (iproute2): install both")
    user = () if os.geteuid() == 0 else ("--map-root-user",)
    command = [*OWN_NETWORK, *user, sys.executable, *sys.argv]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with subprocess.Popen(command, env={**os.environ, INSIDE: "1"}) as inside:
        try:
            return inside.wait()
        finally:
            inside.kill()  # This also ends all programs in its network.


if __name__ == "__main__":
    sys.exit(main())
