"""`edge chat` on several devices: options, plans and models that cannot be used."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from edge.models.demo import MODEL_PATH
from tests.conftest import Synthetic
from tests.support.commands import ASKED, Chat, Run, Two, ask, assert_refused, own_folder, run_command, shared_two  # noqa: F401 (fixtures)
from tests.support.slices import rewritten


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--shares 1,1", "--shares is for several devices"),
        ("--save-plan /tmp/x", "--save-plan is for several devices"),
        ("--wire q8", "--wire is for several devices"),
        ("--insecure", "--insecure is for several devices"),
        ("--workers A --shares 1,1,1", "2 devices need 2 shares, but --shares has 3"),
        ("--workers A --shares 1,0", "needs a number above 0"),
        ("--workers A --shares 1,-1", "needs a number above 0"),
        ("--workers A --shares 1,x", "needs a number, got 'x'"),
        ("--workers A --shares 1,nan", "needs a number, got 'nan'"),
        ("--workers A,,A", "needs a list such as A,B"),
        ("--workers A,local", "`local` is this device and must be the first"),
        ("--workers http://x", "an address is HOST or HOST:PORT"),
        ("--workers A --parallel both", "invalid choice"),
        ("--workers A --wire q4", "invalid choice"),
        ("--workers A --affinity 4000", "core 4000 is not available here"),
        ("--affinity 4000", "core 4000 is not available here"),
        ("--affinity 3-1", "needs cores such as 0,2-3"),
        ("--plan P --workers A", "--workers assigns work to devices, and so does --plan"),
        ("--plan P --shares 1,1", "--shares assigns work to devices"),
        ("--plan P --parallel auto", "--parallel assigns work to devices"),
        ("--workers A,A,A,A,A,A,A,A --parallel tensor --shares 1,1,1,1,1,1,1,1,1", "8 attention heads"),
        ("--workers A,A,A,A,A,A,A,A --parallel pipeline --shares 1,1,1,1,1,1,1,1,1", "8 layers"),
    ],
)
def test_options_that_cannot_be(
    run: Run, two: Two, options: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [arg.replace("A", two[0].address) if i and "A" in arg else arg for i, arg in enumerate(options.split())]
    try:
        answer = run("chat", *ASKED, *args)
    except SystemExit as end:  # by argparse
        answer = (int(str(end.code)), *capsys.readouterr())
    assert_refused(answer, 2, words)


def test_a_worker_that_is_not_there(run: Run, two: Two) -> None:
    answer = run("chat", *ASKED, "--workers", f"{two[0].address},127.0.0.1:1")
    assert_refused(answer, 7, "nothing listens at 127.0.0.1:1")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe", "decode"),
        (b"[" * 100_000, "cannot be used as a plan"),
        (b"[]", "expected an object"),
        (b'{"format": "edge-plan-0"}', "format is 'edge-plan-0'"),
        (b'{"format": "edge-plan-1", "model": "x"}', "model_digest is missing"),
    ],
)
def test_a_damaged_plan(run: Run, tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "plan"
    file.write_bytes(content)
    assert_refused(run("chat", *ASKED, "--plan", file), 2, f"{file} cannot be used as a plan", words)


def test_a_plan_that_is_not_there_or_cannot_be_saved(run: Run, two: Two, tmp_path: Path) -> None:
    assert_refused(run("chat", *ASKED, "--plan", tmp_path / "none"), 3, "none: No such file")
    how = ("--workers", two[0].address, "--parallel", "pipeline", "--shares", "1,1")
    assert_refused(run("chat", *ASKED, *how, "--save-plan", tmp_path / "no" / "plan"), 2, "there is no folder")
    model = tmp_path / "model.gguf"
    shutil.copy(MODEL_PATH, model)
    assert_refused(
        run("chat", model, *ASKED, *how, "--save-plan", model), 2, "is read by this command and cannot be overwritten"
    )


def test_a_plan_that_this_device_cannot_follow(run: Run, chat: Chat, two: Two, tmp_path: Path) -> None:
    file = tmp_path / "plan"
    how = ("--workers", two[0].address, "--parallel", "pipeline", "--shares", "1,1", "--save-plan", file)
    plan = chat(*how)["plan"]
    first, second = (stage["shards"][0] for stage in plan["stages"])
    first["affinity"] = [4000]
    file.write_text(json.dumps(plan))
    answer = run("chat", *ASKED, "--plan", file)
    assert_refused(answer, 2, f"{file}: affinity of local: core 4000 is not available here")
    assert "--affinity" not in answer[2]
    first["affinity"], second["threads"] = [], 100_000
    file.write_text(json.dumps(plan))
    assert_refused(run("chat", *ASKED, "--plan", file), 2, f"{two[0].address} has 100000 threads; the maximum is 512")


def test_a_plan_for_another_model(run: Run, chat: Chat, two: Two, tmp_path: Path, synthetic: Synthetic) -> None:
    file = tmp_path / "plan"
    plan = chat("--workers", two[0].address, "--parallel", "pipeline", "--shares", "1,1", "--save-plan", file)["plan"]
    other = synthetic("llama")
    assert_refused(run("chat", other, *ASKED, "--plan", file), 3, other.name, "is another model")
    file.write_text(json.dumps(plan | {"model_digest": ""}))
    assert_refused(run("chat", other, *ASKED, "--plan", file), 2, "layers=8", "layers=2", "make a new plan")
    alone = plan["stages"][0] | {"layers": [0, 8]}
    alone["shards"][0]["vocab"] = [0, 2048]
    file.write_text(json.dumps(plan | {"stages": [alone]}))
    assert run("chat", *ASKED, "--plan", file)[0] == 0  # for this device alone
    file.write_text(json.dumps(plan | {"stages": [alone], "model_digest": "0" * 64}))
    assert_refused(run("chat", *ASKED, "--plan", file), 2, "is for another model", "plan again")


def test_a_model_that_cannot_be_cut(run: Run, two: Two, tmp_path: Path, synthetic: Synthetic) -> None:
    unknown = {"cls.output.weight": np.ones((2, 128), np.float32)}
    path = rewritten(synthetic("llama"), tmp_path / "model.gguf", add=unknown)
    for parallel in ("auto", "tensor", "pipeline"):
        how = ("--workers", two[0].address, "--parallel", parallel, "--shares", "1,1")
        assert_refused(run("chat", path, *ASKED, *how), 3, "'cls.output.weight'")
