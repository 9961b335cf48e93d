"""What mlaprolog must give for one of SGLang's layers, by the CPU reference of the op.

The weights are taken from SGLang's module before a plan can change them, and laid out here by the
op's documents alone: neither SGLang's preparation nor npu-backend's has a part in it.
"""

from __future__ import annotations

from typing import Any

import torch

from npu_backend.runtime.reference import npu_dynamic_quant, npu_mla_prolog_v3

__all__ = ["Loaded", "expected"]

_MODES = {"none": 0, "q_b": 1, "dynamic": 2}


class Loaded:
    """Copies of a layer's weights in host memory, as ``(in, out)``, with what else the op takes.

    Args:
        attention: SGLang's module, loaded.
        quant: The model's quantization.
    """

    def __init__(self, attention: Any, quant: str) -> None:
        self.mode = _MODES[quant]
        first, second = attention.fused_qkv_a_proj_with_mqa, attention.q_b_proj
        # SGLang keeps a quantized weight turned already.
        self.first = _rows_in(first.weight, turned=self.mode == 2)
        self.second = _rows_in(second.weight, turned=self.mode in (1, 2))
        self.first_scale = _row(first) if self.mode == 2 else None
        self.second_scale = _row(second) if self.mode in (1, 2) else None
        self.w_kc = attention.w_kc.cpu().contiguous()
        self.gammas = tuple(
            norm.weight.detach().cpu().clone()
            for norm in (attention.q_a_layernorm, attention.kv_a_layernorm)
        )
        self.epsilon = attention.kv_a_layernorm.variance_epsilon
        self.angles = attention.rotary_emb.cos_sin_cache.cpu().clone()
        self.q_lora = attention.q_lora_rank


def _rows_in(weight: torch.Tensor, *, turned: bool) -> torch.Tensor:
    host = weight.detach().cpu()
    return (host if turned else host.t()).contiguous().clone()


def _row(linear: Any) -> torch.Tensor:
    scale: torch.Tensor = linear.weight_scale.detach().cpu().float().reshape(1, -1).clone()
    return scale


def expected(
    loaded: Loaded,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return absorbed and rotated queries; write the step's rows into ``latent`` and ``rope``.

    Args:
        loaded: The layer.
        hidden: ``(rows, hidden_size)``, in host memory as everything here.
        positions: ``(rows,)``.
        slots: ``(rows,)``.
        latent: The layer's pages, ``(pages, page, 1, latent)``.
        rope: Likewise, ``(pages, page, 1, rope)``.
    """
    cos, sin = loaded.angles[positions].chunk(2, dim=-1)
    more: dict[str, Any] = {}
    x = hidden
    if loaded.mode == 2:
        x, scale = npu_dynamic_quant(hidden)
        assert loaded.first_scale is not None
        more["dequant_scale_x"] = scale.reshape(-1, 1)
        more["dequant_scale_w_dq"] = loaded.first_scale[:, : loaded.q_lora].contiguous()
        more["dequant_scale_w_dkv_kr"] = loaded.first_scale[:, loaded.q_lora :].contiguous()
    if loaded.mode in (1, 2):
        more["dequant_scale_w_uq_qr"] = loaded.second_scale
    query, query_rope, *_ = npu_mla_prolog_v3(
        x,
        loaded.first[:, : loaded.q_lora].contiguous(),
        loaded.second,
        loaded.w_kc,
        loaded.first[:, loaded.q_lora :].contiguous(),
        *loaded.gammas,
        torch.cat((sin, sin), -1),
        torch.cat((cos, cos), -1),
        latent,
        rope,
        cache_index=slots,
        rmsnorm_epsilon_cq=loaded.epsilon,
        rmsnorm_epsilon_ckv=loaded.epsilon,
        weight_quant_mode=loaded.mode,
        **more,
    )
    return query, query_rope
