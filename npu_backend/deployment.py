"""Where and how a model is served: role, chip, versions, sizes, reachable phases, promises.

A :class:`Deployment` is complete in itself: what it does not say has a stated default, and every
version that follows from another one (TorchNPU line, limits) is derived here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cached_property
from typing import Any

from attrs import evolve, field, frozen

from npu_backend.catalog import Catalog, KernelOrder, load_catalog
from npu_backend.catalog.versions import cann_key, suggest
from npu_backend.errors import DeploymentError
from npu_backend.values import flag, instance, items, text, whole

__all__ = [
    "HOSTS",
    "KERNEL_LIBRARIES",
    "PROMISES",
    "PROMISE_READERS",
    "ROLE_PHASES",
    "Deployment",
    "KernelLibrary",
    "Phase",
    "Reach",
    "Request",
    "Role",
    "Soc",
]


class Phase(str, Enum):
    """How a step reads a layer."""

    EXTEND = "extend"
    DECODE = "decode"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"
    IDLE = "idle"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def parse(cls, word: str | Phase) -> Phase:
        """Return the phase of that name, or raise an error with a suggestion."""
        try:
            return cls(word)
        except ValueError as err:
            raise DeploymentError(
                f"{word!r} is not a phase{suggest(str(word), [p.value for p in cls])}",
                whom="the phases of the deployment",
                why="the phases are " + ", ".join(p.value for p in cls),
                remedy="name one of them",
                code="phase",
            ) from err


class Role(str, Enum):
    """Disaggregation role of a worker."""

    NULL = "null"
    PREFILL = "prefill"
    DECODE = "decode"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def parse(cls, word: str | Role | None) -> Role:
        """Return the role of that name.

        Raises:
            DeploymentError: ``role.unknown``: None (not yet published) or no role's name.
        """
        try:
            return cls(word)
        except ValueError as err:
            raise DeploymentError(
                "the role is not known" if word is None else f"{word!r} is not a role",
                whom="the deployment",
                why=(
                    "the host has not published it yet"
                    if word is None
                    else "the roles are " + ", ".join(r.value for r in cls)
                ),
                remedy="plan once the host has published its role: null, prefill or decode",
                code="role.unknown",
            ) from err


ROLE_PHASES: Mapping[Role, tuple[Phase, ...]] = {
    Role.NULL: tuple(Phase),
    Role.PREFILL: (Phase.EXTEND, Phase.IDLE),
    Role.DECODE: (Phase.DECODE, Phase.TARGET_VERIFY, Phase.DRAFT_EXTEND, Phase.IDLE),
}
"""What a role reaches unless a deployment says otherwise."""

PROMISES = (
    "weight_update",
    "lora",
    "role_switch",
    "export",
    "local_prefill",
    "draft_sharing",
    "parallel_copies",
)
"""What a host may promise to do later, and what a release must therefore respect.

``draft_sharing``: a draft model takes these weights as its own. ``parallel_copies``: other expert-
or pipeline-parallel ranks copy them from this one.
"""

PROMISE_READERS: Mapping[str, str] = {
    "update": "weight_update",
    "export": "export",
    "lora": "lora",
    "draft": "draft_sharing",
    "peers": "parallel_copies",
}
"""Readers that exist only through a promise, and the promise of each. What a promised role switch
reads has the names of steps, such as ``absorb@extend``."""

KERNEL_LIBRARIES = ("sgl-kernel-npu", "vllm-ascend", "none")
"""Who supplies the ops that torch_npu lacks."""

HOSTS = ("sglang", "vllm-ascend")
"""Hosts whose own code serves some of a layer's phases or leaves weights in its own layout."""

Reach = Mapping[Phase, "int | None"]
"""Reachable phases of one layer with their row bounds (None: unbounded), in phase order."""


@frozen
class Soc:
    """A chip: its family (A2, A3, A5, 310P, 910, 310B) and, where known, the runtime's name."""

    family: str
    name: str | None = None

    @classmethod
    def parse(cls, value: str | Soc, catalog: Catalog | None = None) -> Soc:
        """Return the chip of a family or runtime name; see :meth:`Versions.soc`."""
        if isinstance(value, Soc):
            return value
        record = (catalog or load_catalog()).versions.soc(value)
        return cls(record.family, record.name)

    def __str__(self) -> str:
        return self.family if self.name is None else f"{self.family} ({self.name})"


_NAME_A_LIBRARY = (
    f"give one of {', '.join(KERNEL_LIBRARIES)}, with ==VERSION where the version is known"
)


@frozen
class KernelLibrary:
    """The library that supplies the ops torch_npu lacks, and its version where it is known."""

    name: str = "sgl-kernel-npu"
    version: str | None = None

    @classmethod
    def parse(cls, text: str | KernelLibrary | None) -> KernelLibrary:
        """Return the library of ``NAME`` or ``NAME==VERSION``."""
        if isinstance(text, KernelLibrary):
            return text
        given = "none" if text is None else _text(text, "a kernel library", _NAME_A_LIBRARY)
        name, equals, version = given.partition("==")
        if name not in KERNEL_LIBRARIES:
            raise DeploymentError(
                f"{name!r} is not a kernel library{suggest(name, KERNEL_LIBRARIES)}",
                whom="the kernel library of the deployment",
                why="the libraries are " + ", ".join(KERNEL_LIBRARIES),
                remedy=_NAME_A_LIBRARY,
                code="library.version",
            )
        if equals:
            _check_version(name, version)
        return cls(name, version if equals else None)

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}=={self.version}"


def _check_version(name: str, version: str) -> None:
    from packaging.version import InvalidVersion, Version

    why = ""
    if name == "none":
        why = "without a library there is no version"
    else:
        try:
            Version(version)
        except InvalidVersion:
            why = "it is no version as packages have them (PEP 440)"
    if why:
        raise DeploymentError(
            f"{version!r:.80} is not a version of {name}",
            whom="the kernel library of the deployment",
            why=why,
            remedy=f"give what pip shows, or {name} alone where the version is not known",
            code="library.version",
        )


_KINDS = ("path", "q_absorb", "v_up")


@frozen
class Request:
    """An explicit wish, which is a contract: met, or an error.

    Args:
        kind: ``path``, ``q_absorb`` or ``v_up``.
        name: A strategy's name; for paths also ``fused``.
        dist: Distribution whose strategy is meant, where two plugins use one name.
        nextn: Binds the MTP layers instead of the main layers.
    """

    kind: str
    name: str
    dist: str | None = None
    nextn: bool = False

    @classmethod
    def parse(cls, text: str | Request) -> Request:
        """Return the request of ``KIND=[DIST/]NAME[@nextn]``."""
        if isinstance(text, Request):
            return text
        text = _text(text, "a request", "write for example path=mlaprolog")
        kind, equals, rest = text.partition("=")
        if not equals or not rest or kind not in _KINDS:
            raise DeploymentError(
                f"{text!r} is not a request{'' if kind in _KINDS else suggest(kind, _KINDS)}",
                whom="the requests of the deployment",
                why="a request is KIND=NAME with KIND one of " + ", ".join(_KINDS),
                remedy="write for example path=mlaprolog, path=absorb@nextn or v_up=DIST/torch.bmm",
                code="request.unmet",
            )
        name, at, scope = rest.partition("@")
        if at and scope != "nextn":
            raise DeploymentError(
                f"{text!r} has the unknown scope @{scope}",
                whom="the requests of the deployment",
                why="the only scope is @nextn: the MTP layers",
                remedy="drop the scope, or write @nextn",
                code="request.unmet",
            )
        dist, slash, strategy = name.partition("/")
        if slash and dist and strategy:
            return cls(kind, strategy, dist, bool(at))
        if slash:
            raise DeploymentError(
                f"{text!r} names {'no distribution' if strategy else 'no strategy'}",
                whom="the requests of the deployment",
                why="what stands before the slash is a distribution, behind it a strategy",
                remedy="write KIND=DIST/NAME, or KIND=NAME",
                code="request.unmet",
            )
        return cls(kind, name, None, bool(at))

    def __str__(self) -> str:
        dist = f"{self.dist}/" if self.dist else ""
        return f"{self.kind}={dist}{self.name}{'@nextn' if self.nextn else ''}"


def _role(value: str | Role | None) -> Role:
    return Role.parse(value)


def _text(value: Any, what: str, remedy: str) -> str:
    if isinstance(value, str):
        return value
    raise DeploymentError(
        f"{value!r:.80} is not {what}",
        whom="the deployment",
        why="it is None" if value is None else f"it is a {type(value).__name__}",
        remedy=remedy,
    )


def _soc(value: str | Soc) -> Soc:
    # A name is looked up in the deployment's own catalog, once that is known.
    if isinstance(value, Soc):
        return value
    return Soc("", _text(value, "a chip", "give a family such as A3, or a runtime name"))


def _kernels(value: str | KernelLibrary | None) -> KernelLibrary:
    return KernelLibrary.parse(value)


def _phases(value: Iterable[str | Phase] | str | None) -> tuple[Phase, ...] | None:
    if value is None:
        return None
    given = value.split(",") if isinstance(value, str) else value
    words = items(DeploymentError, "the phases of the deployment", given, "a list of phases")
    chosen = {Phase.parse(w.strip() if isinstance(w, str) else w) for w in words if w != ""}
    if not chosen:
        raise DeploymentError(
            "no phase is named",
            whom="the phases of the deployment",
            why="the phases replace the role's, and a worker without a phase never runs",
            remedy="name at least one of " + ", ".join(p.value for p in Phase) + ", or give none",
            code="phase",
        )
    return tuple(p for p in Phase if p in chosen)


def _max_tokens(value: Mapping[Any, int] | int | None) -> tuple[tuple[Phase, int], ...]:
    if value is None:
        return ()
    given: Any = value
    if not isinstance(given, Mapping):
        # evolve() hands the pairs back; whatever else is no number is refused below.
        pairs = isinstance(given, tuple) and all(
            isinstance(p, tuple) and len(p) == 2 for p in given
        )
        given = dict(given) if pairs else dict.fromkeys(Phase, given)
    bounds = {Phase.parse(p): n for p, n in given.items()}
    for phase, bound in bounds.items():
        if not isinstance(bound, int) or isinstance(bound, bool) or bound < 1:
            raise DeploymentError(
                f"the row bound {bound!r:.80} of phase {phase} is not a positive number",
                whom="the row bounds of the deployment",
                why="rows start at 1; a phase that never runs is left out of the phases",
                remedy="give a bound of at least 1, or leave the phase out with phases",
                code="tokens.limit",
            )
    return tuple((p, bounds[p]) for p in Phase if p in bounds)


def _promises(value: Iterable[str] | str) -> frozenset[str]:
    given = [value] if isinstance(value, str) else value
    words = items(DeploymentError, "the promises of the deployment", given, "a list of promises")
    for word in words:
        if word not in PROMISES:
            raise DeploymentError(
                f"{word!r:.80} is not a promise{suggest(str(word), PROMISES)}",
                whom="the promises of the deployment",
                why="the promises are " + ", ".join(PROMISES),
                remedy="name one of them",
            )
    return frozenset(words)


def _requests(value: Iterable[str | Request] | str) -> tuple[Request, ...]:
    given = [value] if isinstance(value, str | Request) else value
    wanted = items(DeploymentError, "the requests of the deployment", given, "a list of requests")
    return tuple(dict.fromkeys(Request.parse(item) for item in wanted))


def _host(value: str | None) -> str | None:
    if value is not None and value not in HOSTS:
        raise DeploymentError(
            f"{value!r:.80} is not a host{suggest(str(value), HOSTS)}",
            whom="the host of the deployment",
            why="the hosts are " + ", ".join(HOSTS),
            remedy="name one of them, or none",
        )
    return value


_VERSION = text(DeploymentError, optional=True)
_SIZE = whole(DeploymentError, 1, optional=True)
_FLAG = flag(DeploymentError)
_CATALOG = instance(DeploymentError, Catalog, "what npu_backend.load().catalog holds")

EQUAL_PARTS = "attention-TP groups are equal parts of the TP group"


def tp_sizes(tp_size: int | None, attn_tp_size: int | None) -> tuple[int, int]:
    """Return TP and attention-TP size; one that is None is the other's, both None are 1.

    Raises:
        DeploymentError: Attention TP does not divide TP.
    """
    tp, attn = tp_size or attn_tp_size or 1, attn_tp_size or tp_size or 1
    if tp % attn:
        raise DeploymentError(
            f"attention TP {attn} does not divide TP {tp}",
            whom="the sizes of the deployment",
            why=f"rule attn_tp.divides_tp: {EQUAL_PARTS}",
            remedy="give an attention-TP size that divides the TP size",
        )
    return tp, attn


@frozen(kw_only=True, cache_hash=True)
class Deployment:
    """Everything a decision may depend on beside the layer itself.

    Args:
        role: Disaggregation role; None (not yet published) is an error.
        soc: Family or runtime name of the chip.
        cann: CANN release; default: the newest known.
        torch_npu: torch-npu package version or TorchNPU line; default: paired with ``cann``.
        kernels: Library of the ops torch_npu lacks, ``NAME`` or ``NAME==VERSION``.
        tp_size: Tensor-parallel size; default: ``attn_tp_size``.
        attn_tp_size: Tensor-parallel size of attention; default: ``tp_size``.
        context_parallel_size: Ranks that share one sequence's context.
        host: ``sglang``, ``vllm-ascend`` or None.
        phases: Replaces the role's default phases.
        max_tokens: Row bounds, one number for every phase or a mapping from phase.
        requests: ``KIND=NAME`` texts or :class:`Request` records.
        graph_capture: Steps are captured into graphs.
        batch_invariant: Results must not depend on the number of rows in the batch.
        promises: Subset of :data:`PROMISES`.
        restore: Release restorably instead of keeping what only a promise reads.
        catalog: The figures to decide by; default: the bundled catalog.

    Raises:
        DeploymentError: A value is unknown or impossible.
    """

    role: Role = field(converter=_role, default=Role.NULL)
    catalog: Catalog = field(factory=load_catalog, repr=False, validator=_CATALOG)
    soc: Soc = field(converter=_soc, default=Soc("A3"))
    cann: str | None = field(default=None, validator=_VERSION)
    torch_npu: str | None = field(default=None, validator=_VERSION)
    kernels: KernelLibrary = field(converter=_kernels, default=KernelLibrary())
    tp_size: int = field(default=None, validator=_SIZE)
    attn_tp_size: int = field(default=None, validator=_SIZE)
    context_parallel_size: int = field(default=1, validator=whole(DeploymentError, 1))
    host: str | None = field(converter=_host, default=None)
    phases: tuple[Phase, ...] | None = field(converter=_phases, default=None)
    max_tokens: tuple[tuple[Phase, int], ...] = field(converter=_max_tokens, default=None)
    requests: tuple[Request, ...] = field(converter=_requests, default=())
    graph_capture: bool = field(default=False, validator=_FLAG)
    batch_invariant: bool = field(default=False, validator=_FLAG)
    promises: frozenset[str] = field(converter=_promises, default=())
    restore: bool = field(default=False, validator=_FLAG)

    def __attrs_post_init__(self) -> None:
        set_ = object.__setattr__
        if not self.soc.family:
            set_(self, "soc", Soc.parse(self.soc.name or "", self.catalog))
        tp, attn = tp_sizes(self.tp_size, self.attn_tp_size)
        set_(self, "tp_size", tp)
        set_(self, "attn_tp_size", attn)
        # Versions are looked up now, so that a wrong one fails here and not in some hook.
        _ = (self.line, self.limits_cann)

    # --- versions (rule 9) -------------------------------------------------------------------

    @cached_property
    def line(self) -> str:
        """The TorchNPU line: that of ``torch_npu``, else paired with ``cann``, else the newest."""
        versions = self.catalog.versions
        if self.torch_npu is not None:
            return versions.line_of(self.torch_npu)
        if self.cann is not None:
            return versions.line_for_cann(self.cann)
        return versions.newest_line

    @cached_property
    def cann_release(self) -> str:
        """The known CANN release whose description applies to ``cann``."""
        if self.cann is None:
            return self.catalog.versions.newest_cann
        return self.catalog.versions.known_cann(self.cann)[0]

    @cached_property
    def limits_cann(self) -> str:
        """The release whose limits apply: the lower of the line's pair and ``cann``."""
        return min(self.cann_release, self.catalog.versions.paired_cann(self.line), key=cann_key)

    @cached_property
    def limits_line(self) -> str:
        """The line whose documents apply: the lower of the line and the one CANN pairs with."""
        versions = self.catalog.versions
        return min(self.line, versions.line_for_cann(self.limits_cann), key=versions.line_order)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the lookup of versions had to assume."""
        if self.cann is None:
            return ()
        warning = self.catalog.versions.known_cann(self.cann)[1]
        return (f"{warning}; the limits of CANN {self.limits_cann} are used",) if warning else ()

    # --- reachable phases (rule 1) -----------------------------------------------------------

    @cached_property
    def _own_phases(self) -> frozenset[Phase]:
        own = set(ROLE_PHASES[self.role] if self.phases is None else self.phases)
        if "local_prefill" in self.promises:
            own.add(Phase.EXTEND)
        return frozenset(own)

    @cached_property
    def _promised_phases(self) -> frozenset[Phase]:
        if "role_switch" not in self.promises:
            return frozenset()
        both = {*ROLE_PHASES[Role.PREFILL], *ROLE_PHASES[Role.DECODE]}
        return frozenset(both - self._own_phases)

    @cached_property
    def _reaches(self) -> dict[bool, dict[Phase, int | None]]:
        bounds = dict(self.max_tokens)
        reached = self._own_phases | self._promised_phases
        return {
            is_nextn: {
                p: bounds.get(p)
                for p in Phase
                if p in reached
                and p is not (Phase.TARGET_VERIFY if is_nextn else Phase.DRAFT_EXTEND)
            }
            for is_nextn in (False, True)
        }

    def reach(self, *, is_nextn: bool) -> Reach:
        """Return the phases a main or an MTP layer can run, each with its row bound."""
        return self._reaches[is_nextn]

    def is_promised(self, reader: str) -> bool:
        """Whether a reader such as ``absorb@extend`` or ``update`` exists only by a promise."""
        if reader in PROMISE_READERS:
            return True
        phase = reader.rpartition("@")[2]
        return phase in {p.value for p in self._promised_phases}

    # --- shorthands for plugins --------------------------------------------------------------

    def value(self, op: str, key: str) -> Any:
        """Return a catalog figure's value for these versions and this chip, or None."""
        return self.catalog.value(
            op, key, cann=self.limits_cann, line=self.limits_line, soc=self.soc.family
        )

    def source(self, op: str, key: str) -> str:
        """Return where a catalog figure comes from."""
        figure = self.catalog.figure(
            op, key, cann=self.limits_cann, line=self.limits_line, soc=self.soc.family
        )
        return "not documented" if figure is None else figure.source

    def kernel_order(
        self, site: str, shape: tuple[int, int, int], dtype: str
    ) -> KernelOrder | None:
        """Return the measured order of a matmul's kernels on this chip and CANN, or None."""
        return self.catalog.kernel_order(self.soc.family, self.cann_release, site, shape, dtype)

    def has_op(self, op: str) -> bool:
        """Whether the TorchNPU line registers ``npu::NAME``."""
        return self.catalog.has_op(op, self.line)

    def evolve(self, **changes: Any) -> Deployment:
        """Return a copy with changes; derived values are derived anew."""
        return evolve(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        reach: dict[str, int | None] = {}
        for is_nextn in (False, True):
            reach |= {p.value: bound for p, bound in self.reach(is_nextn=is_nextn).items()}
        return {
            "role": self.role.value,
            "soc": {"family": self.soc.family, "name": self.soc.name},
            "cann": self.cann_release if self.cann is None else self.cann,
            "torch_npu": self.torch_npu,
            "line": self.line,
            "limits_cann": self.limits_cann,
            "kernels": str(self.kernels),
            "tp_size": self.tp_size,
            "attn_tp_size": self.attn_tp_size,
            "context_parallel_size": self.context_parallel_size,
            "host": self.host,
            "phases": {p.value: reach[p.value] for p in Phase if p.value in reach},
            "requests": [str(r) for r in self.requests],
            "graph_capture": self.graph_capture,
            "batch_invariant": self.batch_invariant,
            "promises": sorted(self.promises),
            "restore": self.restore,
            "catalog": self.catalog.version,
        }
