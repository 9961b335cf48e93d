"""Everything that imports torch: bind a plan to tensors, prepare, step, release.

Importing this module imports torch; see :mod:`npu_backend.runtime._autoload`.
"""

from npu_backend.model.records import PACKED_TILE
from npu_backend.runtime._autoload import ensure_torch

ensure_torch()

from npu_backend.runtime.amend import AliasWarning  # noqa: E402
from npu_backend.runtime.bind import bind  # noqa: E402
from npu_backend.runtime.bound import BoundLayer  # noqa: E402
from npu_backend.runtime.cache import LayerCache, rope_tables  # noqa: E402
from npu_backend.runtime.forward import one_forward  # noqa: E402
from npu_backend.runtime.ledger import Ledger, LedgerRow  # noqa: E402
from npu_backend.runtime.ops import FORMAT_ND, FORMAT_NZ, Ops  # noqa: E402
from npu_backend.runtime.projections import (  # noqa: E402
    QUANTIZE_OPS,
    StaticScales,
    linear,
    linear_ops,
    not_executed,
    quantize_input,
    static_scales,
)
from npu_backend.runtime.ranks import FAILED, compare_fingerprints  # noqa: E402
from npu_backend.runtime.result import PreprocessResult  # noqa: E402
from npu_backend.runtime.shapes import fixed_shape  # noqa: E402
from npu_backend.runtime.sharded_mlp import (  # noqa: E402
    MlpGroups,
    ShardedMlp,
    assemble_mlp,
    shard_mlp,
)
from npu_backend.runtime.streaming import ModelLedger, prepare_and_release  # noqa: E402
from npu_backend.runtime.tombstone import Tombstone, is_tombstone  # noqa: E402
from npu_backend.runtime.weights import Prepared, Weights  # noqa: E402

__all__ = [
    "FAILED",
    "FORMAT_ND",
    "FORMAT_NZ",
    "PACKED_TILE",
    "QUANTIZE_OPS",
    "AliasWarning",
    "BoundLayer",
    "LayerCache",
    "Ledger",
    "LedgerRow",
    "MlpGroups",
    "ModelLedger",
    "Ops",
    "Prepared",
    "PreprocessResult",
    "ShardedMlp",
    "StaticScales",
    "Tombstone",
    "Weights",
    "assemble_mlp",
    "bind",
    "compare_fingerprints",
    "fixed_shape",
    "is_tombstone",
    "linear",
    "linear_ops",
    "not_executed",
    "one_forward",
    "prepare_and_release",
    "quantize_input",
    "rope_tables",
    "shard_mlp",
    "static_scales",
]
