"""Checks that all validators share: worded once, so that every op words them alike."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from npu_backend.testing.sim.limits import Place
from npu_backend.testing.sim.spec import FORMAT_ND, TensorSpec

__all__ = ["Check"]


@frozen
class Check:
    """Checks for one op at one place; each raises the op's refusal."""

    op: str
    place: Place

    def that(self, holds: bool, reason: str) -> None:
        """Refuse the call unless a condition holds."""
        if not holds:
            raise self.place.reject(self.op, reason)

    def rank(self, name: str, spec: TensorSpec, *ranks: int) -> None:
        wanted = " or ".join(str(r) for r in ranks)
        self.that(spec.rank in ranks, f"{name} should be {wanted}D, but is {spec.rank}D")

    def shape(self, name: str, spec: TensorSpec, *shape: int) -> None:
        self.that(spec.shape == shape, f"{name} should have shape {shape}, but has {spec.shape}")

    def dtype(self, name: str, spec: TensorSpec, allowed: Sequence[str]) -> None:
        self.that(
            spec.dtype in allowed,
            f"{name} supports dtype {', '.join(allowed)}, but is {spec.dtype}",
        )

    def contiguous(self, **specs: TensorSpec | None) -> None:
        for name, spec in specs.items():
            if spec is not None:
                self.that(spec.is_contiguous, f"{name} must be contiguous, strides {spec.stride}")

    def nz(self, **specs: TensorSpec) -> None:
        for name, spec in specs.items():
            self.that(spec.is_nz, f"{name} must be in FRACTAL_NZ, but is in format {spec.format}")

    def nd(self, **specs: TensorSpec | None) -> None:
        for name, spec in specs.items():
            if spec is not None:
                nd = spec.format == FORMAT_ND
                self.that(nd, f"{name} must be in ND, but is in format {spec.format}")

    def below(self, name: str, number: int, bound: int | None) -> None:
        if bound is not None:
            self.that(number < bound, f"{name} = {number} must be less than {bound}")

    def multiple(self, name: str, number: int, of: int) -> None:
        self.that(number % of == 0, f"{name} = {number} must be a multiple of {of}")

    def one_of(self, name: str, value: object, allowed: Sequence[object]) -> None:
        listed = ", ".join(str(item) for item in allowed)
        self.that(value in allowed, f"{name} = {value} is not supported, only {listed}")
