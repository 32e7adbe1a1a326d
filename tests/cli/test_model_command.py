"""`edge model info` and `edge model synth`, run as commands; `edge model pull` is in test_hub.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edge.models.synth import SHAPES
from quant.text import bytes_text, count_text
from tests.support.helpers import ROOT, TIMEOUT_S, edge_here
from tests.support.slices import synthetic

SMALL = ("--layers", "2", "--embd", "128", "--ff", "256", "--heads", "4", "--kv", "2", "--vocab", "400")
TERMINAL = "import sys, apps.cli; sys.stdout.isatty = lambda: True; sys.exit(apps.cli.main(sys.argv[1:]))"

HUNDREDTH_MIB = 10_486  # llama.cpp names its buffers' sizes no finer


def edge_model(*args: str | Path, code: int = 0) -> "subprocess.CompletedProcess[str]":
    """Run the command, which must exit with `code`."""
    done = edge_here("model", *args)
    assert done.returncode == code, done.stderr
    return done


def refused(*args: str | Path, code: int = 2) -> str:
    """The one line on stderr of a command that fails."""
    done = edge_model(*args, code=code)
    lines = done.stderr.splitlines()
    assert (done.stdout, len(lines)) == ("", 1), done.stderr
    assert lines[0].startswith("edge model")
    return lines[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    edge_model("synth", path, *SMALL, "--context", "512")
    return path


def test_info_text(model: Path) -> None:
    out = edge_model("info", model).stdout
    rows = dict(line.strip().split("  ", 1) for line in out.splitlines() if "  " in line.strip())
    facts = {name: value.strip() for name, value in rows.items()}
    assert facts["architecture"] == "llama"
    assert (facts["layers"], facts["heads"], facts["KV heads"]) == ("2", "4", "2")
    assert facts["vocabulary"] == "400 tokens"
    assert facts["KV cache"] == "256 KiB"  # 512 tokens, 2 layers, 2 heads of 32 values, keys and values, 2 bytes
    assert {"weights", "compute buffers", "output buffer", "runtime", "total", "of it q4_0"} <= facts.keys()


def test_info_says_what_devices_cannot_share(tmp_path: Path) -> None:
    reason = "olmo2 normalizes queries and keys over all heads"
    olmo = synthetic(tmp_path / "olmo2.gguf", "olmo2")
    assert (
        f"shards  yes, except attention, which each device computes whole: {reason}" in edge_model("info", olmo).stdout
    )
    info = json.loads(edge_model("info", olmo, "--json").stdout)
    assert (info["shards"], info["no_shards_because"], info["whole_attention_because"]) == (True, None, reason)


def test_info_on_a_terminal_is_a_table(model: Path) -> None:
    command = [sys.executable, "-c", TERMINAL, "model", "info", str(model)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    assert "\u2502 architecture" in out
    assert "\u2502 KV cache" in out


def test_info_json(model: Path) -> None:
    half = json.loads(edge_model("info", model, "--json", "--context", "256").stdout)
    full = json.loads(edge_model("info", model, "--json", "--context", "512").stdout)
    small = json.loads(edge_model("info", model, "--json", "--context", "512", "--kv-type", "q8_0").stdout)
    assert half["parameters"] == full["parameters"] == 2 * 128 * 400 + 2 * (128 * (256 + 128 + 3 * 256) + 256) + 128
    assert full["heads_per_layer"] == [4, 4]
    assert sum(full["bytes_by_type"].values()) <= full["size_bytes"] <= model.stat().st_size
    memory = full["memory"]
    assert memory["kv_cache_bytes"] == pytest.approx(262_144, abs=HUNDREDTH_MIB)
    assert half["memory"]["kv_cache_bytes"] == pytest.approx(131_072, abs=HUNDREDTH_MIB)
    assert 0 < small["memory"]["kv_cache_bytes"] < memory["kv_cache_bytes"]
    assert (memory["context"], memory["kv_type"]) == (512, "f16")
    parts = ("weights", "kv_cache", "compute_buffers", "output_buffer", "runtime")
    assert memory["total_bytes"] == sum(memory[f"{part}_bytes"] for part in parts)


def test_info_of_experts(tmp_path: Path) -> None:
    path = tmp_path / "moe.gguf"
    experts = ("--experts", "4", "--experts-used", "2", "--expert-ff", "64")
    edge_model("synth", path, *SMALL, "--arch", "qwen3moe", *experts)
    assert "4, 2 used for each token" in edge_model("info", path).stdout


def test_synth_json(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    result = json.loads(edge_model("synth", path, "--shape", "qwen3-0.6b", *SMALL, "--tied", "--json").stdout)
    assert result["path"] == str(path)
    assert result["architecture"] == "qwen3"
    assert result["size_bytes"] == path.stat().st_size
    assert result["duration_s"] > 0
    assert result["parameters"] < 1_000_000


def test_synth_options_reach_the_file(tmp_path: Path) -> None:
    def content(*args: str) -> bytes:
        path = tmp_path / "m.gguf"
        edge_model("synth", path, *SMALL, "--force", *args)
        return path.read_bytes()

    plain = content()
    assert content("--seed", "0", "--type", "Q4_0", "--arch", "llama", "--no-tied") == plain
    for args in (
        ("--seed", "1"),
        ("--type", "q4_1"),
        ("--head-type", "q4_0"),
        ("--arch", "qwen3"),
        ("--tied",),
        ("--head-size", "64"),
        ("--context", "99"),
    ):
        assert content(*args) != plain, args


def test_synth_does_not_overwrite_unasked(model: Path) -> None:
    before = model.stat()
    assert "--force overwrites it" in refused("synth", model, *SMALL)
    assert model.stat() == before


def test_synth_says_what_is_wrong(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    assert refused("synth", out).endswith("or also --layers --embd --ff --heads --vocab")
    assert refused("synth", out, *SMALL[2:]).endswith("or also --layers")
    assert all(name in refused("synth", out, "--shape", "?") for name in SHAPES)
    assert "--shape already has an architecture" in refused("synth", out, "--shape", "qwen3-8b", "--arch", "llama")
    assert "unknown architecture" in refused("synth", out, *SMALL, "--arch", "gpt5")
    assert "do not divide" in refused("synth", out, *SMALL, "--kv", "3")
    assert "unknown tensor type" in refused("synth", out, *SMALL, "--type", "q4")
    assert "cannot be made as iq2_xxs" in refused("synth", out, *SMALL, "--head-type", "iq2_xxs")
    assert "--layers" in refused("synth", out, "--layers", "0")
    assert "is a folder" in refused("synth", tmp_path, *SMALL)
    assert "there is no folder" in refused("synth", tmp_path / "no" / "m.gguf", *SMALL)
    assert "no room" in refused("synth", out, *SMALL, "--layers", "2000", "--vocab", "2000000000", code=4)
    assert list(tmp_path.iterdir()) == []


def test_info_says_what_is_wrong(tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model.read_bytes()[:-1000])
    assert "broken.gguf" in refused("info", broken, code=3)
    assert "no such file" in refused("info", tmp_path / "none.gguf", code=3)
    assert "--context" in refused("info", model, "--context", "none")
    assert "--kv-type" in refused("info", model, "--kv-type", "q2_k")
    assert "ACTION" in refused()


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (10_230, "9.99 KiB"), (10_239, "10.0 KiB"),
     (2**20 - 1, "1.00 MiB"), (1.5 * 2**30, "1.50 GiB"), (640 * 2**20, "640 MiB"), (5000 * 2**40, "5000 TiB")],
)  # fmt: skip
def test_bytes_text(n: float, text: str) -> None:
    assert bytes_text(n) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [(999, "999"), (1000, "1.00 K"), (1_100_048_384, "1.10 B"), (999_885_952, "1.00 B"), (2e12, "2.00 T")],
)
def test_count_text(n: float, text: str) -> None:
    assert count_text(n) == text
