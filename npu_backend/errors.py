"""The error classes: every message says what failed, for whom, why, and what to do next.

The parts stay readable as attributes, so a host can log them one by one and a test can compare
them without parsing text.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "BoundExceededError",
    "CatalogError",
    "DeploymentError",
    "ModelError",
    "NotExecutedError",
    "NpuBackendError",
    "PlanMismatchError",
    "PluginError",
    "PrepareError",
    "RequestUnmetError",
    "SchemaMismatchError",
    "SelectionError",
    "WeightReleasedError",
]


class NpuBackendError(Exception):
    """Base of every error of this project.

    Args:
        what: What failed, one sentence.
        whom: For whom: a layer, a file, a plugin, a request.
        why: The reasons, all of them, each a sentence (often ``code: message``).
        remedy: What to do next.
        code: The stable reason code, where there is one.
    """

    def __init__(
        self,
        what: str,
        *,
        whom: str | None = None,
        why: Iterable[str] = (),
        remedy: str | None = None,
        code: str | None = None,
    ) -> None:
        self.what = what
        self.whom = whom
        self.why = (why,) if isinstance(why, str) else tuple(why)
        self.remedy = remedy
        self.code = code
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [f"{self.code}: {self.what}" if self.code else self.what]
        if self.whom:
            lines.append(f"  for: {self.whom}")
        lines.extend(f"  why: {reason}" for reason in self.why)
        if self.remedy:
            lines.append(f"  do:  {self.remedy}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """Return the parts as plain data, the form the command line prints under ``--json``."""
        return {
            "type": type(self).__name__,
            "code": self.code,
            "what": self.what,
            "whom": self.whom,
            "why": list(self.why),
            "remedy": self.remedy,
        }


class CatalogError(NpuBackendError):
    """The catalog or a user's override of it cannot be used."""


class ModelError(NpuBackendError):
    """A model description is missing, broken, contradictory, or not MLA."""


class DeploymentError(NpuBackendError):
    """A deployment is impossible: unknown role, chip, version, or sizes that do not divide."""


class PluginError(NpuBackendError):
    """A plugin cannot be loaded, or failed under strict mode."""


class SelectionError(NpuBackendError):
    """Something reachable has no legal strategy."""


class RequestUnmetError(SelectionError):
    """An explicit request cannot be met."""


class PlanMismatchError(NpuBackendError):
    """Two ranks, or a plan and the tensors at hand, do not agree."""


class PrepareError(NpuBackendError):
    """Preparing a layer failed; its weights are as they were."""


class NotExecutedError(PrepareError):
    """What is planned is not executed yet by this release; no fault of the plan or the weights."""


class SchemaMismatchError(NpuBackendError):
    """An installed op's schema is not the one the catalog holds for its line."""


class BoundExceededError(NpuBackendError):
    """A step broke a bound that the plan relied on: a row count or an unreachable phase."""


class WeightReleasedError(NpuBackendError):
    """A released weight was about to be read.

    Attributes:
        layer: The layer's id, or None where it is not known.
        weight: The weight's name.
    """

    def __init__(
        self,
        what: str,
        *,
        layer: int | None = None,
        weight: str | None = None,
        why: Iterable[str] = (),
        remedy: str | None = None,
    ) -> None:
        self.layer = layer
        self.weight = weight
        place = f"layer {layer}, weight {weight}" if weight else f"layer {layer}"
        super().__init__(what, whom=place, why=why, remedy=remedy, code="weight.read")
