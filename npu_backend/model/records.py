"""The static description of one attention layer, and of the model it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

from attrs import evolve, field, frozen

from npu_backend.catalog.versions import suggest
from npu_backend.errors import ModelError
from npu_backend.values import flag, instance, pairs, text, whole, word

__all__ = [
    "INDEXER_KINDS",
    "KV_DTYPES",
    "PROJECTIONS",
    "QUANT_KINDS",
    "Indexer",
    "KvLayout",
    "Measured",
    "MlaLayer",
    "ModelInfo",
]

QUANT_KINDS = (
    "none",
    "w8a8-static",
    "w8a8-static-symmetric",
    "w8a8-dynamic",
    "mxfp8",
    "fp8-block",
    "fp8",
    "hif8",
    "w8a16",
    "w4a8-dynamic",
    "w4a16",
)
"""Quantizations of one projection. ``none`` is 16- or 32-bit float; ``w8a8-static`` has
ModelSlim's input_scale, input_offset, deq_scale and quant_bias; ``w8a8-static-symmetric`` has an
input_scale only; ``fp8`` is one scale a channel or tensor; ``fp8-block`` one scale for each
128 x 128 block; ``mxfp8`` one e8m0 scale for each 32 inputs; ``hif8`` (HiFloat8) has no dtype in
torch, so it is planned only."""

PROJECTIONS = ("fused_qkv_a_proj", "q_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj")
"""What of a layer can be quantized by itself; :class:`Indexer` tells of its ``wq_b``."""

INDEXER_KINDS = ("own", "shared", "none")
DTYPES = ("bfloat16", "float16", "float32")
LAYOUTS = ("strided", "contiguous")
KV_DTYPES = (*DTYPES, "int8", "int8_channel", "int8_packed", "fp8", "fp8_packed")
"""What a latent cache can hold, see :class:`KvLayout`."""
PACKED_TILE = 128
"""Latents that share one fp32 scale in a packed cache (``tile_size`` of npu_mla_prolog_v3)."""

CACHE_MODES = (
    *("PA_BSND", "PA_NZ", "PA_BLK_BSND", "PA_BLK_NZ", "BSND", "TND"),
    *("PA", "krope_ctkv", "nzcache"),
)
"""Cache modes by the ops' names; the last three are other names of the first two."""
_CACHE_MODE_NAMES = {"PA": "PA_BSND", "krope_ctkv": "PA_BSND", "nzcache": "PA_NZ"}
ROPE_LAYOUTS = ("half", "interleaved", "none")


_SIZE = whole(ModelError, 1)
_FLAG = flag(ModelError)
_TEXT = text(ModelError)


def _cache_mode(mode: str) -> str:
    return _CACHE_MODE_NAMES.get(mode, mode) if isinstance(mode, str) else mode


@frozen(cache_hash=True)
class KvLayout:
    """How one layer's latent cache is written; two workers that share a cache must agree.

    Args:
        cache_mode: Canonical name; ``PA`` and ``krope_ctkv`` mean ``PA_BSND``, ``nzcache`` means
            ``PA_NZ``.
        dtype: ``bfloat16``, ``float16``, ``float32``: latent and key are floats. ``int8`` and
            ``fp8`` (e4m3): the latent has one factor, the key is a 16-bit float, and queries come
            quantized too. ``int8_channel``: latent and key are int8 with one factor a channel.
            ``int8_packed`` and ``fp8_packed``: one row of 8-bit latents, the 16-bit key and one
            fp32 scale for each 128 latents (656 bytes a token). Sources: catalog, ``prolog-docs``.
        block_size: Tokens in one cache block.
        rope: ``half`` (all even components, then all odd), ``interleaved``, or ``none`` for layers
            without RoPE.
    """

    cache_mode: str = field(
        default="PA_BSND", converter=_cache_mode, validator=word(ModelError, CACHE_MODES)
    )
    dtype: str = field(default="bfloat16", validator=word(ModelError, KV_DTYPES))
    block_size: int = field(default=128, validator=_SIZE)
    rope: str = field(default="half", validator=word(ModelError, ROPE_LAYOUTS))

    def __str__(self) -> str:
        return f"{self.cache_mode} {self.dtype} block {self.block_size} rope {self.rope}"

    @property
    def packed(self) -> bool:
        """Whether latent, key and scales of a token are one row."""
        return self.dtype.endswith("_packed")

    @property
    def latent_dtype(self) -> str:
        """Dtype of the latent cache's elements, as torch has it."""
        kind = self.dtype.partition("_")[0]
        return {"fp8": "float8_e4m3fn"}.get(kind, kind)

    @property
    def quantizes_queries(self) -> bool:
        """Whether queries come quantized, with one scale a token and head."""
        return self.dtype in ("int8", "fp8")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "cache_mode": self.cache_mode,
            "dtype": self.dtype,
            "block_size": self.block_size,
            "rope": self.rope,
        }


@frozen(cache_hash=True)
class Indexer:
    """The sparse-attention indexer of a DSA layer.

    Args:
        kind: ``own``; ``shared`` (reuses another layer's top-k, reads nothing); ``none``.
        quant: Quantization of its ``wq_b``.
    """

    kind: str = field(default="none", validator=word(ModelError, INDEXER_KINDS))
    quant: str = field(default="none", validator=word(ModelError, QUANT_KINDS))


@frozen(cache_hash=True)
class Measured:
    """What a checkpoint's headers say of one weight, over all ranks.

    Args:
        dtype: Name of the dtype as torch has it.
        bytes: Bytes of the whole weight, before any sharding.
        replicated: Those of them that every rank holds whole: scales of one value.
    """

    dtype: str
    bytes: int = field(validator=whole(ModelError, 0))
    replicated: int = field(default=0, validator=whole(ModelError, 0))


def _quant(
    value: Mapping[str, str] | Iterable[tuple[str, str]] | str,
) -> tuple[tuple[str, str], ...]:
    given: Any = dict.fromkeys(PROJECTIONS, value) if isinstance(value, str) else value
    wanted = "one quantization, or a mapping from projection"
    said = pairs(ModelError, "the quantization of a layer", given, wanted)
    for name, kind in said.items():
        if name not in PROJECTIONS:
            raise ModelError(
                f"{name!r:.80} is not a projection{suggest(str(name), PROJECTIONS)}",
                whom="the quantization of a layer",
                why="the projections are " + ", ".join(PROJECTIONS),
                remedy="name one of them",
            )
        if kind not in QUANT_KINDS:
            raise ModelError(
                f"{kind!r:.80} is not a quantization{suggest(str(kind), QUANT_KINDS)}",
                whom=f"projection {name}",
                why="the quantizations are " + ", ".join(QUANT_KINDS),
                remedy="name one of them",
            )
    return tuple((p, said[p]) for p in PROJECTIONS if said.get(p, "none") != "none")


def _measured(
    value: Mapping[str, Measured] | Iterable[tuple[str, Measured]],
) -> tuple[tuple[str, Measured], ...]:
    said = pairs(ModelError, "what headers say of a layer", value, "a mapping from weight")
    for name, row in said.items():
        if not isinstance(name, str) or not isinstance(row, Measured):
            raise ModelError(
                f"{name!r:.80} has {row!r:.80}",
                whom="what headers say of a layer",
                why="it maps a weight's name to a Measured record",
                remedy="give Measured(dtype, bytes)",
            )
    return tuple(sorted(said.items()))


_KV_LAYOUT = instance(ModelError, (KvLayout, type(None)), "a KvLayout record, or None")


def _eps(_layer: Any, _attribute: Any, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < 1:
        raise ModelError(
            f"rms_norm_eps = {value!r:.80} cannot be used",
            whom="a MlaLayer record",
            why="it is no number between 0 and 1",
            remedy="give the config's rms_norm_eps",
        )


ROPE_IS_EVEN = "RoPE rotates pairs of components"


@frozen(kw_only=True, cache_hash=True)
class MlaLayer:
    """Static description of one MLA attention layer. No tensors.

    Args:
        layer_id: Unique in the model; MTP layers follow the last layer.
        is_nextn: An MTP (next-n prediction) layer.
        model_type: ``model_type`` of the config, for what a model as such forbids.
        hidden_size: Width of the residual stream.
        num_heads: Heads over all ranks.
        q_lora_rank: None where the layer has ``q_proj`` and ``kv_a_proj_with_mqa``.
        kv_lora_rank: Width of the latent.
        qk_nope_head_dim: Head width without RoPE.
        qk_rope_head_dim: Head width of the RoPE part; may be 0.
        v_head_dim: Head width of the values.
        use_rope: False where the RoPE part exists but is not rotated.
        dtype: Dtype of activations and unquantized weights.
        quant: Quantization by projection, or one for all.
        w_dtype: Dtype in which ``w_kc`` and ``w_vc`` are after load; default ``dtype``.
        w_kc_layout: ``strided`` (own storage, last dimension not the fastest) or ``contiguous``.
        w_vc_layout: The same of ``w_vc``.
        kv_layout: The one layout of this layer's cache; default PA_BSND, ``dtype``, 128, half.
        indexer: The layer's indexer.
        rms_norm_eps: Epsilon of both norms.
        prefix: Name of the attention module in the checkpoint.
        measured: What safetensors headers say, by weight name.
    """

    layer_id: int = field(validator=whole(ModelError, 0))
    is_nextn: bool = field(default=False, validator=_FLAG)
    model_type: str = field(default="", validator=_TEXT)
    hidden_size: int = field(validator=_SIZE)
    num_heads: int = field(validator=_SIZE)
    q_lora_rank: int | None = field(default=None, validator=whole(ModelError, 1, optional=True))
    kv_lora_rank: int = field(validator=_SIZE)
    qk_nope_head_dim: int = field(validator=_SIZE)
    qk_rope_head_dim: int = field(validator=whole(ModelError, 0))
    v_head_dim: int = field(validator=_SIZE)
    use_rope: bool = field(default=True, validator=_FLAG)
    dtype: str = field(default="bfloat16", validator=word(ModelError, DTYPES))
    quant: tuple[tuple[str, str], ...] = field(converter=_quant, default=())
    w_dtype: str | None = field(default=None, validator=text(ModelError, optional=True))
    w_kc_layout: str = field(default="strided", validator=word(ModelError, LAYOUTS))
    w_vc_layout: str = field(default="contiguous", validator=word(ModelError, LAYOUTS))
    kv_layout: KvLayout = field(default=None, validator=_KV_LAYOUT)
    indexer: Indexer = field(
        factory=Indexer, validator=instance(ModelError, Indexer, "an Indexer record")
    )
    rms_norm_eps: float = field(default=1e-6, validator=_eps)
    prefix: str = field(default="", validator=_TEXT)
    measured: tuple[tuple[str, Measured], ...] = field(default=(), converter=_measured)

    def __attrs_post_init__(self) -> None:
        rope = "half" if self.has_rope else "none"
        if self.has_rope and self.qk_rope_head_dim % 2:
            raise ModelError(
                f"qk_rope_head_dim is {self.qk_rope_head_dim}, an odd number",
                whom=f"layer {self.layer_id}",
                why=ROPE_IS_EVEN,
                remedy="give the width that the checkpoint was made with, or use_rope=False",
                code="dims.qk_rope_head_dim",
            )
        if self.kv_layout is None:
            object.__setattr__(self, "kv_layout", KvLayout(dtype=self.dtype, rope=rope))
        elif (self.kv_layout.rope == "none") == self.has_rope:
            raise ModelError(
                f"the KV layout says rope {self.kv_layout.rope}, the layer has "
                + ("RoPE" if self.has_rope else "none"),
                whom=f"layer {self.layer_id}",
                why="a layer without RoPE writes no rotated keys, and one with RoPE must say how",
                remedy="give the layout that the host's cache has",
                code="rope.layout",
            )
        if self.kv_layout.packed and self.kv_lora_rank % PACKED_TILE:
            raise ModelError(
                f"a cache in {self.kv_layout.dtype} cannot hold latents of {self.kv_lora_rank}",
                whom=f"layer {self.layer_id}",
                why=f"a packed row has one scale for each {PACKED_TILE} latents",
                remedy="choose another dtype of the KV cache",
                code="kv.layout",
            )

    @property
    def has_rope(self) -> bool:
        """Whether keys and queries are rotated."""
        return self.use_rope and self.qk_rope_head_dim > 0

    @property
    def has_indexer(self) -> bool:
        """Whether the layer is a DSA layer: an indexer of its own, or a shared one."""
        return self.indexer.kind != "none"

    def quant_of(self, projection: str) -> str:
        """Return the quantization of a projection; ``none`` where nothing is said."""
        return self._quant_map.get(projection, "none")

    @cached_property
    def _quant_map(self) -> dict[str, str]:
        return dict(self.quant)

    def dtype_of(self, projection: str) -> str:
        """Return the dtype of a float projection: what the checkpoint's headers say, else the
        layer's."""
        return self._measured_dtypes.get(projection, self.dtype)

    @cached_property
    def _measured_dtypes(self) -> dict[str, str]:
        return {name: row.dtype for name, row in self.measured}

    @property
    def bmm_dtype(self) -> str:
        """Dtype of ``w_kc`` and ``w_vc`` after load."""
        return self.w_dtype or self.dtype

    @cached_property
    def kind(self) -> MlaLayer:
        """The same layer without what tells it from its twins, for memoising per kind.

        Twins share one object, so that comparing their kinds is comparing identities.
        """
        kind = evolve(self, layer_id=0, prefix="")
        return _KINDS.setdefault(kind, kind)

    @cached_property
    def weight_names(self) -> tuple[str, ...]:
        """Names of the loaded weights, scales included, in the order of every plan."""
        from npu_backend.model.weights import loaded_weights

        return tuple(spec.name for spec in loaded_weights(self, 1))

    @property
    def latent_width(self) -> int:
        """Elements of one token's row in the latent cache."""
        if not self.kv_layout.packed:
            return self.kv_lora_rank
        # Elements are of one byte: latents, then the key's 16-bit floats, then fp32 scales.
        return self.kv_lora_rank + 2 * self.qk_rope_head_dim + 4 * self.kv_lora_rank // PACKED_TILE

    @property
    def key_width(self) -> int:
        """Elements of one token's row in the key cache; 0 where the key is packed."""
        return 0 if self.kv_layout.packed else self.qk_rope_head_dim

    @property
    def key_dtype(self) -> str:
        """Dtype of the key cache, as torch has it."""
        layout = self.kv_layout
        if layout.dtype in DTYPES:
            return layout.dtype
        return "int8" if layout.dtype == "int8_channel" else self.dtype

    def local_heads(self, attn_tp_size: int) -> int:
        """Return the heads of one rank.

        Raises:
            ModelError: The heads do not divide.
        """
        if self.num_heads % attn_tp_size:
            raise ModelError(
                f"{self.num_heads} heads do not divide over attention TP {attn_tp_size}",
                whom=f"layer {self.layer_id}",
                why="each rank holds the same number of heads",
                remedy="choose an attention-TP size that divides the heads",
                code="dims.heads",
            )
        return self.num_heads // attn_tp_size

    def __str__(self) -> str:
        return f"layer {self.layer_id}{' (MTP)' if self.is_nextn else ''}"


_KINDS: WeakValueDictionary[MlaLayer, MlaLayer] = WeakValueDictionary()


@frozen
class ModelInfo:
    """What is known of the model as a whole.

    Args:
        name: Bundled name, or the name of the file or folder it was read from.
        model_type: ``model_type`` of the config.
        num_hidden_layers: Decoder layers, attention of any kind.
        source: Where the description comes from.
        unverified: Fields that the source does not confirm.
        assumed: What was assumed because files were absent.
    """

    name: str
    model_type: str = ""
    num_hidden_layers: int | None = None
    source: str = ""
    unverified: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "model_type": self.model_type,
            "num_hidden_layers": self.num_hidden_layers,
            "source": self.source,
            "unverified": list(self.unverified),
            "assumed": list(self.assumed),
        }
