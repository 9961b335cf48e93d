"""From a bundled name, a ``config.json`` or a model directory to the model's attention layers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from attrs import frozen

from npu_backend.catalog import Catalog, load_catalog
from npu_backend.catalog.versions import suggest
from npu_backend.deployment import HOSTS
from npu_backend.errors import ModelError
from npu_backend.model.config import AttentionSite, ModelConfig, parse_config
from npu_backend.model.locate import Source, locate
from npu_backend.model.records import (
    CACHE_MODES,
    DTYPES,
    KV_DTYPES,
    QUANT_KINDS,
    Indexer,
    KvLayout,
    Measured,
    MlaLayer,
    ModelInfo,
)
from npu_backend.model.resolve import Resolver
from npu_backend.model.selection import select_ids

__all__ = ["Model", "read_model"]

_STRIDED_W_VC = frozenset({"kimi_k3", "kimi_linear", "longcat_flash"})
_STRIDED_W_VC_FAMILY = "bailing"
# SGLang 0.5.23 leaves w_vc of these a view; its DeepSeek loader makes it contiguous on NPU.


@frozen
class Model(Sequence[MlaLayer]):
    """A model as planning needs it: a sequence of its MLA layers, and what is known of it.

    Args:
        info: What is known of the model as a whole.
        layers: The MLA layers in order of their ids, those that were asked for.
    """

    info: ModelInfo
    layers: tuple[MlaLayer, ...]

    def __len__(self) -> int:
        return len(self.layers)

    @overload
    def __getitem__(self, index: int) -> MlaLayer: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[MlaLayer, ...]: ...

    def __getitem__(self, index: int | slice) -> MlaLayer | tuple[MlaLayer, ...]:
        return self.layers[index]

    def __iter__(self) -> Iterator[MlaLayer]:
        return iter(self.layers)


def _check_arguments(
    quant: str,
    dtype: str,
    kv_dtype: str,
    cache_mode: str,
    rope_layout: str,
    block_size: int,
    host: str | None,
) -> None:
    given = (
        ("quantization", quant, QUANT_KINDS),
        ("dtype", dtype, DTYPES),
        ("dtype of a KV cache", kv_dtype, KV_DTYPES),
        ("cache mode", cache_mode, CACHE_MODES),
        ("layout of rotated keys", rope_layout, ("half", "interleaved")),
    )
    for what, value, known in (*given, *((("host", host, HOSTS),) if host is not None else ())):
        if value not in known:
            raise ModelError(
                f"{value!r:.80} is not a {what}{suggest(str(value)[:80], known)}",
                whom="the model to plan",
                why=f"the known ones are {', '.join(known)}",
                remedy="name one of them",
            )
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ModelError(
            f"{block_size!r:.80} is not a block size",
            whom="the model to plan",
            why="a block of the KV cache holds a positive number of tokens",
            remedy="give the host's block size, 128 if it says nothing",
        )


def _resolver(source: Source, config: ModelConfig, quant: str) -> tuple[Resolver, list[str]]:
    """Return the resolver with all that the files say, and the names of those files."""
    declared = description = checkpoint = None
    # Imported where there are files: a cold plan of a bundled model should not pay for them.
    if config.quantization is not None:
        from npu_backend.model.quantization import parse_quantization_config

        declared = parse_quantization_config(config.quantization, source.where)
    if source.directory is not None:
        from npu_backend.model.checkpoint import open_checkpoint
        from npu_backend.model.quantization import find_description

        description = find_description(source.directory)
        checkpoint = open_checkpoint(source.directory)
    files = [source.words]
    if description is not None:
        files.append(description.path.name)
    if checkpoint is not None:
        files.append("safetensors headers")
    said = config.quantization
    silent = declared is None and description is None and checkpoint is None
    if said is not None and silent and quant == "none":
        raise ModelError(
            "the config says that a description holds the quantization, and there is none",
            whom=source.where,
            why=f"its quant_method is {said['quant_method']}",
            remedy="give the directory with quant_model_description.json, or say --quant",
        )
    resolver = Resolver.build(config, description, declared, checkpoint, quant)
    if resolver.has_no_files:
        note = "all projections float"
        if quant != "none":
            note = (
                f"{quant} for all projections and the indexer's wq_b of the main layers; "
                "kv_b_proj and MTP layers float"
            )
        resolver.assumed[f"no quantization description: {note}"] = None
    if checkpoint is None:
        resolver.assumed["no safetensors headers: dtypes and bytes follow from the sizes"] = None
    return resolver, files


def _sites(
    resolver: Resolver, layers: str | Iterable[int] | None, where: str
) -> list[AttentionSite]:
    """Return the attentions to plan: those asked for, else all that the checkpoint has."""
    sites = list(resolver.config.sites)
    if layers is not None:
        chosen = select_ids(layers, [site.layer_id for site in sites], where)
        sites = [site for site in sites if site.layer_id in chosen]
    else:
        # A checkpoint without its MTP layer is complete: hosts load that only to speculate.
        for site in [s for s in sites if s.is_nextn and resolver.is_absent(s)]:
            sites.remove(site)
            note = f"MTP layer {site.layer_id} is left out: the checkpoint has no tensor of it"
            resolver.assumed[note] = None
    resolver.check_complete(sites)
    return sites


class _Builder:
    """Builds the layers of one model; what many layers share is made once."""

    def __init__(
        self,
        resolver: Resolver,
        dtype: str,
        kv: tuple[str, str, int],
        host: str | None,
        rope_layout: str,
    ) -> None:
        config = resolver.config
        self.resolver = resolver
        self.dtype = dtype
        self.host = host
        if config.dtype not in (None, dtype):
            said = f"the config says {config.dtype}, the dtype is {dtype}"
            resolver.assumed[said] = None
        rope = config.dims["use_rope"] and config.dims["qk_rope_head_dim"] > 0
        # With one row or one latent the strides of w_kc are those of a contiguous tensor.
        flat = config.dims["qk_nope_head_dim"] == 1 or config.dims["kv_lora_rank"] == 1
        strided_v = host == "sglang" and any(
            name in _STRIDED_W_VC or name.startswith(_STRIDED_W_VC_FAMILY) for name in config.types
        )
        self.shared: dict[str, Any] = {
            **config.dims,
            "model_type": config.model_type,
            "dtype": dtype,
            "kv_layout": KvLayout(*kv, rope=rope_layout if rope else "none"),
            "w_kc_layout": "contiguous" if flat else "strided",
            "w_vc_layout": "strided" if strided_v else "contiguous",
        }
        self.kinds: dict[tuple[bool, str], dict[str, Any]] = {}

    def layer(self, site: AttentionSite) -> MlaLayer:
        """Return the layer of one attention."""
        key = (site.is_nextn, site.indexer)
        kind = self.kinds.get(key)
        if kind is None:
            kind = self._kind(site)
            if self.resolver.has_no_files:
                self.kinds[key] = kind
        return MlaLayer(
            layer_id=site.layer_id, prefix=self.resolver.prefix(site), **kind, **self.shared
        )

    def _kind(self, site: AttentionSite) -> dict[str, Any]:
        """Return what a layer shares with its twins, if it has any."""
        quant: dict[str, str] = {}
        measured: dict[str, Measured] = {}
        for name in self.resolver.projections(site):
            found = self.resolver.resolve(site, name)
            quant[name] = found.kind
            if found.weight is None or name == "wq_b":
                continue
            measured[name] = found.weight
            if found.scale is not None:
                measured[f"{name}.scale"] = found.scale
            if found.kind == "none" and found.weight.dtype != self.dtype:
                held = f"the checkpoint holds {found.weight.dtype} weights"
                self.resolver.assumed[f"{held}, the dtype is {self.dtype}"] = None
        # SGLang splits an fp8-block kv_b_proj without dequantising it on NPU.
        fp8 = self.host == "sglang" and quant["kv_b_proj"] == "fp8-block"
        return {
            "is_nextn": site.is_nextn,
            "quant": {name: kind for name, kind in quant.items() if name != "wq_b"},
            "w_dtype": "float8_e4m3fn" if fp8 else None,
            "indexer": Indexer(site.indexer, quant.get("wq_b", "none")),
            "measured": measured,
        }


def read_model(
    model: str | os.PathLike[str],
    *,
    quant: str = "none",
    dtype: str = "bfloat16",
    block_size: int = 128,
    kv_dtype: str | None = None,
    cache_mode: str = "PA_BSND",
    rope_layout: str = "half",
    host: str | None = None,
    layers: str | Iterable[int] | None = None,
    catalog: Catalog | None = None,
) -> Model:
    """Return the MLA layers of a model, without loading a weight or importing torch.

    Args:
        model: A bundled name such as ``glm-5.2``, a ``config.json``, or a model directory. A text
            without a path separator is a bundled name first. Of a ``config.json`` its neighbours
            are not read.
        quant: Quantization where the files say nothing: of all projections and the indexer's wq_b
            of the main layers; kv_b_proj and MTP layers stay float. One that contradicts the files
            is an error.
        dtype: Dtype of activations and unquantized weights.
        block_size: Tokens in one block of the KV cache.
        kv_dtype: What the KV cache holds, see :class:`KvLayout`; None for ``dtype``.
        cache_mode: How the KV cache is laid out, such as ``PA_BSND`` or ``PA_NZ``.
        rope_layout: How rotated key components stand in the cache, ``half`` or ``interleaved``.
        host: ``sglang``, ``vllm-ascend`` or None: who leaves ``w_kc`` and ``w_vc`` in which layout.
        layers: Ids of the layers to read, as ``"0-2,78"`` or numbers; None for all.
        catalog: The catalog with the bundled models; default the bundled catalog.

    Raises:
        ModelError: The model is unknown, a file cannot be used, files contradict each other, or
            the model is not MLA.
    """
    holds = kv_dtype or dtype
    _check_arguments(quant, dtype, holds, cache_mode, rope_layout, block_size, host)
    source = locate(model, load_catalog() if catalog is None else catalog)
    config = parse_config(source.raw, source.where)
    resolver, files = _resolver(source, config, quant)
    sites = _sites(resolver, layers, source.where)
    builder = _Builder(resolver, dtype, (cache_mode, holds, block_size), host, rope_layout)
    built = tuple(builder.layer(site) for site in sites)
    info = ModelInfo(
        name=source.name,
        model_type=config.model_type,
        num_hidden_layers=config.num_hidden_layers,
        source=", ".join(files),
        unverified=source.unverified,
        assumed=(*config.assumed, *resolver.assumed),
    )
    return Model(info=info, layers=built)
