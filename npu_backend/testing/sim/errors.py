"""Errors of the simulated NPU.

Errors of the simulation itself follow the project's four parts. Errors that stand for what a
device would say (:class:`OpRejectedError`) are plain ``RuntimeError`` objects, because that is what
torch_npu raises and what callers catch.
"""

from __future__ import annotations

from npu_backend.errors import NpuBackendError

__all__ = [
    "NotSimulatedError",
    "OpRejectedError",
    "SimBuildError",
    "SimError",
    "SimStartError",
    "StorageReleasedError",
]


class SimError(NpuBackendError):
    """The simulated NPU itself cannot do what was asked."""


class SimBuildError(SimError):
    """The stand-in libraries cannot be built."""


class SimStartError(SimError):
    """The simulated device cannot be brought up in this process."""


class NotSimulatedError(NotImplementedError):
    """A legal call that the simulation does not cover; never a statement about the device.

    Args:
        op: The op's name.
        what: What of it is not simulated.
    """

    def __init__(self, op: str, what: str) -> None:
        self.op = op
        self.what = what
        super().__init__(
            f"{op}: {what} is not simulated by npu_backend.testing.sim "
            "(this says nothing about the device)"
        )


class OpRejectedError(RuntimeError):
    """The op would fail on the simulated chip at the simulated CANN version.

    Args:
        op: The op's name.
        reason: What the op objects to, with the figure it was compared against.
        where: Chip, CANN and line that the limit belongs to.
    """

    def __init__(self, op: str, reason: str, where: str = "") -> None:
        self.op = op
        self.reason = reason
        self.where = where
        super().__init__(f"{op}: {reason}" + (f" [simulated {where}]" if where else ""))


class StorageReleasedError(RuntimeError):
    """A kernel was about to touch memory that is no longer there.

    Args:
        op: The op that was called.
        shape: Shape of the tensor.
        have: Bytes that its storage still has.
        need: Bytes that the tensor spans.
    """

    def __init__(self, op: str, shape: tuple[int, ...], have: int, need: int) -> None:
        self.op = op
        self.shape = shape
        self.have = have
        self.need = need
        super().__init__(
            f"{op} touches released memory: a tensor of shape {shape} spans {need} bytes, "
            f"its storage has {have}. On a device this reads freed memory without an error."
        )
