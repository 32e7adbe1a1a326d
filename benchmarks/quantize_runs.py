"""The section of bench_quantize.py that depends on the machine: memory and time of large files."""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_slices import bare_write
from benchmarks.processes import Grouped, RankFailed, memory_group
from benchmarks.raw_disk import NoDirectReads, RawDisk, forget
from devices.lab.control_group import NoGroups
from edge.models.shapes import Shape, shape
from edge.models.synth import SHAPES, synthesize
from tests.support.groups import CountedGroup

SIDE = Path(__file__).with_name("quantize_side.py")
TOKENIZER = Path(__file__).parent.parent / "tests" / "data" / "hf" / "llama"
LIMIT = 2 << 30
RUN_S = 3600.0
DISK_S = 2.5  # of one measurement of reading
WRITE_BYTES = 4_000_000_000
SAMPLE_S = 0.02
TINY = shape("llama", layers=2, embd=256, ff=512, heads=8, kv=4, vocab=512)
_POOL_BYTES = 64 << 20


def random_model(folder: Path, name: str, model: Shape) -> Path:
    """The file of that name at F16, written where it is not there."""
    path = folder / f"{name}-f16.gguf"
    if not path.exists():
        synthesize(path, model, "f16", head_type="f16")
    return path


def memory(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Each side in a process and a memory group of its own, after its file was dropped from the page cache."""
    tiny = args.tiny
    large, small = (TINY, TINY) if tiny else (SHAPES["llama-2-7b"], SHAPES["tinyllama-1.1b"])
    source, out = random_model(args.work, "tiny" if tiny else "7b", large), folder / "out.gguf"
    size = source.stat().st_size
    results: dict[str, Any] = {"limit_bytes": LIMIT, "disk": disk(source, out, tiny), "rows": []}
    for mix in ("q4_0",) if tiny else ("q4_0", "q4_k_m"):
        for how in ("quantize", "directly"):
            row = alone(how, source, out, mix=mix)
            results["rows"].append({"what": f"{mix}, 7B", "how": how, "source_bytes": size, **row})
    checkpoint = folder / "checkpoint"
    size = write_checkpoint(checkpoint, small)
    row = alone("convert", checkpoint, out)
    results["rows"].append({"what": "safetensors, 1.1B", "how": "convert", "source_bytes": size, **row})
    return results


def disk(source: Path, out: Path, tiny: bool) -> dict[str, float]:
    """GB/s that the disk alone reads and writes."""
    results = {}
    forget(source)
    with suppress(NoDirectReads), RawDisk(source) as raw:
        results["read_gbps"] = max(raw.gbps(0.2 if tiny else DISK_S).values())
    n_bytes = 1_000_000 if tiny else WRITE_BYTES
    results["write_gbps"] = n_bytes / bare_write(out, n_bytes) / 1e9
    return results


def alone(do: str, source: Path, target: Path, **arguments: str) -> dict[str, Any]:
    """Run a side alone; return its figures and its group's. "failed" where it did not come to its end."""
    for path in source.iterdir() if source.is_dir() else [source]:
        forget(path)
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        try:
            group: CountedGroup | None = stack.enter_context(memory_group(LIMIT))
        except NoGroups as error:
            group, results["without_group"] = None, str(error)
        side = stack.enter_context(Grouped(SIDE, group))
        peaks = stack.enter_context(anonymous(group))
        try:
            [seconds] = side.tell(do, RUN_S, source=str(source), target=str(target), **arguments)
            results.update(seconds=seconds, target_bytes=target.stat().st_size)
        except RankFailed as failed:
            results["failed"] = str(failed)
        if group:
            results["group"] = {**group.memory_report(), "anonymous_bytes": max(peaks, default=0)}
    target.unlink(missing_ok=True)
    return results


@contextmanager
def anonymous(group: CountedGroup | None) -> Iterator[list[int]]:
    """Samples of the memory of a group that is not the page cache, bytes, during a block."""
    samples: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while group is not None and not ended.wait(SAMPLE_S):
            stat = group.memory_stat()
            samples.append(stat["total_rss"] if "total_rss" in stat else stat["anon"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield samples
    finally:
        ended.set()
        watcher.join()


def write_checkpoint(folder: Path, model: Shape) -> int:
    """A folder of safetensors with random BF16 weights of a Llama's shape, and the tokenizer of a tiny one; bytes."""
    folder.mkdir()
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    config = json.loads((TOKENIZER / "config.json").read_text())
    config.update(
        dtype="bfloat16", hidden_size=model.embd, intermediate_size=model.ff, head_dim=model.sizes["head"],
        num_attention_heads=model.heads, num_key_value_heads=model.kv, num_hidden_layers=model.layers,
        vocab_size=model.vocab,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    at = 0
    for name, dims in model.tensors():
        n_bytes = 2 * prod(dims)
        header[their_name(name)] = {"dtype": "BF16", "shape": dims, "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    values = np.random.default_rng(0).standard_normal(_POOL_BYTES // 2, np.float32) * 0.02
    pool = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, at, len(pool)):
            file.write(pool[: at - start])
    return path.stat().st_size


def their_name(name: str) -> str:
    """A tensor of a Llama as Hugging Face's library calls it."""
    parts = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    *block, part, weight = name.split(".")
    return ".".join([*(("model.layers", block[1]) if block else ()), parts[part], weight])
