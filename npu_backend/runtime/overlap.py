"""Run a path on a second stream beside other work, such as an indexer's own projection.

Order is kept by events: the side stream waits for an event of the main one, the main stream for an
event of the side one. Waiting on a stream object would order nothing: what was enqueued when is
what counts. Every tensor that crosses over is recorded on the stream that uses it, so that its
memory is not handed out again too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["DeviceStreams", "Streams", "run_beside"]

T = TypeVar("T")
R = TypeVar("R")


class Streams(Protocol):
    """What is needed of a device's streams."""

    def current(self) -> Any:
        """Return the stream that work goes to now."""

    def event(self) -> Any:
        """Return a new event, with ``record(stream)``; streams have ``wait_event(event)``."""

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Send the work inside to a stream."""

    def record(self, tensor: torch.Tensor, stream: Any) -> None:
        """Note that a stream uses a tensor that was allocated on another one."""


class DeviceStreams:
    """The streams of a device, by its torch module.

    Args:
        device: Such as ``npu:0``.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)

    def current(self) -> Any:
        """Return the device's current stream."""
        return self._module.current_stream()

    def event(self) -> Any:
        """Return a new event."""
        return self._module.Event()

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Return the device module's own context manager."""
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def record(self, tensor: torch.Tensor, stream: Any) -> None:
        """Call ``tensor.record_stream(stream)``."""
        tensor.record_stream(stream)


def run_beside(
    path: Callable[..., R],
    inputs: Iterable[torch.Tensor],
    other: Callable[[], T],
    *,
    streams: Streams,
    side: Any,
    outputs: Callable[[R], Iterable[torch.Tensor]],
) -> tuple[R, T]:
    """Run ``path(*inputs)`` on a side stream while ``other()`` runs on the current one.

    When this returns, work enqueued on the current stream comes after both.

    Args:
        path: The path.
        inputs: Its arguments.
        other: What runs beside it.
        streams: The device's streams.
        side: The second stream.
        outputs: The tensors of what the path returned.
    """
    given = tuple(inputs)
    main = streams.current()
    ready, done = streams.event(), streams.event()
    ready.record(main)
    with streams.use(side):
        side.wait_event(ready)
        # Before the path runs: from here on the side stream may still be reading them.
        for tensor in given:
            streams.record(tensor, side)
        result = path(*given)
        done.record(side)
    value = other()
    main.wait_event(done)
    for tensor in outputs(result):
        streams.record(tensor, main)
    return result, value
