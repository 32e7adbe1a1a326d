"""Compare what edge answers on arm64 with this processor: compare.py FOLDER IN_USERLAND.  run.sh prepares both.

Prints one line a check, and ends with 1 where one fails.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edge.models.demo import MODEL_PATH

HERE = [sys.executable, "-m", "apps.cli"]
TIMEOUT_S = 600.0  # of any command: emulation takes ten times as long
QUESTIONS = ("What is 27 plus 38?", "Which processor does a Raspberry Pi 4 have?", "Name three colours.", "Hello!")
NEAR_TIES: dict[str, str] = {}  # questions that two processors answer with other words, and why that is right
# Another processor adds in another order, which F32 shows. Stored keys and values are rounded to F16, and activations
# to 8 bits beside quantized weights, so that a last bit becomes a step of either. There, arm64 may be as far as this
# processor from the exact logits, which the same weights in F32 give.
CLOSE = 1e-5  # of F32: the greatest difference, as a part of the logits' standard deviation
AS_CLOSE = 1.25  # of other types: largest ratio of the root mean squares of both processors' errors
IN_F16 = 5e-3  # an error that needs no comparison: arm64 also adds products of F16 in F16
_EXPERTS = ("--experts", "8", "--experts-used", "2", "--expert-ff", "256")
SYNTHETIC = {
    "llama-f32": ("--arch", "llama", "--type", "f32"),
    "llama-f16": ("--arch", "llama", "--type", "f16"),
    "llama-q8_0": ("--arch", "llama", "--type", "q8_0"),
    "llama-q4_0": ("--arch", "llama", "--type", "q4_0"),
    "llama-q4_k": ("--arch", "llama", "--type", "q4_k"),
    "qwen3moe-f32": ("--arch", "qwen3moe", "--type", "f32", *_EXPERTS),
    "qwen3moe-q4_0": ("--arch", "qwen3moe", "--type", "q4_0", *_EXPERTS),
}
SIZES = ("--layers", "4", "--embd", "256", "--ff", "512", "--heads", "4", "--vocab", "512", "--seed", "1")


class Comparison:
    """The checks, and how many failed."""

    def __init__(self, folder: Path, in_userland: str) -> None:
        self._folder = folder
        self._there = [in_userland, str(folder)]
        self.failed = 0

    def run(self) -> None:
        whole = {question: _chat(HERE, question) for question in QUESTIONS}
        there = [*self._there, "python3", "-m", "apps.cli"]
        self._same("chat on arm64", whole, {question: _chat(there, question) for question in QUESTIONS})
        self._doctor(there)
        with self._worker(there) as address:
            for parallel in ("tensor", "pipeline"):
                group = ("--workers", address, "--parallel", parallel, "--shares", "1,1")
                answers = {question: _chat(HERE, question, *group) for question in QUESTIONS}
                self._same(f"x86 rank 0, arm64 rank 1, {parallel}", whole, answers)
        self._logits()

    def _say(self, good: bool, what: str) -> None:
        self.failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {what}", flush=True)

    def _same(self, what: str, expected: dict[str, Any], result: dict[str, Any]) -> None:
        for question in QUESTIONS:
            same = result[question]["token_ids"] == expected[question]["token_ids"]
            rate = result[question]["timing"]["decode_tokens_per_s"]
            said = f"{result[question]['text']!r:.60}, {rate:.1f} tokens/s"
            if not same:
                said += f", not {expected[question]['text']!r:.60} ({NEAR_TIES.get(question, 'no near-tie is listed')})"
            self._say(same or question in NEAR_TIES, f"{what}: {question} {said}")

    def _doctor(self, there: list[str]) -> None:
        for finding in json.loads(_output([*there, "doctor", "--json"]))["findings"]:
            self._say(finding["level"] != "problem", f"doctor on arm64: {finding['check']}: {finding['seen']}")

    @contextmanager
    def _worker(self, there: list[str]) -> Iterator[str]:
        """A worker of the userland; where it listens."""
        log = self._folder / "worker.log"
        with log.open("wb") as out:
            worker = subprocess.Popen([*there, "worker", "--listen", "127.0.0.1:0"], stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not (result := re.search(r"127\.0\.0\.1:[1-9]\d*", log.read_text())):
                if worker.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the worker does not listen: {log.read_text()}")
                time.sleep(0.1)
            yield result[0]
        finally:
            worker.terminate()
            code = worker.wait(TIMEOUT_S)
            self._say(code == 0, f"the worker on arm64 ended with {code}")

    def _logits(self) -> None:
        """The same files on both processors, with the weights as the file has them and repacked."""
        models = self._folder / "userland" / "models"
        models.mkdir(exist_ok=True)
        for name, options in SYNTHETIC.items():
            _output([*HERE, "model", "synth", *options, *SIZES, "--force", str(models / f"{name}.gguf")])
        (models / MODEL_PATH.name).write_bytes(MODEL_PATH.read_bytes())
        program = Path(__file__).with_name("logits.py")
        (models / program.name).write_bytes(program.read_bytes())
        names = [f"{name}.gguf" for name in (MODEL_PATH.stem, *SYNTHETIC)]
        exact = [_exact(models / name) for name in names if "-f32" not in name]
        files = [*(str(models / name) for name in names), *map(str, exact)]
        _output([sys.executable, str(program), str(models / "here.npz"), *files])
        inside = [f"/models/{name}" for name in (program.name, "there.npz", *names)]
        _output([*self._there, "python3", *inside])
        with np.load(models / "here.npz") as here, np.load(models / "there.npz") as there:
            for name in there:
                a, b = here[name], there[name]
                stem, how = name.rsplit(" ", 1)
                changed = np.flatnonzero(a.argmax(1) != b.argmax(1))
                gaps = [float((row.max() - row[other]) / a.std()) for row, other in zip(a, b.argmax(1), strict=True)]
                said = f"logits of {name}: {float(np.abs(a - b).max() / a.std()):.1e} of the deviation apart"
                if stem.endswith("-f32"):
                    close = float(np.abs(a - b).max() / a.std()) <= CLOSE
                else:
                    true = here[f"{stem}-as-f32 {how}"]
                    errors = [float(np.sqrt(np.square(logits - true).mean()) / true.std()) for logits in (a, b)]
                    said += f"; from the exact logits {errors[0]:.1e} here, {errors[1]:.1e} on arm64"
                    close = errors[1] <= max(IN_F16, AS_CLOSE * errors[0])
                said += f"; {len(changed)} of {len(a)} rows have another greatest"
                self._say(close, said + (f", at most {max(gaps):.1e} below" if len(changed) else ""))


def _exact(path: Path) -> Path:
    """Write the weights of a file in F32, and return the path of the copy."""
    copy = path.with_name(f"{path.stem}-as-f32.gguf")
    _output([*HERE, "quantize", str(path), str(copy), "--type", "f32", "--force"])
    return copy


def _chat(command: list[str], question: str, *options: str) -> dict[str, Any]:
    """Return the JSON object of a greedy `edge chat`."""
    provided = ("--temperature", "0", "--max-tokens", "40", "--prefix-cache", "0", "--draft", "off", "--context", "512")
    values: dict[str, Any] = json.loads(_output([*command, "chat", "-p", question, *provided, "--json", *options]))
    return values


def _output(command: list[str]) -> str:
    """Return the output of a command. SystemExit with its last words where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}: {done.stderr}{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    comparison = Comparison(Path(sys.argv[1]), sys.argv[2])
    comparison.run()
    sys.exit(1 if comparison.failed else 0)
