"""What a proof is, and what a run hands back: frozen records with a JSON form."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

__all__ = ["LayerProof", "Proof", "RunResult", "StepRecord"]


@frozen(kw_only=True)
class Proof:
    """One claim about a layer, and whether it held.

    Args:
        name: ``outputs``, ``cache``, ``equality``, ``bytes``, ``again`` (where steps brought
            something back), ``released``, ``unreachable``, ``steps``, ``layer``.
        passed: Whether it held. True where it was skipped.
        text: One sentence with the figures, or why it was skipped or failed.
        figures: The figures by name.
        skipped: There was nothing to prove; the text says why.
    """

    name: str
    passed: bool
    text: str
    figures: dict[str, Any] = field(factory=dict)
    skipped: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "passed": self.passed,
            "skipped": self.skipped,
            "text": self.text,
            "figures": dict(self.figures),
        }


@frozen(kw_only=True)
class StepRecord:
    """One step through the bound plan.

    Args:
        phase: Its phase.
        rows: Its rows.
        path: Strategy that served it.
        q_absorb: Kernel of that site at these rows, or None where the path does not use it.
        v_up: Likewise.
        error: Relative error of the output against the fp32 reference; None in phase idle, whose
            rows mean nothing.
        worst: Largest relative error of one token.
        equal: Whether outputs after the release equal those before, bit by bit; None if not run.
    """

    phase: str
    rows: int
    path: str
    q_absorb: str | None = None
    v_up: str | None = None
    error: float | None = None
    worst: float | None = None
    equal: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "phase": self.phase,
            "rows": self.rows,
            "path": self.path,
            "q_absorb": self.q_absorb,
            "v_up": self.v_up,
            "error": self.error,
            "worst": self.worst,
            "equal": self.equal,
        }


@frozen(kw_only=True)
class LayerProof:
    """Everything that was run and found of one layer.

    Args:
        layer_id: The layer.
        is_nextn: An MTP layer.
        device: Where it ran.
        dtype: Dtype of its activations.
        tolerance: Bound on the relative error.
        proofs: The claims.
        steps: The steps, each run before and after the release.
        skipped: What was not run, and why.
        notes: What a reader must know, such as who filled the cache.
        ledger: The ledger's JSON form, or None where there was no release.
        fingerprint: Fingerprint of the amended plan, or None where binding failed.
        seconds: Time by stage, for people; no measurement of anything but this machine.
    """

    layer_id: int
    is_nextn: bool = False
    device: str = "cpu"
    dtype: str = "bfloat16"
    tolerance: float = 0.0
    proofs: tuple[Proof, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ledger: dict[str, Any] | None = None
    fingerprint: str | None = None
    seconds: dict[str, float] = field(factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every claim held, and there was at least one."""
        return bool(self.proofs) and all(p.passed for p in self.proofs)

    @property
    def failed(self) -> tuple[Proof, ...]:
        """The claims that did not hold."""
        return tuple(p for p in self.proofs if not p.passed)

    def proof(self, name: str) -> Proof:
        """Return a claim by name."""
        for proof in self.proofs:
            if proof.name == name:
                return proof
        known = ", ".join(p.name for p in self.proofs)
        raise KeyError(f"layer {self.layer_id} has no proof {name!r}; it has {known}")

    @property
    def error(self) -> float | None:
        """Largest relative error of a step."""
        errors = [s.error for s in self.steps if s.error is not None]
        return max(errors) if errors else None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "layer_id": self.layer_id,
            "is_nextn": self.is_nextn,
            "passed": self.passed,
            "device": self.device,
            "dtype": self.dtype,
            "tolerance": self.tolerance,
            "proofs": [p.to_dict() for p in self.proofs],
            "steps": [s.to_dict() for s in self.steps],
            "skipped": list(self.skipped),
            "notes": list(self.notes),
            "ledger": self.ledger,
            "fingerprint": self.fingerprint,
            "seconds": {stage: round(s, 3) for stage, s in self.seconds.items()},
        }


@frozen(kw_only=True)
class RunResult:
    """A whole run.

    Args:
        device: Where it ran.
        seed: The seed.
        layers: One record a layer, in the plan's order.
    """

    device: str
    seed: int
    layers: tuple[LayerProof, ...]

    @property
    def passed(self) -> bool:
        """Whether every layer passed, and there was at least one."""
        return bool(self.layers) and all(layer.passed for layer in self.layers)

    @property
    def planned_bytes(self) -> int:
        """Bytes that the plans said would be freed, of the layers that came to their release."""
        return self._bytes("planned")

    @property
    def freed_bytes(self) -> int:
        """Bytes that were freed, by the proofs' own count."""
        return self._bytes("freed")

    def _bytes(self, figure: str) -> int:
        claims = [p for layer in self.layers for p in layer.proofs if p.name == "bytes"]
        return sum(int(p.figures[figure]) for p in claims)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "passed": self.passed,
            "device": self.device,
            "seed": self.seed,
            "bytes": {"planned": self.planned_bytes, "freed": self.freed_bytes},
            "layers": [layer.to_dict() for layer in self.layers],
        }
