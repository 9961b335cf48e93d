"""What hooks are asked and what they answer: frozen records, nothing to mutate.

A plugin answers with :class:`Offer`, :class:`Decline`, :class:`Forbid` (paths and kernels) or with
:class:`Release` and :class:`Keep` (weights). Every answer stands in the plan, also a refusal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cached_property
from typing import Any

from attrs import evolve, field, frozen
from attrs.validators import in_, instance_of

from npu_backend.deployment import Phase
from npu_backend.model.records import KvLayout, MlaLayer

__all__ = [
    "REASON_CODES",
    "SITES",
    "SITE_WEIGHTS",
    "Answer",
    "BmmSpec",
    "Decline",
    "Envelope",
    "Failure",
    "Forbid",
    "Keep",
    "Offer",
    "PluginInfo",
    "Reason",
    "Release",
    "Status",
]

REASON_CODES: Mapping[str, str] = {
    "role.unknown": "The role is unknown or not yet published.",
    "soc.unsupported": "The strategy does not exist on this chip.",
    "soc.undocumented": "No document says that the strategy works on this chip with this line.",
    "op.missing": "An op it calls is not in this TorchNPU line or kernel library.",
    "library.version": "A version is unknown, too old, or has a known fault.",
    "dims.hidden_size": "hidden_size is outside what the op takes.",
    "dims.heads": "The number of local heads is outside what the op takes, or does not divide.",
    "dims.q_lora_rank": "q_lora_rank is outside what the op takes, or absent.",
    "dims.kv_lora_rank": "kv_lora_rank is outside what the op takes.",
    "dims.qk_nope_head_dim": "qk_nope_head_dim is outside what the op takes.",
    "dims.qk_rope_head_dim": "qk_rope_head_dim is outside what the op takes.",
    "dtype": "The dtype, or the mix of dtypes, is not taken.",
    "quant.mode": "The layer's quantization is none of the op's modes.",
    "quant.layout": "The layout of scales or quantized weights is not the op's.",
    "tokens.limit": "The op takes fewer rows than can occur.",
    "bmm.bk_limit": "B x K of the batched matmul is over the op's limit.",
    "bmm.k_limit": "B, K or N of the batched matmul by itself is over the op's limit.",
    "bmm.alignment": "K or N of the batched matmul is not a multiple of what the op needs.",
    "layout.contiguous": "The op ignores strides and the tensor is not contiguous.",
    "format.nz": "FRACTAL_NZ is needed and cannot be had, or is there and not taken.",
    "kv.layout": "The strategy cannot write the layer's KV layout.",
    "rope.layout": "The strategy cannot produce the layer's RoPE layout.",
    "phase": "The strategy, or as an error's code every one, does not serve this phase.",
    "policy.duplicate": "Unasked, it would copy a weight that still has a reader.",
    "promise.lora": "LoRA deltas would be bypassed, or are applied to the weight.",
    "promise.weight_update": "A promised weight update reads or rewrites the weight.",
    "promise.role_switch": "A promised role switch makes another phase read the weight.",
    "promise.export": "A promised export reads the weight.",
    "parallel.context": "The op knows no context parallelism.",
    "request.unmet": "An explicit request cannot be met.",
    "model.numerics": "The model is known to give other numbers with this strategy.",
    "capture.slot": "Under graph capture another shape already holds the op's tiling slot.",
    "weight.read": "A reachable step reads the weight.",
    "weight.aliased": "A living tensor shares the weight's storage.",
    "plugin.failed": "The plugin raised or returned something that is no answer.",
    "plugin.forbidden": "Another plugin forbids every strategy of this name.",
}
"""The closed list of the core's reason codes. A plugin adds codes with its own name as prefix."""

SITE_WEIGHTS: Mapping[str, str] = {"q_absorb": "w_kc", "v_up": "w_vc"}
"""The two batched matmuls of an MLA layer and the weight that each multiplies with."""
SITES = tuple(SITE_WEIGHTS)

_CODE = re.compile(r"^[a-z0-9][a-z0-9_-]*(\.[a-z0-9][a-z0-9_-]*)*$")
_STRATEGY = re.compile(r"^[^\s/@=:]+$")
RESERVED = ("fused", "host")
_IMPL = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")


class Status(str, Enum):
    """What became of a plugin's entry point."""

    ACTIVE = "active"
    BLOCKED = "blocked"
    FAILED = "failed"
    SHADOWED = "shadowed"

    def __str__(self) -> str:
        return self.value


@frozen(cache_hash=True)
class PluginInfo:
    """Who a plugin is.

    Args:
        name: Entry point's name.
        dist: Canonical distribution name.
        version: Version of the distribution.
        entry_point: ``NAME = module`` as the distribution declares it.
    """

    name: str
    dist: str = "unknown"
    version: str = "unknown"
    entry_point: str = ""

    @property
    def provider(self) -> str:
        """``NAME (DIST VERSION)``, the form in plans."""
        return f"{self.name} ({self.dist} {self.version})"

    def __str__(self) -> str:
        entry = f', entry point "{self.entry_point}"' if self.entry_point else ""
        return f"{self.name} ({self.dist} {self.version}{entry})"


def _check_code(_: object, __: object, value: str) -> None:
    if not isinstance(value, str) or not _CODE.match(value):
        raise ValueError(f"{value!r} is not a reason code such as 'bmm.bk_limit'")
    if value not in REASON_CODES and "." not in value:
        raise ValueError(f"{value!r} is not a core code and has no plugin's name as prefix")


@frozen(cache_hash=True)
class Reason:
    """Why not (or why): a stable code and a sentence with the figures."""

    code: str = field(validator=_check_code)
    message: str = field(validator=instance_of(str))

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    def to_dict(self) -> dict[str, str]:
        """Return the JSON form."""
        return {"code": self.code, "message": self.message}


def _reasons(value: Reason | Iterable[Reason]) -> tuple[Reason, ...]:
    reasons = (value,) if isinstance(value, Reason) else tuple(value)
    if not reasons:
        raise ValueError("a refusal needs at least one reason")
    for reason in reasons:
        if not isinstance(reason, Reason):
            raise TypeError(f"{reason!r} is not a Reason")
    return reasons


def _limits(value: Reason | Iterable[Reason]) -> tuple[Reason, ...]:
    found = (value,) if isinstance(value, Reason) else tuple(value)
    return _reasons(found) if found else ()


def _phase_set(value: Iterable[Phase | str] | Phase | str) -> frozenset[Phase]:
    if isinstance(value, frozenset) and all(type(p) is Phase for p in value):
        return value
    items = [value] if isinstance(value, str) else value
    return frozenset(Phase.parse(p) for p in items)


def _tokens(value: Iterable[int | None] | None) -> tuple[int, int | None]:
    low, high = (1, None) if value is None else tuple(value)
    for bound in (low, high):
        if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool)):
            raise TypeError(f"a row range is two integers (the second may be None), got {value!r}")
    if low is None or low < 1 or (high is not None and high < low):
        raise ValueError(f"rows start at 1 and a range is not empty, got {value!r}")
    return low, high


@frozen(cache_hash=True)
class Envelope:
    """Where a strategy is legal.

    Args:
        phases: Phases that it serves; default all.
        tokens: First and last row count (None: no limit), both included.
        contiguous: Needs the site's weight contiguous; the runtime replaces it in place.
        format: ``any``, ``nd``, or ``nz``: the format that it needs its weights in.
    """

    phases: frozenset[Phase] = field(converter=_phase_set, default=tuple(Phase))
    tokens: tuple[int, int | None] = field(converter=_tokens, default=(1, None))
    contiguous: bool = False
    format: str = field(default="any", validator=in_(("any", "nd", "nz")))

    def covers(self, phase: Phase, low: int, high: int | None) -> bool:
        """Whether every row count from ``low`` to ``high`` of a phase is inside."""
        first, last = self.tokens
        inside = low >= first and (last is None or (high is not None and high <= last))
        return phase in self.phases and inside


def _names(value: Iterable[str] | str) -> frozenset[str]:
    names = frozenset([value] if isinstance(value, str) else value)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is not a weight's name")
    return names


def _copies(
    value: Mapping[str, int | None] | Iterable[Any] | str,
) -> tuple[tuple[str, int | None], ...]:
    if isinstance(value, str):
        value = {value: None}
    if isinstance(value, Mapping):
        pairs: dict[str, int | None] = dict(value)
    else:
        pairs = dict(item if isinstance(item, tuple) else (item, None) for item in value)
    for name, size in pairs.items():
        if not isinstance(name, str) or not (size is None or isinstance(size, int)):
            raise TypeError(f"copies maps a weight's name to bytes or None, got {name!r}: {size!r}")
    return tuple(sorted(pairs.items()))


def _aliases(value: Mapping[str, str] | Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(dict(value).items()))


def _kv_layouts(value: Iterable[KvLayout] | KvLayout | None) -> frozenset[KvLayout] | None:
    if value is None:
        return None
    return frozenset([value] if isinstance(value, KvLayout) else value)


def _check_impl(_: object, __: object, value: str) -> None:
    if not isinstance(value, str) or not _IMPL.match(value):
        raise ValueError(f"impl is 'module:object', got {value!r}")


def _check_strategy(_: object, __: object, value: str) -> None:
    if not isinstance(value, str) or not _STRATEGY.match(value):
        raise ValueError(f"{value!r} is no strategy's name: no spaces, '/', '@', '=' or ':'")
    if value in RESERVED:
        raise ValueError(f"{value!r} is a word of requests and no strategy's name")


Q_LORA_FORMATS = ("float", "int8", "mxfp8", "fp8", "hif8")
"""Formats in which a path can hand over the compressed query."""


@frozen(kw_only=True, cache_hash=True)
class Offer:
    """A strategy that a plugin offers.

    Args:
        strategy: Its name.
        impl: ``module:object`` with ``prepare(weights) -> prepared`` and
            ``bind(prepared, cache) -> callable``; imported when a layer is bound, not before.
        envelope: Where it is legal.
        reads: Loaded weights that every step reads.
        reads_once: Loaded weights that are read while preparing only; what is copied is.
        copies: Loaded weights of which it keeps its own copy. A mapping gives the bytes of the
            copy where they differ from the weight's.
        aliases: Prepared names that share a loaded weight's storage, each with that weight.
        uses: Which of ``q_absorb`` and ``v_up`` its phases need (paths only).
        kv_layouts: The KV layouts that it can write; None: every one (paths only).
        q_lora: Format in which it hands ``q_lora`` to an indexer: ``float``, ``int8``, ``mxfp8``,
            ``fp8``, ``hif8``, or None where it does not (paths only).
        copies_input: Copies its activation once a step.
        capture_slot: Name of a process-wide slot, keyed by rows, that the op's tiling holds under
            graph capture; two shapes must not share it.
        mode: Free text for the implementation and for people, such as a quantization mode.
        limits: Why the envelope ends where it does, each with figure and source; told wherever a
            row count or a phase outside it is asked for.
    """

    strategy: str = field(validator=_check_strategy)
    impl: str = field(validator=_check_impl)
    envelope: Envelope = field(factory=Envelope, validator=instance_of(Envelope))
    reads: frozenset[str] = field(converter=_names, default=())
    reads_once: frozenset[str] = field(converter=_names, default=())
    copies: tuple[tuple[str, int | None], ...] = field(converter=_copies, default=())
    aliases: tuple[tuple[str, str], ...] = field(converter=_aliases, default=())
    uses: frozenset[str] = field(converter=_names, default=())
    kv_layouts: frozenset[KvLayout] | None = field(converter=_kv_layouts, default=None)
    q_lora: str | None = field(default=None, validator=in_((None, *Q_LORA_FORMATS)))
    copies_input: bool = False
    capture_slot: str | None = None
    mode: str = ""
    limits: tuple[Reason, ...] = field(converter=_limits, default=())

    def __attrs_post_init__(self) -> None:
        if unknown := self.uses - set(SITES):
            raise ValueError(f"uses names {sorted(unknown)}; the sites are {', '.join(SITES)}")

    @cached_property
    def copied(self) -> frozenset[str]:
        """Names of the loaded weights that it copies."""
        return frozenset(name for name, _ in self.copies)

    @cached_property
    def step_reads(self) -> frozenset[str]:
        """Loaded weights that a step reads: declared reads, and what its prepared names share."""
        return self.reads | {weight for _, weight in self.aliases}


@frozen(kw_only=True, cache_hash=True)
class Decline:
    """Why a plugin's own strategy is not offered; all reasons, not the first."""

    strategy: str = field(validator=instance_of(str))
    reasons: tuple[Reason, ...] = field(converter=_reasons)


@frozen(kw_only=True, cache_hash=True)
class Forbid:
    """Why *any* strategy of that name must not be used, whoever offers it."""

    strategy: str = field(validator=instance_of(str))
    reasons: tuple[Reason, ...] = field(converter=_reasons)


@frozen(cache_hash=True)
class Release:
    """A vote that a weight may go."""

    weight: str = field(validator=instance_of(str))
    why: str = field(validator=instance_of(str))


@frozen(cache_hash=True)
class Keep:
    """A vote that a weight must stay; one is enough."""

    weight: str = field(validator=instance_of(str))
    why: str = field(validator=instance_of(str))


@frozen(kw_only=True, cache_hash=True)
class BmmSpec:
    """One batched matmul ``(M, B, K) x (B, K, N) -> (M, B, N)`` of one layer.

    Args:
        layer: The layer.
        site: ``q_absorb`` (multiplies with ``w_kc``) or ``v_up`` (with ``w_vc``).
        B: Local heads.
        K: ``qk_nope_head_dim`` at q_absorb, ``kv_lora_rank`` at v_up.
        N: ``kv_lora_rank`` at q_absorb, ``v_head_dim`` at v_up.
        dtype: Dtype of the activation.
        weight_dtype: Dtype of the weight.
        weight_layout: ``strided`` or ``contiguous``, as loaded.
        weight_format: ``nd`` or ``nz``, as loaded.
        input_layout: ``strided`` where the activation is a slice (q_absorb), else ``contiguous``.
        phases: Phases in which a path uses the site.
        max_tokens: Largest row count that can occur, None where unbounded.
    """

    layer: MlaLayer = field(repr=False)
    site: str = field(validator=in_(SITES))
    B: int
    K: int
    N: int
    dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    weight_layout: str = "contiguous"
    weight_format: str = "nd"
    input_layout: str = "contiguous"
    phases: frozenset[Phase] = field(converter=_phase_set, default=tuple(Phase))
    max_tokens: int | None = None

    @property
    def weight(self) -> str:
        """Name of the weight that the site multiplies with."""
        return SITE_WEIGHTS[self.site]

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(B, K, N)``."""
        return self.B, self.K, self.N

    @cached_property
    def kind(self) -> BmmSpec:
        """The same matmul without its layer's identity: for memoising per kind."""
        return evolve(self, layer=self.layer.kind)

    def for_layer(self, layer: MlaLayer) -> BmmSpec:
        """Return the matmul of another layer of the same kind."""
        twin = evolve(self, layer=layer)
        # Twins share one kind, so that comparing their kinds is comparing identities.
        object.__setattr__(twin, "kind", self.kind)
        return twin


@frozen(cache_hash=True)
class Failure:
    """What a plugin did wrong inside a hook."""

    hook: str
    message: str

    @property
    def reason(self) -> Reason:
        return Reason("plugin.failed", f"{self.hook}: {self.message}")


Record = Offer | Decline | Forbid | Release | Keep


@frozen(cache_hash=True)
class Answer:
    """What one implementation said: records, or a failure; never both."""

    plugin: PluginInfo
    records: tuple[Record, ...] = ()
    failure: Failure | None = None
