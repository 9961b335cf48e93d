"""Where an op is called: chip, CANN and line; and the catalog's figures for that place.

The validators hold no figure of their own. This module is the only one that asks the catalog.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from attrs import frozen

from npu_backend.catalog import Figure, load_catalog
from npu_backend.catalog.versions import cann_key
from npu_backend.testing.sim.errors import OpRejectedError

__all__ = ["Place"]


@frozen
class Place:
    """A chip, a CANN version and a TorchNPU line.

    Limits follow the lower of line and CANN: each is paired with a CANN release, and neither gives
    more than the older of the two.

    Args:
        family: Chip family such as ``A3``.
        cann: CANN version of the device.
        line: TorchNPU line.
    """

    family: str
    cann: str
    line: str

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, soc: str, cann: str | None = None, line: str | None = None) -> Place:
        """Resolve a chip or family name; CANN defaults to the newest, the line to its pair."""
        versions = load_catalog().versions
        cann = cann or versions.newest_cann
        return cls(versions.soc(soc).family, cann, line or versions.line_for_cann(cann))

    def __str__(self) -> str:
        return f"{self.family}, CANN {self.cann}, line {self.line}"

    @cached_property
    def limiting_cann(self) -> str:
        """The lower of the CANN version and the one paired with the line."""
        return min(self.cann, load_catalog().versions.paired_cann(self.line), key=cann_key)

    @cached_property
    def limiting_line(self) -> str:
        """The lower of the line and the one paired with the CANN version."""
        versions = load_catalog().versions
        paired = versions.line_for_cann(self.limiting_cann)
        return min(self.line, paired, key=versions.line_order)

    def reject(self, op: str, reason: str) -> OpRejectedError:
        """Return the error with which an op refuses a call."""
        return OpRejectedError(op, reason, str(self))

    def figure(self, op: str, key: str) -> Figure | None:
        """Return a figure of the catalog at this place, or None where none is documented."""
        return load_catalog().figure(
            op, key, cann=self.limiting_cann, line=self.limiting_line, soc=self.family
        )

    def value(self, op: str, key: str) -> Any:
        """Return a figure's value. None lifts a limit; undocumented is refused.

        Raises:
            OpRejectedError: The catalog documents no figure for this place.
        """
        found = self.figure(op, key)
        if found is None:
            raise self.reject(op, f"{key} is not documented here, so no call is known to be legal")
        return found.value

    def check_chip(self, op: str) -> None:
        """Refuse a chip for which the op is not documented."""
        chips: Sequence[str] = self.value(op, "soc")
        if self.family not in chips:
            raise self.reject(op, f"not supported on {self.family}, only on {', '.join(chips)}")

    def check_line(self, op: str) -> None:
        """Refuse a line whose torch_npu does not register the op."""
        if not load_catalog().has_op(f"npu::{op}", self.line):
            raise self.reject(op, f"line {self.line} of torch_npu does not register it")

    def unlimited(self, op: str) -> bool:
        """Whether the chip has no limit of size or alignment for the op."""
        found = self.figure(op, "soc_unlimited")
        return found is not None and self.family in found.value
