"""Process of a network: loads it and computes requests. messages.py describes its messages.

One thread reads requests, one computes, and one sends outputs, so that the computing thread waits for neither. The
process ends when the server does.
"""

from __future__ import annotations

import argparse
import os
import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from devices.files import remove_temporary
from edge.onnx.samples import Feeds
from edge.serve.messages import error_json
from edge.serve.oip.computing import Computing, opened
from edge.serve.oip.config import NetworkConfig
from edge.serve.oip.messages import HEAD, frame, message_of, tensors_of
from edge.serve.oip.tensors import DATATYPES, NUMPY, Tensor, packed_texts
from edge.serve.oip.works import Timing, Work, Works
from edge.serve.remote_steps import RemoteSteps
from edge.weights.elastic.signals import ignore_memory_signals

_NO_TIME = Timing()


class Control:
    """Socket to the server."""

    def __init__(self, its_socket: socket.socket) -> None:
        self._socket = its_socket
        self._messages: queue.SimpleQueue[Sequence[bytes | memoryview] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="sender", daemon=True)
        self._sender.start()

    def send(self, message: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send a message with tensors, which must not change any more."""
        self._messages.put(frame(message, tensors, "outputs" if tensors else ""))

    def receive(self) -> tuple[dict[str, Any], bytearray] | None:
        """Return the next message of the server and its data, or None if the server has ended."""
        head = self._read(HEAD.size)
        if head is None:
            return None
        n_text, n_data = HEAD.unpack(head)
        text, data = self._read(n_text), self._read(n_data)
        return None if text is None or data is None else (message_of(text), data)

    def close(self) -> None:
        """Wait until all messages are sent."""
        self._messages.put(None)
        self._sender.join()

    def _read(self, n_bytes: int) -> bytearray | None:
        data = bytearray(n_bytes)
        view, at = memoryview(data), 0
        while at < n_bytes:
            try:
                n = self._socket.recv_into(view[at:])
            except ConnectionError:
                return None
            if not n:
                return None
            at += n
        return data

    def _send(self) -> None:
        while (parts := self._messages.get()) is not None:
            try:
                for part in parts:
                    self._socket.sendall(part)
            except OSError:  # `receive` detects the end of the server
                return


def main() -> int:
    """Serve until the server ends. Return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", type=int, required=True, help="file descriptor of a socket to the server")
    ignore_memory_signals()
    control = Control(socket.socket(fileno=parser.parse_args().control))
    try:
        first = control.receive()
        if first is None:
            return 0
        network = opened(NetworkConfig.from_json(first[0]["config"]), RemoteSteps(control.send))
        control.send({"ready": network.about()})
        works = Works()
        threading.Thread(target=_read, args=(control, works, network), name="control", daemon=True).start()
        try:
            network.compute(works, Answers(control))
        finally:
            network.close()
    except Exception as error:  # the server passes the error on to waiting clients
        control.send({"fatal": error_json(error)})
        control.close()
        return 1
    return 0


class Answers:
    """Sends outputs of requests to the server."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def __call__(
        self,
        work: Work,
        outputs: Feeds | Exception,
        timing: Timing = _NO_TIME,
        rows: int = 1,
        *,
        is_first: bool = True,
    ) -> None:
        """Send the outputs of a request, or its error. See `edge.serve.oip.computing.Answer`."""
        if isinstance(outputs, Exception):
            self._control.send({"id": work.number, "error": error_json(outputs)})
            return
        names = work.outputs or tuple(outputs)
        durations = [work.queue_ns, timing.compute_input, timing.compute_infer, timing.compute_output]
        message = {"id": work.number, "timing": durations, "rows": rows, "own_rows": work.rows, "is_first": is_first}
        self._control.send(message, [_tensor(name, outputs) for name in names])


def _tensor(name: str, outputs: Feeds) -> Tensor:
    array = outputs[name]
    if array.dtype.kind == "U":
        return Tensor(name, "BYTES", array.shape, packed_texts(array.ravel().tolist()))
    plain = np.ascontiguousarray(array).reshape(array.shape)
    return Tensor(name, DATATYPES[array.dtype.name], array.shape, plain.reshape(-1).view(np.uint8).data)


def _read(control: Control, works: Works, network: Computing) -> None:
    """Handle the messages of the server until it ends."""
    while (received := control.receive()) is not None:
        message, data = received
        if "cancel" in message:
            if works.cancel(message["cancel"]):
                network.interrupt()
            continue
        feeds = {
            tensor.name: np.frombuffer(tensor.data, NUMPY[tensor.datatype]).reshape(tensor.shape)
            for tensor in tensors_of(message["inputs"], data)
        }
        works.put(Work(message["id"], feeds, tuple(message["outputs"])))
    works.close()
    network.interrupt()


if __name__ == "__main__":
    code = main()
    remove_temporary()
    os._exit(code)  # skip waiting for threads that wait for messages
