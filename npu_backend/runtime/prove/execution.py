"""Run a bound layer through a scenario, as a host would, and keep what came out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen

from npu_backend.model.records import MlaLayer
from npu_backend.runtime.bound import BoundLayer
from npu_backend.runtime.cache import LayerCache
from npu_backend.runtime.prove.attention import latent_attention
from npu_backend.runtime.prove.kv import CacheRows
from npu_backend.runtime.prove.mla_fp32 import MlaReference, MlaShape
from npu_backend.runtime.prove.scenario import Scenario, Step
from npu_backend.runtime.prove.writer import poison_slots
from npu_backend.runtime.result import PreprocessResult

__all__ = [
    "Outcome",
    "StepOutcome",
    "execute",
    "expected_rows",
    "raw_bytes",
    "same_bits",
    "seeded_sequences",
    "shape_of",
]


@frozen(eq=False)
class StepOutcome:
    """What one step gave, on the CPU.

    Args:
        q_nope: ``(rows, heads, kv_lora_rank)``.
        q_pe: ``(rows, heads, rope)``.
        out: ``(rows, heads, v)``.
        q_lora: ``(rows, q_lora_rank)`` as floats, or None where the path hands none over.
        q_nope_scale: ``(rows, heads, 1)`` of a quantized ``q_nope``, or None.
        strayed: Whether a step of padded rows wrote outside the padding blocks.
    """

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    out: torch.Tensor
    q_lora: torch.Tensor | None = None
    q_nope_scale: torch.Tensor | None = None
    strayed: bool = False

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what must be equal after the release."""
        named = {
            "q_nope": self.q_nope,
            "q_pe": self.q_pe,
            "out": self.out,
            "q_lora": self.q_lora,
            "q_nope_scale": self.q_nope_scale,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@frozen(eq=False)
class Outcome:
    """What a whole scenario gave.

    Args:
        fill: Outcomes of the steps that filled the histories.
        steps: Outcomes of the steps.
        k_nope: The raw latent cache at the end.
        k_rope: The raw key cache at the end.
        rows: What their rows mean.
    """

    fill: tuple[StepOutcome, ...]
    steps: tuple[StepOutcome, ...]
    k_nope: torch.Tensor
    k_rope: torch.Tensor
    rows: CacheRows


def shape_of(layer: MlaLayer, attn_tp_size: int) -> MlaShape:
    """Return the dimensions that the fp32 reference needs."""
    return MlaShape(
        heads=layer.local_heads(attn_tp_size),
        nope=layer.qk_nope_head_dim,
        rope=layer.qk_rope_head_dim,
        v=layer.v_head_dim,
        latent=layer.kv_lora_rank,
        q_lora=layer.q_lora_rank,
        epsilon=layer.rms_norm_eps,
        rotates=layer.has_rope,
    )


def seeded_sequences(layer: MlaLayer, scenario: Scenario, seed: int) -> list[torch.Tensor]:
    """Return normal hidden states of every sequence, ``(length, hidden)`` in the layer's dtype."""
    generator = torch.Generator().manual_seed(seed * 1000 + layer.layer_id + 1)
    dtype = getattr(torch, layer.dtype)
    # Where only padded rows run there is no sequence, and they still hold something.
    lengths = [track.length for track in scenario.tracks] or [1]
    return [
        torch.randn(length, layer.hidden_size, generator=generator).to(dtype) for length in lengths
    ]


def expected_rows(parts: Sequence[torch.Tensor], step: Step, first: Sequence[int]) -> torch.Tensor:
    """Return the reference's rows of a step's tokens.

    Args:
        parts: One tensor a sequence, whose row 0 is position ``first``.
        step: The step.
        first: First position of each sequence's tensor.
    """
    rows = []
    for part in step.parts:
        start = part.start - first[part.track]
        rows.append(parts[part.track][start : start + part.count])
    return torch.cat(rows)


def write_histories(
    cache: LayerCache, rows: CacheRows, scenario: Scenario, reference: MlaReference
) -> None:
    """Fill the cache as a prefill worker's transfer would: by layout, from the reference."""
    layout = scenario.layout
    for track, latent, key in zip(scenario.tracks, reference.latents, reference.keys, strict=True):
        if track.history:
            slots = track.slots(0, track.history, layout.block_size)
            rows.write(cache, slots, latent[: track.history], key[: track.history])


def _queries(step: Step, scenario: Scenario, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
    if not step.parts:
        # What padded rows hold is the host's affair; here it is some real rows again.
        source = torch.cat(list(hidden))
        return source[torch.arange(step.rows) % len(source)]
    return torch.cat([hidden[p.track][p.start : p.start + p.count] for p in step.parts])


def _block_tables(step: Step, scenario: Scenario) -> torch.Tensor:
    tables = [scenario.tracks[p.track].blocks for p in step.parts]
    width = max(len(t) for t in tables)
    return torch.tensor([[*t, *[0] * (width - len(t))] for t in tables])


def _q_lora(q_lora: torch.Tensor | None, scale: torch.Tensor | None) -> torch.Tensor | None:
    if q_lora is None:
        return None
    dense = q_lora.detach().cpu().float()
    if scale is None:
        return dense
    by = scale.detach().cpu()
    if by.dtype != torch.float32:
        # e8m0: powers of two, coded by their exponents.
        by = torch.exp2(by.view(torch.uint8).float() - 127.0)
    by = by.reshape(len(dense), -1)
    return dense * by.repeat_interleave(dense.shape[1] // by.shape[1], -1)


def _attend(
    result: PreprocessResult,
    cache: LayerCache,
    rows: CacheRows,
    step: Step,
    scenario: Scenario,
) -> torch.Tensor:
    """Return what a host's attention kernel would, in the layer's dtype and on its device."""
    layer, layout = rows.layer, scenario.layout
    quantized = layout.dtype != str(cache.k_rope.dtype).removeprefix("torch.")
    caches, q_nope = (cache.k_nope, cache.k_rope), result.q_nope
    q_pe, nz = result.q_pe, layout.cache_mode == "PA_NZ"
    if quantized or result.q_nope_scale is not None:
        caches, nz = rows.dense(cache), False
        q_nope, q_pe = q_nope.cpu().float(), q_pe.cpu().float()
        if result.q_nope_scale is not None:
            # One scale for the whole score: the query's over the latent's factor.
            scale, factor = result.q_nope_scale.cpu(), rows.latent_factor
            assert factor is not None
            q_nope, q_pe = q_nope * scale, q_pe * scale / factor
    attended = latent_attention(
        q_nope,
        q_pe,
        *caches,
        _block_tables(step, scenario),
        [p.start + p.count for p in step.parts],
        [p.count for p in step.parts],
        scale=_scale(layer),
        nz=nz,
    )
    return attended.to(cache.k_nope.device, getattr(torch, layer.dtype))


def _run(
    layer: BoundLayer,
    cache: LayerCache,
    rows: CacheRows,
    scenario: Scenario,
    step: Step,
    hidden: Sequence[torch.Tensor],
) -> StepOutcome:
    device, layout = cache.k_nope.device, scenario.layout
    slots = scenario.slots(step)
    kept = None
    if step.parts:
        # A step that misses its slots must meet NaN, not what an earlier step left there.
        for tensor in (cache.k_nope, cache.k_rope):
            if tensor.numel():
                poison_slots(tensor, slots, layout)
    else:
        # clone(): on the CPU, cpu() alone is the cache itself.
        kept = [t[scenario.pad_blocks :].clone().cpu() for t in (cache.k_nope, cache.k_rope)]
    result = layer.preprocess(
        _queries(step, scenario, hidden).to(device),
        scenario.positions(step).to(device),
        slots.to(device),
        phase=step.phase,
    )
    if step.parts:
        attended = _attend(result, cache, rows, step, scenario)
    else:
        attended = result.q_nope.to(getattr(torch, rows.layer.dtype))
    out = layer.v_up_for(step.phase)(attended)
    strayed = kept is not None and not all(
        torch.equal(raw_bytes(a), raw_bytes(t[scenario.pad_blocks :].cpu()))
        for a, t in zip(kept, (cache.k_nope, cache.k_rope), strict=True)
    )
    return StepOutcome(
        q_nope=result.q_nope.detach().cpu().clone(),
        q_pe=result.q_pe.detach().cpu().clone(),
        out=out.detach().cpu().clone(),
        q_lora=_q_lora(result.q_lora, result.q_lora_scale),
        q_nope_scale=(
            None if result.q_nope_scale is None else result.q_nope_scale.detach().cpu().clone()
        ),
        strayed=strayed,
    )


def _scale(layer: MlaLayer) -> float:
    return float((layer.qk_nope_head_dim + layer.qk_rope_head_dim) ** -0.5)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, so that NaN equals itself and -0 differs from 0."""
    return tensor.contiguous().view(torch.uint8)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, one shape, and the same bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(torch.equal(raw_bytes(one), raw_bytes(other)))


@torch.no_grad()
def execute(
    layer: BoundLayer,
    cache: LayerCache,
    scenario: Scenario,
    hidden: Sequence[torch.Tensor],
    reference: MlaReference,
) -> Outcome:
    """Run the whole scenario on an emptied cache.

    Args:
        layer: The prepared layer.
        cache: Its cache.
        scenario: What to run.
        hidden: Hidden states of every sequence.
        reference: Fills the histories where no extend step does.
    """
    cache.k_nope.zero_()
    cache.k_rope.zero_()
    rows = CacheRows.of(layer.plan.layer, cache)
    if not scenario.fill:
        write_histories(cache, rows, scenario, reference)
    fill = tuple(_run(layer, cache, rows, scenario, step, hidden) for step in scenario.fill)
    steps = tuple(_run(layer, cache, rows, scenario, step, hidden) for step in scenario.steps)
    raw = (cache.k_nope.detach().cpu().clone(), cache.k_rope.detach().cpu().clone())
    return Outcome(fill, steps, *raw, rows)
