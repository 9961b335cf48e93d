"""What released bytes buy: tokens of the KV cache on one rank."""

from __future__ import annotations

import re
from typing import Any

from attrs import frozen

from npu_backend.errors import DeploymentError
from npu_backend.model.records import MlaLayer
from npu_backend.model.weights import DTYPE_BYTES
from npu_backend.plan import ModelPlan

__all__ = ["KvBudget", "kv_bytes_per_token", "kv_tokens", "parse_bytes"]

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip


def parse_bytes(text: str, whom: str) -> int:
    """Return the bytes that a text such as ``64GiB`` or ``61.5GB`` means.

    Raises:
        DeploymentError: It means none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise DeploymentError(
            f"{text!r:.80} is not a size",
            whom=whom,
            why="a size is a number with B, KiB, MiB, GiB, TiB, KB, MB, GB, TB, or none for bytes",
            remedy=f"write for example {whom} 64GiB",
        )
    return int(float(found[1]) * unit)


def kv_bytes_per_token(layer: MlaLayer) -> int:
    """Return bytes of one token in a layer's latent and key cache; an indexer's own cache is not
    among them."""
    latent = layer.latent_width * DTYPE_BYTES[layer.kv_layout.latent_dtype]
    return latent + layer.key_width * DTYPE_BYTES[layer.key_dtype]


@frozen
class KvBudget:
    """Tokens that fit into what is left for the KV cache.

    Args:
        memory: Bytes of the device.
        fraction: Part of it that weights and cache may take.
        loaded: Bytes of all weights of the rank after load, before copies and release.
        loaded_given: Whether ``loaded`` was given, or counts the attention's weights alone.
        per_token: Bytes of one token in the caches of all planned layers.
        without: Tokens with every copy made and nothing released.
        planned: Tokens under the plan.
    """

    memory: int
    fraction: float
    loaded: int
    loaded_given: bool
    per_token: int
    without: int
    planned: int

    @property
    def gained(self) -> int:
        """Tokens that the release buys."""
        return self.planned - self.without

    def tokens(self, resident_change: int) -> int:
        """Return the tokens with other bytes resident than loaded.

        Args:
            resident_change: Resident bytes beside the loaded ones; negative where some went.
        """
        left = int(self.memory * self.fraction) - self.loaded - resident_change
        return max(0, left // self.per_token) if self.per_token else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "memory": self.memory,
            "fraction": self.fraction,
            "loaded": self.loaded,
            "loaded_given": self.loaded_given,
            "bytes_per_token": self.per_token,
            "tokens_without_release": self.without,
            "tokens": self.planned,
            "gained": self.gained,
        }


def kv_tokens(plan: ModelPlan, memory: int, fraction: float, loaded: int | None = None) -> KvBudget:
    """Return the tokens that fit on one rank, with the plan's release and without.

    Args:
        plan: The plan; its layers are those of the rank.
        memory: Bytes of the device.
        fraction: Part of it for weights and KV cache, above 0 and up to 1.
        loaded: Bytes of all weights of the rank; default the planned attention weights alone.

    Raises:
        DeploymentError: The fraction is out of range.
    """
    if not 0 < fraction <= 1:
        raise DeploymentError(
            f"{fraction} is not a part of a memory",
            whom="--mem-fraction",
            why="it is the part of the device's memory for weights and KV cache",
            remedy="give a number above 0 and up to 1",
        )
    totals = plan.totals
    bare = KvBudget(
        memory,
        fraction,
        totals.loaded if loaded is None else loaded,
        loaded is not None,
        sum(kv_bytes_per_token(layer.layer) for layer in plan.layers),
        0,
        0,
    )
    gone = totals.release + totals.restore
    return KvBudget(
        bare.memory,
        bare.fraction,
        bare.loaded,
        bare.loaded_given,
        bare.per_token,
        bare.tokens(totals.prepared),
        bare.tokens(totals.prepared - gone),
    )
