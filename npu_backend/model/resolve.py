"""From what files say and what tensors are to one quantization for each projection of a layer.

Files must agree: a description, ``quantization_config``, the headers and an explicit ``quant`` that
contradict each other are an error that names both, never a silent choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen

from npu_backend.errors import ModelError
from npu_backend.model.config import AttentionSite, ModelConfig

if TYPE_CHECKING:
    # A bundled model has no files, and a cold plan of one should not pay for reading them.
    from npu_backend.model.checkpoint import Checkpoint, Module
    from npu_backend.model.names import Said
    from npu_backend.model.quantization import Declared, Description
    from npu_backend.model.records import Measured

__all__ = ["SHARDS", "Projection", "Resolver"]

SHARDS = {
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "q_proj": ("q_proj",),
    "kv_a_proj_with_mqa": ("kv_a_proj_with_mqa",),
    "q_b_proj": ("q_b_proj",),
    "kv_b_proj": ("kv_b_proj",),
    "wq_b": ("indexer.wq_b",),
}
"""The checkpoint's modules of each projection; hosts fuse the first two."""

_FUSED = ("fused_qkv_a_proj_with_mqa", "fused_qkv_a_proj")
"""Names under which files that were written by hosts have the two as one."""

_ATTENTIONS = ("self_attn", "attention")
_MAY_BE_SILENT = frozenset({"kv_b_proj", "wq_b"})
"""Projections that a description may leave out on a main layer: they are float then."""


@frozen
class Projection:
    """One projection, resolved.

    Args:
        kind: Its quantization.
        weight: What the headers say of its weight, or None where there are none.
        scale: What they say of its scales, offsets and biases together.
    """

    kind: str
    weight: Measured | None = None
    scale: Measured | None = None


@frozen
class _Found:
    """One shard: its quantization, who says so, and its tensors."""

    name: str
    kind: str | None
    words: str
    module: Module | None


@frozen
class Resolver:
    """Resolves the projections of one model.

    Args:
        config: The model.
        description: ModelSlim's description, or None.
        declared: What ``quantization_config`` says, or None.
        checkpoint: The tensors, or None.
        quant: The caller's word for where files say nothing; ``none`` is no word.
        root: Root and attention module of the checkpoint's names, see :meth:`prefix`.
        assumed: Notes of what was assumed, in order, filled as layers are resolved.
    """

    config: ModelConfig
    description: Description | None = None
    declared: Declared | None = None
    checkpoint: Checkpoint | None = None
    quant: str = "none"
    root: tuple[str, str] = ("", _ATTENTIONS[0])
    assumed: dict[str, None] = field(factory=dict)

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        description: Description | None,
        declared: Declared | None,
        checkpoint: Checkpoint | None,
        quant: str,
    ) -> Resolver:
        """Return the resolver, with the root of the checkpoint's names found out."""
        root = (config.roots[0], _ATTENTIONS[0])
        for known in (checkpoint, description):
            found = None if known is None else _root(config, known.__contains__)
            if found is not None:
                root = found
                break
        return cls(config, description, declared, checkpoint, quant, root)

    @property
    def has_no_files(self) -> bool:
        """Whether no file says anything of quantization."""
        return self.description is None and self.declared is None and self.checkpoint is None

    def prefix(self, site: AttentionSite) -> str:
        """Return the checkpoint's name of an attention module."""
        return site.module(*self.root)

    def projections(self, site: AttentionSite) -> tuple[str, ...]:
        """Return the projections that a layer has."""
        lora = self.config.dims["q_lora_rank"] is not None
        first = ("fused_qkv_a_proj", "q_b_proj") if lora else ("q_proj", "kv_a_proj_with_mqa")
        return (*first, "kv_b_proj", *(("wq_b",) if site.indexer == "own" else ()))

    def is_absent(self, site: AttentionSite) -> bool:
        """Whether there is a checkpoint and it has no tensor of the layer at all."""
        if self.checkpoint is None:
            return False
        modules = (name for p in self.projections(site) for name in (*SHARDS[p], *_FUSED))
        prefix = self.prefix(site)
        return not any(f"{prefix}.{module}" in self.checkpoint for module in modules)

    def check_complete(self, sites: Sequence[AttentionSite]) -> None:
        """Raise an error that names the tensors which the layers need and the checkpoint lacks."""
        if self.checkpoint is None:
            return
        missing = [
            f"{self.prefix(site)}.{shard}.weight"
            for site in sites
            for projection in self.projections(site)
            for shard in SHARDS[projection]
            if not any(name in self.checkpoint for name in self._names(site, shard))
        ]
        if missing:
            more = [f"and {len(missing) - 8} more"] if len(missing) > 8 else []
            raise ModelError(
                "the checkpoint lacks tensors of its attention layers",
                whom=str(self.checkpoint.directory),
                why=[*(f"{name} is missing" for name in missing[:8]), *more],
                remedy="complete the checkpoint, correct the config, or leave the layers out",
            )

    def resolve(self, site: AttentionSite, projection: str) -> Projection:
        """Return a projection's quantization, dtype and bytes.

        Raises:
            ModelError: Files contradict each other, or say something unknown.
        """
        asked = self.quant if not site.is_nextn and projection != "kv_b_proj" else "none"
        if self.has_no_files:
            return Projection(asked)
        found = [self._shard(site, projection, shard) for shard in SHARDS[projection]]
        for other in found[1:]:
            if other.kind != found[0].kind:
                raise ModelError(
                    f"the shards of {projection} have different quantizations",
                    whom=f"layer {site.layer_id} of {self.config.where}",
                    why=[f"{f.name}: {f.kind or 'none'} ({f.words or 'unsaid'})" for f in found],
                    remedy="quantize both alike: hosts fuse them into one weight",
                )
        kind = found[0].kind
        if kind is not None and asked not in ("none", kind):
            # An explicit quantization is for where the files say nothing, and that is told.
            self.assumed[
                f"the files say {kind} of {projection}; {asked} applies only where they are silent"
            ] = None
        # A file that has the two fused gives one module for both.
        modules = list({f.module.weight.name: f.module for f in found if f.module}.values())
        if not modules:
            return Projection(kind or asked)
        from npu_backend.model.checkpoint import measure

        weight, scale = measure(modules)
        dtypes = {module.weight.dtype for module in modules}
        if len(dtypes) > 1:
            raise ModelError(
                f"the shards of {projection} have different dtypes",
                whom=f"layer {site.layer_id} of {self.config.where}",
                why=[str(module.weight) for module in modules],
                remedy="store both alike: hosts fuse them into one weight",
            )
        return Projection(kind or asked, weight, scale)

    def _names(self, site: AttentionSite, shard: str) -> tuple[str, ...]:
        """Return the names of a shard: the checkpoint's, the fused ones, then other roots."""
        fused = _FUSED if shard in SHARDS["fused_qkv_a_proj"] else ()
        if self.config.dims["q_lora_rank"] is None:
            fused = ()
        mine = self.prefix(site)
        names = [f"{mine}.{part}" for part in (shard, *fused)]
        if self.config.roots[0] != "model.":
            # Hosts strip or move the root of a multimodal model, and ignore lists follow either.
            for root in self.config.roots:
                names.append(f"{site.module(root, self.root[1])}.{shard}")
        return tuple(dict.fromkeys(names))

    def _shard(self, site: AttentionSite, projection: str, shard: str) -> _Found:
        names = self._names(site, shard)
        name = names[0]
        module = None
        if self.checkpoint is not None:
            tensors = (self.checkpoint.module(n) for n in names)
            module = next((tensor for tensor in tensors if tensor is not None), None)
        described = None if self.description is None else self.description.said(names)
        declared = None if self.declared is None else self.declared.said(names)
        if described is not None and declared is not None and described.kind != declared.kind:
            raise ModelError(
                f"two files contradict each other on {name}",
                whom=f"layer {site.layer_id} of {self.config.where}",
                why=[described.words, f"{declared.words} ({declared.kind})"],
                remedy="remove the description or the quantization_config that is out of date",
            )
        said = described or declared
        if said is None:
            self._silent(site, projection, name)
        return self._judge(site, name, said, module)

    def _judge(
        self, site: AttentionSite, name: str, said: Said | None, module: Module | None
    ) -> _Found:
        """Return a shard, once the tensors are seen to be what the files say."""
        if module is None:
            return _Found(name, said.kind if said else None, said.words if said else "", None)
        kinds = module.kinds()
        if said is not None and said.kind not in kinds:
            raise ModelError(
                f"{module.weight}, which is not {said.kind}",
                whom=f"layer {site.layer_id} of {self.config.where}",
                why=[said.words, f"the tensors of {name} mean {kinds[0]}"],
                remedy="restore the description or the weights: they do not belong together",
            )
        kind = said.kind if said else kinds[0]
        rows, columns = self._shape(name, module)
        if rows:
            module.check_shape(rows, columns, kind)
        return _Found(name, kind, str(module.weight), module)

    def _shape(self, name: str, module: Module) -> tuple[int, int]:
        """Return rows and columns of a shard as the config has them; (0, 0) where not known."""
        dims = self.config.dims
        hidden, latent, lora = dims["hidden_size"], dims["kv_lora_rank"], dims["q_lora_rank"]
        nope, rope = dims["qk_nope_head_dim"], dims["qk_rope_head_dim"]
        if any(f".{fused}." in module.weight.name for fused in _FUSED):
            return lora + latent + rope, hidden
        q_rows = dims["num_heads"] * (nope + rope)
        shapes = {
            "q_a_proj": (lora, hidden),
            "kv_a_proj_with_mqa": (latent + rope, hidden),
            "q_proj": (q_rows, hidden),
            "q_b_proj": (q_rows, lora),
            "kv_b_proj": (dims["num_heads"] * (nope + dims["v_head_dim"]), latent),
        }
        return shapes.get(name.rpartition(".")[2], (0, 0))

    def _silent(self, site: AttentionSite, projection: str, name: str) -> None:
        """Note, or refuse, that the files say nothing of a projection."""
        if self.description is None:
            return
        path = self.description.path
        if site.is_nextn and not any(
            found in self.description
            for p in self.projections(site)
            for shard in SHARDS[p]
            for found in self._names(site, shard)
        ):
            # ModelSlim's descriptions often end before the MTP layer, which is float then.
            self.assumed[f"{path.name} has no MTP layer {site.layer_id}"] = None
        elif projection in _MAY_BE_SILENT:
            self.assumed[f"{path.name} does not name every {projection}"] = None
        else:
            raise ModelError(
                f"the quantization description lacks {name}.weight",
                whom=str(path),
                why="it names a type for each tensor of a model, and this one is read",
                remedy="use the description that belongs to the checkpoint",
            )


def _root(config: ModelConfig, known: Callable[[str], bool]) -> tuple[str, str] | None:
    """Return root and attention module under which a file knows the model's layers."""
    shards = ("kv_a_proj_with_mqa", *_FUSED)
    for site in config.sites:
        for root in config.roots:
            for attention in _ATTENTIONS:
                prefix = site.module(root, attention)
                if any(known(f"{prefix}.{shard}") for shard in shards):
                    return root, attention
    return None
