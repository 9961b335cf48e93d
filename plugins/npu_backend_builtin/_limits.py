"""Compare a layer with the catalog's figures; the message is built from the figure used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from npu_backend import Deployment, Reason

__all__ = ["Check"]


class Check:
    """Collects every reason against one op on one deployment."""

    def __init__(self, op: str, deployment: Deployment) -> None:
        self.op = op
        self.deployment = deployment
        self.reasons: list[Reason] = []

    def figure(self, key: str) -> Any:
        """Return a figure for these versions and this chip, or None where there is none."""
        return self.deployment.value(self.op, key)

    def knows(self, key: str) -> bool:
        """Whether the catalog has a figure of that name for the op at all."""
        return key in self.deployment.catalog.limits[self.op]

    def add(self, code: str, message: str, figure: str | None = None) -> None:
        """Refuse, naming the version that the figure is of and where it comes from."""
        self.reasons.append(Reason(code, message + (self.cited(figure) if figure else "")))

    def cited(self, figure: str) -> str:
        """Return the version that a figure is of and where it comes from, in brackets."""
        source = self.deployment.source(self.op, figure)
        return f" [CANN {self.deployment.limits_cann}; {source}]"

    def member(self, code: str, what: str, value: object, figure: str) -> None:
        """Refuse a value that is not one of a figure's values."""
        allowed = self.figure(figure)
        if allowed is not None and value not in allowed:
            told = ", ".join(str(a) for a in allowed)
            self.add(code, f"{self.op} takes {what} {told}, not {value}", figure)

    def soc(self) -> bool:
        """Refuse a chip the op does not exist on, or is not documented for. True where it is."""
        family = self.deployment.soc.family
        if family in self.figure("soc_excluded"):
            self.add("soc.unsupported", f"{self.op} does not exist on {family}", "soc_excluded")
        elif family not in (self.figure("soc") or ()):
            known = ", ".join(self.figure("soc") or ()) or "no chip"
            self.add(
                "soc.undocumented",
                f"{self.op} is documented for {known} on line {self.deployment.line}, not for "
                f"{family}",
                "soc",
            )
        else:
            return True
        return False

    def op_present(self, op: str) -> None:
        """Refuse where the TorchNPU line does not register a torch_npu op."""
        if not self.deployment.catalog.has_op(op, self.deployment.line):
            since = self.deployment.catalog.op_since(op)
            when = f"since line {since}" if since else "in no known line"
            self.add(
                "op.missing",
                f"{op} is {when}; this is line {self.deployment.line} "
                f"[{self.deployment.catalog.schemas['source']}]",
            )
        elif not self.deployment.catalog.has_op(op, self.deployment.limits_line):
            # The package registers it, and what it calls comes with CANN.
            self.add(
                "op.missing",
                f"{op} is since line {self.deployment.catalog.op_since(op)}, and CANN "
                f"{self.deployment.limits_cann} is older than what that line is paired with",
            )

    def library_op(self, ops: dict[str, str]) -> str | None:
        """Return the op of the chosen kernel library, or refuse where it supplies none."""
        library = self.deployment.kernels.name
        op = ops.get(library)
        if op is None or not self.deployment.catalog.library_has_op(library, op):
            self.add(
                "op.missing",
                f"{self.op} is no op of torch_npu; it comes with {' or '.join(ops)}, and the "
                f"kernel library is {library} [{self.deployment.catalog.schemas['source']}]",
            )
            return None
        return op

    def fused_promises(self, names: Iterable[str] = ("q_a", "q_b", "kv_b")) -> None:
        """Refuse what every fused path bypasses: LoRA deltas and context parallelism."""
        if "lora" in self.deployment.promises:
            self.add(
                "promise.lora",
                f"LoRA on {', '.join(names)} is promised, and the fused op would bypass the deltas",
            )
        if self.deployment.context_parallel_size > 1:
            self.add(
                "parallel.context",
                f"context parallelism over {self.deployment.context_parallel_size} ranks: the "
                "fused op writes only its own rank's rows",
            )
