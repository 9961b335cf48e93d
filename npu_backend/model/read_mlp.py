"""From a bundled name, a ``config.json`` or a model directory to its dense MLPs and shared experts.

Any model will do, also one without MLA. Routed experts are not described.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from attrs import evolve, frozen

from npu_backend.catalog import Catalog, load_catalog
from npu_backend.catalog.versions import suggest
from npu_backend.errors import ModelError
from npu_backend.model.config import (
    NESTED,
    TWO_ATTENTIONS,
    layer_count,
    nextn_count,
)
from npu_backend.model.fields import MAX_DIM, MAX_LAYERS, Fields
from npu_backend.model.locate import Source, locate
from npu_backend.model.mlp import MLP_PROJECTIONS, MlpLayer
from npu_backend.model.records import DTYPES
from npu_backend.model.weights import stored

if TYPE_CHECKING:
    # A bundled model has no files, and a cold plan of one should not pay for reading them.
    from npu_backend.model.checkpoint import Checkpoint, Module

__all__ = ["MlpLayers", "read_mlp_layers"]

_ROOTS = ("model.", "", "language_model.model.", "model.language_model.")
_DENSE_NAMES = ("mlp", "feed_forward")
_SHARED_NAMES = (
    "mlp.shared_experts",
    "mlp.shared_expert",
    "block_sparse_moe.shared_experts",
    "moe.shared_experts",
)
_MTP_INNER = ("", "mtp_block.", "transformer_layer.")
# Names under which published checkpoints keep these modules.

_REMEDY = "correct the config, or give the one that the checkpoint was published with"


@frozen
class MlpLayers(Sequence[MlpLayer]):
    """The dense MLPs and shared experts of a model, in layer order.

    Args:
        layers: Their records.
        assumed: What was assumed because the files do not say it.
    """

    layers: tuple[MlpLayer, ...]
    assumed: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.layers)

    @overload
    def __getitem__(self, index: int) -> MlpLayer: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[MlpLayer, ...]: ...

    def __getitem__(self, index: int | slice) -> MlpLayer | tuple[MlpLayer, ...]:
        return self.layers[index]

    def __iter__(self) -> Iterator[MlpLayer]:
        return iter(self.layers)


@frozen
class _Site:
    """One MLP in the model, before its tensors are known."""

    layer_id: int
    kind: str
    intermediate_size: int
    names: tuple[str, ...]
    is_nextn: bool = False


def _section(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of the config that describes the language model."""
    nested = [raw[key] for key in NESTED if isinstance(raw.get(key), dict)]
    return next((s for s in (raw, *nested) if s.get("hidden_size") is not None), raw)


def _dense_flags(fields: Fields, layers: int, assumed: list[str]) -> list[bool]:
    """Return for each decoder layer whether its MLP is dense, in a model with routed experts."""
    raw, problems = fields.raw, fields.problems
    listed = raw.get("mlp_layer_types")
    if listed is not None:
        good = isinstance(listed, list) and all(k in ("dense", "sparse") for k in listed)
        if good and len(listed) >= layers:
            return [kind == "dense" for kind in listed[:layers]]
        problems.append(f"mlp_layer_types is not a list of dense and sparse for {layers} layers")
        return []
    first = fields.optional("first_k_dense_replace", 0, MAX_LAYERS)
    freq = raw.get("moe_layer_freq")
    if isinstance(freq, list):
        if len(freq) < layers or any(f not in (0, 1) for f in freq):
            problems.append(f"moe_layer_freq is not a list of 0 and 1 for {layers} layers")
            return []
        return [not f or i < (first or 0) for i, f in enumerate(freq[:layers])]
    if first is None:
        assumed.append("first_k_dense_replace is not given: no layer is taken as dense")
    every = fields.optional("moe_layer_freq", 1, MAX_LAYERS) or 1
    return [i < (first or 0) or i % every != 0 for i in range(layers)]


def _shared_size(fields: Fields, expert: int, assumed: list[str]) -> int:
    """Return the joint width of the shared experts, 0 where the model has none."""
    joint = fields.optional("shared_expert_intermediate_size", 0)
    if joint is not None:
        return joint
    keys = ("n_shared_experts", "num_shared_experts")
    counts = {key: fields.optional(key, 0, MAX_LAYERS) for key in keys}
    said = {key: count for key, count in counts.items() if count is not None}
    if len(set(said.values())) > 1:
        fields.problems.append(" and ".join(f"{k} is {c}" for k, c in said.items()))
    if not said:
        assumed.append("n_shared_experts is not given: no shared experts are taken to be there")
        return 0
    size = expert * next(iter(said.values()))
    if size > MAX_DIM:
        fields.problems.append(f"shared experts of a joint width of {size} are beyond any model")
    return size


def _sites(fields: Fields, types: frozenset[str], assumed: list[str]) -> list[_Site]:
    raw = fields.raw
    layers = layer_count(fields, types)
    nextn = nextn_count(fields, types, assumed)
    if types & TWO_ATTENTIONS:
        # Two dense MLPs a layer beside the routed experts, numbered as its two attentions are.
        key = "intermediate_size" if raw.get("intermediate_size") is not None else "ffn_hidden_size"
        wide = fields.integer(key, 1)
        pairs = [(la, i) for la in range(layers) for i in range(2)]
        found = [_Site(2 * la + i, "dense", wide, (f"layers.{la}.mlps.{i}",)) for la, i in pairs]
        for i in range(nextn):
            mtp = (f"mtp.layers.{i}.transformer_layer.mlp", f"mtp.layers.{i}.mlp")
            found.append(_Site(2 * layers + i, "dense", wide, mtp, True))
        return found
    is_moe = raw.get("moe_intermediate_size") is not None
    dense = [True] * layers
    shared = 0
    if is_moe:
        expert = fields.integer("moe_intermediate_size", 1)
        dense = _dense_flags(fields, layers, assumed)
        shared = _shared_size(fields, expert, assumed)
    wide = fields.integer("intermediate_size", 1) if any(dense) else 0
    found = []
    for i in range(layers + nextn if dense else 0):
        is_nextn = i >= layers
        # MTP layers are of the kind that follows the last layer: MoE wherever there are experts.
        is_dense = not is_moe if is_nextn else dense[i]
        if is_dense:
            names = tuple(f"layers.{i}.{name}" for name in _DENSE_NAMES)
            found.append(_Site(i, "dense", wide, names, is_nextn))
        elif shared:
            inner = _MTP_INNER if is_nextn else ("",)
            names = tuple(f"layers.{i}.{part}{name}" for part in inner for name in _SHARED_NAMES)
            found.append(_Site(i, "shared_experts", shared, names, is_nextn))
    return found


class _Reader:
    """Turns sites into records, by what headers or a quantization's description say."""

    def __init__(self, source: Source, hidden: int, dtype: str, raw: Mapping[str, Any]) -> None:
        self.hidden, self.dtype = hidden, dtype
        self.where = source.where
        self.assumed: dict[str, None] = {}
        self.checkpoint: Checkpoint | None = None
        self.words: list[Any] = []
        section = raw.get("quantization_config") or source.raw.get("quantization_config")
        if source.directory is not None:
            from npu_backend.model.checkpoint import open_checkpoint

            self.checkpoint = open_checkpoint(source.directory)
        if self.checkpoint is None:
            self._read_words(source, section)

    def _read_words(self, source: Source, section: Any) -> None:
        if isinstance(section, dict) and section:
            from npu_backend.model.quantization import parse_quantization_config

            declared = parse_quantization_config(section, source.where)
            self.words += [] if declared is None else [declared]
        if source.directory is not None:
            from npu_backend.model.quantization import find_description

            description = find_description(source.directory)
            self.words += [] if description is None else [description]
        said = "quantization follows from the description" if self.words else "not quantized"
        note = f"no safetensors headers: dtypes and bytes of MLPs follow from the sizes, {said}"
        self.assumed[note] = None

    def layer(self, site: _Site) -> MlpLayer:
        rows = site.intermediate_size
        shapes = {"gate_proj": (rows, self.hidden), "up_proj": (rows, self.hidden)}
        shapes["down_proj"] = (self.hidden, rows)
        prefix, parts = self._measured(site, shapes) if self.checkpoint else ("", [])
        if not parts:
            prefix = f"{_ROOTS[0]}{site.names[0]}"
            parts = [self._said(site, name, rows * self.hidden) for name in shapes]
        dtypes = dict.fromkeys(dtype for dtype, _ in parts)
        layer = MlpLayer(
            layer_id=site.layer_id,
            kind=site.kind,
            hidden_size=self.hidden,
            intermediate_size=rows,
            dtype="+".join(dtypes),
            is_nextn=site.is_nextn,
            prefix=prefix,
            weight_bytes=sum(size for _, size in parts),
        )
        plain = len(dtypes) == 1 and evolve(layer, weight_bytes=None).bytes == layer.bytes
        return evolve(layer, weight_bytes=None) if plain else layer

    def is_absent(self, site: _Site) -> bool:
        """Whether there is a checkpoint and it has no tensor of the MLP's decoder layer."""
        if self.checkpoint is None:
            return False
        block = ".".join(site.names[0].split(".")[: 3 if site.names[0][0] == "m" else 2])
        heads = tuple(f"{root}{block}." for root in _ROOTS)
        return not any(name.startswith(heads) for name in self.checkpoint.files)

    def _said(self, site: _Site, projection: str, elements: int) -> tuple[str, int]:
        names = [f"{root}{name}.{projection}" for root in _ROOTS for name in site.names]
        said = next((s for s in (word.said(names) for word in self.words) if s is not None), None)
        return stored("none" if said is None else said.kind, self.dtype, elements)

    def _measured(
        self, site: _Site, shapes: Mapping[str, tuple[int, int]]
    ) -> tuple[str, list[tuple[str, int]]]:
        """Return the module's name in the checkpoint, and dtype and bytes of its weights."""
        assert self.checkpoint is not None
        for prefix in (f"{root}{name}" for root in _ROOTS for name in site.names):
            found = {name: self.checkpoint.module(f"{prefix}.{name}") for name in shapes}
            fused = self.checkpoint.module(f"{prefix}.gate_up_proj")
            if fused is not None:
                rows, columns = shapes["gate_proj"]
                modules = {"gate_up_proj": fused, "down_proj": found["down_proj"]}
                expected = {"gate_up_proj": (2 * rows, columns), "down_proj": shapes["down_proj"]}
            elif any(module is not None for module in found.values()):
                modules, expected = found, dict(shapes)
            else:
                continue
            return prefix, [self._check(prefix, n, m, expected[n]) for n, m in modules.items()]
        kind = "shared experts" if site.kind == "shared_experts" else "a dense MLP"
        note = f"some layer of the checkpoint has {kind} under no known name"
        self.assumed[f"{note}: bytes follow from the sizes"] = None
        return "", []

    def _check(
        self, prefix: str, name: str, module: Module | None, shape: tuple[int, int]
    ) -> tuple[str, int]:
        if module is None:
            raise ModelError(
                f"the checkpoint lacks {prefix}.{name}.weight",
                whom=self.where,
                why="a gated MLP has the weights " + ", ".join(MLP_PROJECTIONS),
                remedy="complete the checkpoint, or give the config.json alone",
            )
        module.check_shape(*shape, module.kinds()[0])
        return module.weight.torch_dtype, module.weight.bytes


def read_mlp_layers(
    model: str | os.PathLike[str], *, dtype: str = "bfloat16", catalog: Catalog | None = None
) -> MlpLayers:
    """Return the dense MLPs and the shared experts of a model; loads no weight, imports no torch.

    Dense are the layers below ``first_k_dense_replace`` (or as ``mlp_layer_types`` and
    ``moe_layer_freq`` say), all of them in a model without experts. Shared experts are one MLP of
    ``moe_intermediate_size`` times ``n_shared_experts``.

    Args:
        model: A bundled name, a ``config.json``, or a model directory, as for
            :func:`npu_backend.read_model`.
        dtype: Dtype of unquantized weights where no headers say it.
        catalog: The catalog with the bundled models; default the bundled catalog.

    Raises:
        ModelError: The model is unknown, or a file is unusable or contradictory.
    """
    if dtype not in DTYPES:
        raise ModelError(
            f"{dtype!r:.80} is not a dtype{suggest(str(dtype)[:80], DTYPES)}",
            whom="the MLPs to read",
            why="the known ones are " + ", ".join(DTYPES),
            remedy="name one of them",
        )
    source = locate(model, load_catalog() if catalog is None else catalog)
    raw = _section(source.raw)
    fields = Fields(raw)
    names = (section.get("model_type") for section in (source.raw, raw))
    types = frozenset(name for name in names if isinstance(name, str) and name)
    assumed: list[str] = []
    hidden = fields.integer("hidden_size", 1)
    sites = _sites(fields, types, assumed)
    if fields.problems:
        raise ModelError(
            "the model's config does not say what its MLPs are",
            whom=source.where,
            why=fields.problems,
            remedy=_REMEDY,
        )
    reader = _Reader(source, hidden, dtype, raw)
    # A checkpoint without its MTP layer is complete: hosts load that only to speculate.
    left_out = [site for site in sites if site.is_nextn and reader.is_absent(site)]
    for site in left_out:
        assumed.append(f"MTP layer {site.layer_id} is left out: the checkpoint has no tensor of it")
    layers = tuple(reader.layer(site) for site in sites if site not in left_out)
    return MlpLayers(layers, (*assumed, *reader.assumed))
