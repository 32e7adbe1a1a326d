"""Models quantized to a type, kept in this user's cache."""

from __future__ import annotations

from pathlib import Path

from devices.paths import cache_folder
from edge.quantization.gguf import quantize
from edge.slices.local import OwnSlices
from edge.tasks import SILENT, Steps
from quant.gguf.file import GgufFile
from quant.mixes import mix_by_name


def model_in_type(path: Path, type_: str, steps: Steps = SILENT) -> Path:
    """Return the path of the model quantized to a type, in this user's cache; quantize it if it is not there."""
    file, mix = GgufFile.open(path), mix_by_name(type_)
    digest = OwnSlices().model_digest(path)
    folder = cache_folder() / "types"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{path.stem}-{digest[:12]}-{mix.name}.gguf"
    if not target.exists():
        with steps.step(f"Quantizing {path.name} to {type_}", file.size_bytes) as show:
            quantize(file, target, mix, progress=show)
    return target
