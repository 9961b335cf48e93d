"""Prove a plan on real tensors: against an fp32 reference, before and after the release.

What a proof shows depends on where it ran: on the CPU, or on the simulated NPU, that the plan, the
weights, the caches and the bytes are right by the documented meaning of the ops. It shows nothing
of a device's numerics or speed unless it ran on that device.
"""

from npu_backend.runtime.prove.all_paths import PathRecord, PathsResult, prove_all_paths
from npu_backend.runtime.prove.engine import DEFAULT_ROWS, Progress, prove_layer, prove_model
from npu_backend.runtime.prove.records import LayerProof, Proof, RunResult, StepRecord
from npu_backend.runtime.prove.scenario import ROW_CAP
from npu_backend.runtime.prove.seeded import (
    EXECUTED_QUANTS,
    LayerWeights,
    check_executable,
    seeded_weights,
)

__all__ = [
    "DEFAULT_ROWS",
    "EXECUTED_QUANTS",
    "ROW_CAP",
    "LayerProof",
    "LayerWeights",
    "PathRecord",
    "PathsResult",
    "Progress",
    "Proof",
    "RunResult",
    "StepRecord",
    "check_executable",
    "prove_all_paths",
    "prove_layer",
    "prove_model",
    "seeded_weights",
]
