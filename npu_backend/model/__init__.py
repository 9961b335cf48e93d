"""What a model is, as far as MLA attention is concerned; no tensors, no torch.

``records`` holds the records, ``weights`` their weights and bytes, ``read`` turns files into them.
"""

from npu_backend.model.records import (
    INDEXER_KINDS,
    QUANT_KINDS,
    Indexer,
    KvLayout,
    Measured,
    MlaLayer,
    ModelInfo,
)
from npu_backend.model.weights import DTYPE_BYTES, WeightSpec, loaded_weights, nz_castable

__all__ = [
    "DTYPE_BYTES",
    "INDEXER_KINDS",
    "QUANT_KINDS",
    "Indexer",
    "KvLayout",
    "Measured",
    "MlaLayer",
    "ModelInfo",
    "WeightSpec",
    "loaded_weights",
    "nz_castable",
]
