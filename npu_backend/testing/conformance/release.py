"""The conformance suite of a release policy: votes on which weights may go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
from attrs import evolve, frozen

from npu_backend.deployment import PROMISE_READERS, Deployment, Phase
from npu_backend.model.records import Indexer, MlaLayer
from npu_backend.model.weights import loaded_weights
from npu_backend.offers import Record, Release
from npu_backend.plan import LayerPlan
from npu_backend.planner import plan_model
from npu_backend.planner.readers import counting
from npu_backend.runtime.prove import prove_layer
from npu_backend.testing.conformance.base import Conformance
from npu_backend.testing.conformance.places import (
    Place,
    everywhere,
    home_of,
    opened,
    parameter,
)
from npu_backend.testing.conformance.subject import Subject

__all__ = ["ReleaseCase", "ReleasePolicyConformance"]

_DIMS: dict[str, Any] = {
    "layer_id": 3,
    "hidden_size": 64,
    "num_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
_FUSED = {
    **_DIMS,
    "hidden_size": 1024,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
LAYERS = (
    MlaLayer(**_DIMS),
    MlaLayer(**{**_DIMS, "q_lora_rank": None}),
    MlaLayer(**_DIMS, indexer=Indexer("own"), quant={"q_b_proj": "w8a8-dynamic"}),
    MlaLayer(**_FUSED),
    MlaLayer(**_FUSED, indexer=Indexer("own"), is_nextn=True),
)
"""Layers of every kind that a policy has to tell apart: with and without a compressed query, an
indexer, quantized projections, fused paths, and an MTP layer."""
DEPLOYMENTS: tuple[Mapping[str, Any], ...] = (
    {"role": "null"},
    {"role": "prefill"},
    {"role": "decode"},
    {"role": "decode", "max_tokens": 8},
    {"role": "decode", "promises": ["weight_update"]},
    {"role": "decode", "promises": ["export"]},
    {"role": "decode", "promises": ["local_prefill"]},
    {"role": "decode", "promises": ["weight_update"], "restore": True},
    {"role": "decode", "promises": ["role_switch"], "restore": True},
    {"role": "decode", "promises": ["lora"]},
    {"role": "decode", "promises": ["draft_sharing"]},
    {"role": "decode", "promises": ["parallel_copies"]},
    {"role": "decode", "promises": ["lora", "draft_sharing", "parallel_copies"], "restore": True},
    {"role": "prefill", "host": "sglang", "phases": ["extend"]},
)
"""Every role, and every promise that changes who reads."""


@frozen(cache_hash=True)
class ReleaseCase:
    """One layer in one deployment; its text names tests."""

    layer: MlaLayer
    options: tuple[tuple[str, Any], ...]
    number: int

    def __str__(self) -> str:
        said = dict(self.options)
        words = [str(said.pop("role", "null"))]
        for name, value in said.items():
            text = "+".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
            words.append(text if name == "promises" else f"{name}={text}")
        return f"layer{self.number}-{'-'.join(words)}"


Readers = dict[str, tuple[str, ...]]


class ReleasePolicyConformance(Conformance):
    """Shows that a policy frees nothing that is read. Subclass it and set ``plugin``.

    The plugin's votes are the only ones: the built-in policy is left out, so what goes goes by it.

    Attributes:
        layers: Layers that are voted on.
        deployments: Options of the deployments that are voted on.
        rows: Row counts of the steps before and after a release.
        devices: The last one that there is counts.
    """

    layers: ClassVar[Sequence[MlaLayer]] = LAYERS
    deployments: ClassVar[Sequence[Mapping[str, Any]]] = DEPLOYMENTS
    rows: ClassVar[Sequence[int]] = (2,)
    without: ClassVar[Sequence[str]] = ("role_release",)

    @classmethod
    def cases(cls) -> tuple[ReleaseCase, ...]:
        """Return every layer in every deployment."""
        return tuple(
            ReleaseCase(
                layer,
                tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in options.items()),
                i,
            )
            for i, layer in enumerate(cls.layers)
            for options in cls.deployments
        )

    @classmethod
    def ask(cls, subject: Subject, case: ReleaseCase, deployment: Deployment) -> tuple[Record, ...]:
        """Ask ``release_weights`` with the readers of the layer's plan."""
        plan = _plan(subject, case, deployment)
        readers = {w.name: w.readers for w in plan.weights if w.copy_of is None}
        return subject.votes(case.layer, deployment, readers)

    # --- pytest ---------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each test its cases and places."""
        if "place" in metafunc.fixturenames:
            own = everywhere()[0]
            found = [
                parameter(place, case, id=f"{place}-{case}")
                # Bytes are counted by a device's allocator; the CPU keeps no account.
                for place in home_of([own], self.devices)[-1:]
                for case in self.cases()
                # What a promised phase reads is the host's to bring back before it runs.
                if not (dict(case.options).get("restore") and self._switches(case))
            ]
            metafunc.parametrize(("place", "case"), found)
        elif "case" in metafunc.fixturenames:
            metafunc.parametrize("case", [pytest.param(c, id=str(c)) for c in self.cases()])

    def _switches(self, case: ReleaseCase) -> bool:
        return "role_switch" in dict(case.options).get("promises", ())

    @pytest.fixture
    def at(self, request: pytest.FixtureRequest, place: Place | None) -> Place:
        """The place of a test, its device up."""
        assert place is not None
        return opened(place, request)

    def _deployment(self, case: ReleaseCase, place: tuple[str, str] | None = None) -> Deployment:
        options = {**self.deployment, **dict(case.options)}
        return Place("cpu", *(place or everywhere()[0])).deployment(**options)

    # --- tests ----------------------------------------------------------------------------------

    def test_claims(self) -> None:
        """It answers on every chip and CANN, and lets something go somewhere."""
        subject, released = self.subject(), False
        for case in self.cases():
            for place in everywhere():
                deployment = self._deployment(case, place)
                votes = subject.votes(case.layer, deployment, _unread(case.layer))
                released |= any(isinstance(v, Release) for v in votes)
        if not released:
            pytest.fail(f"{subject.info} never votes to release anything: nothing can be shown")

    def test_votes_name_the_layer_s_weights(self, case: ReleaseCase) -> None:
        """A vote on a weight that the layer does not have is a slip that frees nothing."""
        votes = self._votes(case, _unread(case.layer))
        unknown = sorted({v for v, _ in votes} - set(case.layer.weight_names))
        if unknown:
            pytest.fail(f"{self.subject().info} votes on {', '.join(unknown)}, no weights of it")

    def test_what_is_read_is_not_let_go(self, case: ReleaseCase) -> None:
        """No vote releases a weight with a reader that counts, whoever the reader is."""
        deployment, faults = self._deployment(case), []
        for readers in _reader_sets(case, deployment):
            for name, vote in self._votes(case, readers):
                who = counting(readers.get(name, ()), deployment)
                if vote == "Release" and who:
                    faults.append(f"it would let {name} go, which {', '.join(who)} reads")
        if faults:
            pytest.fail("\n  ".join([f"{self.subject().info}, {case}", *dict.fromkeys(faults)]))

    def test_answers_are_stable(self) -> None:
        """Twins have the same votes, and so has who asks again; readers stay as they are."""
        subject, faults = self.subject(), []
        for case in self.cases():
            deployment, readers = self._deployment(case), _unread(case.layer)
            before, first = dict(readers), subject.votes(case.layer, deployment, readers)
            twins = [
                evolve(case.layer, layer_id=case.layer.layer_id + n, prefix=f"model.layers.{n}")
                for n in (1, 40)
            ]
            turned = dict(reversed(readers.items()))
            asked = {
                "asked again": subject.votes(case.layer, deployment, readers),
                **{f"asked for its twin {t}": subject.votes(t, deployment, readers) for t in twins},
                "with readers in another order": subject.votes(case.layer, deployment, turned),
            }
            faults += [
                f"{case}: {how}, it votes differently"
                for how, votes in asked.items()
                if set(votes) != set(first)
            ]
            if readers != before:
                faults.append(f"{case}: it changes the readers that it is shown")
        if faults:
            pytest.fail("\n  ".join([str(subject.info), *faults[:12]]))

    def test_a_layer_lives_on(self, at: Place, case: ReleaseCase) -> None:
        """Planned with its votes and released, a layer gives the same bits as before, and the bytes
        are freed that the plan says."""
        options = {**self.deployment, **dict(case.options)}
        plan = _plan(self.subject(), case, at.deployment(**options))
        proof = prove_layer(plan, device=at.torch_device, rows=tuple(self.rows), row_cap=64)
        if not proof.passed:
            told = [f"{p.name}: {p.text}" for p in proof.failed]
            pytest.fail("\n  ".join([f"{self.subject().info}, {case}", *told]))

    def _votes(self, case: ReleaseCase, readers: Readers) -> list[tuple[str, str]]:
        votes = self.subject().votes(case.layer, self._deployment(case), readers)
        return [(str(getattr(v, "weight", v)), type(v).__name__) for v in votes]


def _unread(layer: MlaLayer) -> Readers:
    return {spec.name: () for spec in loaded_weights(layer, 1)}


def _reader_sets(case: ReleaseCase, deployment: Deployment) -> Iterator[Readers]:
    """Yield readers: nobody, everybody, each weight read alone, and each left unread alone."""
    nobody = _unread(case.layer)
    phases = list(deployment.reach(is_nextn=case.layer.is_nextn))
    who = [f"v_up@{phases[0]}", f"absorb@{phases[-1]}", f"host:mha@{Phase.EXTEND}"]
    yield nobody
    for reader in (*who, *PROMISE_READERS):
        yield dict.fromkeys(nobody, (reader,))
        for name in nobody:
            yield {**nobody, name: (reader,)}
            yield {**dict.fromkeys(nobody, (reader,)), name: ()}


def _plan(subject: Subject, case: ReleaseCase, deployment: Deployment) -> LayerPlan:
    return plan_model([case.layer], deployment, subject.registry).layers[0]
