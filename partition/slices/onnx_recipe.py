"""Recipe of a stage of an ONNX model: its weights are copied from the model's file, and the rest is written out.

Both files are protobuf messages, in which the bytes of a weight are contiguous. Their position is read from the wire
format itself (protobuf.dev, "Encoding"). The field numbers are those of onnx.proto.
"""

from collections.abc import Iterator

from partition.slices.recipe import Copy, Literal, Recipe, Segment

_GRAPH, _INITIALIZER, _NAME, _RAW_DATA = 7, 5, 8, 9  # fields of ModelProto, GraphProto, TensorProto and TensorProto
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LEAST_BYTES = 4096  # smaller weights are written out instead of copied

Data = bytes | memoryview


def stage_recipe(stage: Data, model: Data, model_digest: str) -> Recipe:
    """Return the recipe of `stage`, a serialized ModelProto, whose weights are in the file of `model`.

    Weights that `model` does not have under their name are written out. A model with weights in another file is
    therefore written out completely.
    """
    there = weight_places(model)
    segments: list[Segment] = []
    at = 0
    for name, (offset, length) in sorted(weight_places(stage).items(), key=lambda item: item[1]):
        source, size = there.get(name, (0, 0))
        if length < _LEAST_BYTES or size != length:
            continue
        if memoryview(stage)[offset : offset + length] != memoryview(model)[source : source + length]:
            continue
        segments += (Literal(bytes(stage[at:offset])), Copy(source, length))
        at = offset + length
    if at < len(stage):
        segments.append(Literal(bytes(stage[at:])))
    return Recipe(model_digest, len(model), tuple(segments))


def weight_places(model: Data) -> dict[str, tuple[int, int]]:
    """Return (first byte, length) of each initializer's raw data in a serialized ModelProto."""
    places: dict[str, tuple[int, int]] = {}
    for field, start, stop in _fields(model, 0, len(model)):
        if field == _GRAPH:
            for inner, lo, hi in _fields(model, start, stop):
                if inner == _INITIALIZER:
                    parts = {number: (first, end) for number, first, end in _fields(model, lo, hi)}
                    if _NAME in parts and _RAW_DATA in parts:
                        first, end = parts[_NAME]
                        name = bytes(model[first:end]).decode(errors="replace")
                        begin, finish = parts[_RAW_DATA]
                        places[name] = begin, finish - begin
    return places


def without_weights(model: Data, least: int) -> bytes:
    """Return a serialized ModelProto without the raw data of initializers that have at least `least` bytes.

    Raises ValueError if the bytes are not a message.
    """

    def graph(start: int, stop: int) -> bytes:
        parts = []
        for number, at, first, end in _all_fields(model, start, stop):
            tensor = b"".join(
                bytes(model[tag:last])
                for inner, tag, value, last in (_all_fields(model, first, end) if number == _INITIALIZER else ())
                if inner != _RAW_DATA or last - value < least
            )
            parts.append(_with_length(_INITIALIZER, tensor) if number == _INITIALIZER else bytes(model[at:end]))
        return b"".join(parts)

    return b"".join(
        _with_length(_GRAPH, graph(first, end)) if number == _GRAPH else bytes(model[at:end])
        for number, at, first, end in _all_fields(model, 0, len(model))
    )


def _with_length(number: int, content: bytes) -> bytes:
    """Return a field with a length."""
    head, n = bytearray([number << 3 | _BYTES]), len(content)
    while n > 127:
        head.append(n & 127 | 128)
        n >>= 7
    return bytes([*head, n]) + content


def _fields(data: Data, at: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number, first byte, end) of the fields with a length in the message data[at:stop].

    Raises ValueError if the bytes are not a message.
    """
    for number, _, first, end in _all_fields(data, at, stop):
        if first >= 0:
            yield number, first, end


def _all_fields(data: Data, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number, byte of its tag, first byte of its value, end) of the fields in the message data[at:stop].

    The first byte is -1 for a field without a length. Raises ValueError if the bytes are not a message.
    """
    while at < stop:
        began, first = at, -1
        tag, at = _varint(data, at, stop)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at, stop)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        elif kind == _BYTES:
            length, first = _varint(data, at, stop)
            if length > stop - first:
                raise ValueError(f"a field of {length} bytes, but only {stop - first} are left")
            at = first + length
        else:
            raise ValueError(f"a field of the wire type {kind}, which has no length")
        yield tag >> 3, began, first, at


def _varint(data: Data, at: int, stop: int) -> tuple[int, int]:
    value = shift = 0
    while at < stop and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("a number that does not end")
