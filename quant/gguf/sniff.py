"""Guess at the format of a file that is not a GGUF, from its first bytes."""


def looks_like(head: bytes) -> str:
    """A hint such as "it looks like safetensors; ...", "" if nothing is recognised. `head`: up to 512 bytes."""
    text = head.lstrip().lower()
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        return "it is a git-lfs pointer, not the model; run `git lfs pull`"
    if text.startswith((b"<!doctype html", b"<html")):
        return "it looks like a web page, not the model; check the download address"
    if head.startswith(b"PK\x03\x04"):
        return "it looks like a zip archive or a PyTorch checkpoint; convert it to GGUF"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 30:
        return "it looks like safetensors; convert it to GGUF"
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg"):
        return "it looks like a ggml file from before GGUF; convert the original model to GGUF"
    if head[:1] == b"\x08" and head[2:3] in (b"\x12", b"\x1a", b"\x22", b"\x3a", b"\x42"):
        return "it looks like ONNX"  # a ModelProto: field 1 (version), then producer, graph or opset
    if text.startswith((b"{", b"[")):
        return "it looks like JSON"
    if not head.strip(b"\x00"):
        return "it is full of zeros; the download never finished, repeat it"
    return ""
