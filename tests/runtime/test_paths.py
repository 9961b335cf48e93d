"""The three paths against the fp32 reference of the layer, and against each other on one cache."""

from __future__ import annotations

import pytest
import torch

from npu_backend import Indexer, KvLayout, NotExecutedError, Phase, PrepareError
from npu_backend.model.weights import loaded_weights
from npu_backend.runtime.prove.attention import latent_attention
from npu_backend.runtime.prove.mla_fp32 import MlaShape, mla_reference
from npu_backend.runtime.prove.seeded import seeded_weights
from npu_backend.runtime.prove.writer import in_rope_layout, read_slots

LENGTH = 20
FIRST = 17
"""Tokens 0..16 are extended, 17..19 decoded; of the latter the outputs are compared."""
BLOCK = 16
# Blocks of 16 tokens, 2 then 0: tokens do not lie in a row in memory.
TABLE = torch.tensor([[2, 0]])


def _slots(block):
    tokens = torch.arange(LENGTH)
    return TABLE[0][tokens // block] * block + tokens % block


def _error(found, expected):
    found, expected = found.float(), expected.float()
    return ((found - expected).norm() / expected.norm()).item()


def _run(h, layer, requests=(), tolerance=1e-2, phase=Phase.DECODE, **deployment):
    """Extend by absorb, continue in a decode-like phase by the planned path; return errors."""
    plan = h.plan(
        layer, role="null", requests=list(requests), promises="local_prefill", **deployment
    )
    made = seeded_weights(layer, 1)
    bound = h.bind(plan, made.to(torch.device("cpu")))
    bound.prepare()
    dtype = getattr(torch, layer.dtype)
    hidden = torch.randn(LENGTH, layer.hidden_size, generator=torch.Generator().manual_seed(1))
    hidden, slots = hidden.to(dtype), _slots(layer.kv_layout.block_size)
    positions = torch.arange(LENGTH)
    bound.preprocess(hidden[:FIRST], positions[:FIRST], slots[:FIRST], phase=Phase.EXTEND)
    result = bound.preprocess(hidden[FIRST:], positions[FIRST:], slots[FIRST:], phase=phase)
    shape = MlaShape(
        heads=layer.num_heads,
        nope=layer.qk_nope_head_dim,
        rope=layer.qk_rope_head_dim,
        v=layer.v_head_dim,
        latent=layer.kv_lora_rank,
        q_lora=layer.q_lora_rank,
        epsilon=layer.rms_norm_eps,
        rotates=layer.has_rope,
    )
    expected = mla_reference(
        shape,
        made.loaded,
        made.gammas,
        [hidden],
        [FIRST],
        scales=made.channel_scales,
        dtype=torch.float64 if layer.dtype == "float32" else torch.float32,
    )
    attended = latent_attention(
        result.q_nope,
        result.q_pe,
        bound.cache.k_nope,
        bound.cache.k_rope,
        TABLE,
        [LENGTH],
        [LENGTH - FIRST],
        scale=shape.scale,
        nz=layer.kv_layout.cache_mode == "PA_NZ",
    )
    layout = layer.kv_layout
    keys = in_rope_layout(expected.keys[0], layout)
    errors = {
        "output": _error(bound.v_up_for(phase)(attended), expected.outputs[0]),
        "latent": _error(read_slots(bound.cache.k_nope, slots, layout), expected.latents[0]),
    }
    if layer.qk_rope_head_dim:
        errors["key"] = _error(read_slots(bound.cache.k_rope, slots, layout), keys)
    if result.q_lora is not None and result.q_lora.is_floating_point():
        errors["q_lora"] = _error(result.q_lora, expected.q_loras[0])
    assert max(errors.values()) <= tolerance, errors
    return bound, result, errors


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2), ("float16", 2e-3)]
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": None},
        {"use_rope": False},
        {"qk_rope_head_dim": 0},
        {"q_lora_rank": None, "use_rope": False},
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
        {"w_kc_layout": "contiguous", "w_vc_layout": "strided"},
    ],
    ids=lambda c: ",".join(c) or "plain",
)
def test_absorb(h, dtype, tolerance, changes):
    bound, _, _ = _run(h, h.layer(dtype=dtype, **changes), tolerance=tolerance)
    assert bound.plan.path[0].strategy == "absorb"


@pytest.mark.parametrize("mode", ["PA_BSND", "PA_NZ"])
@pytest.mark.parametrize("rope", ["half", "interleaved"])
@pytest.mark.parametrize("wide", [False, True], ids=["plain ops", "fused ops"])
def test_absorb_writes_every_layout(h, mode, rope, wide):
    dims = {"kv_lora_rank": 512, "qk_rope_head_dim": 64} if wide else {"qk_rope_head_dim": 16}
    layout = KvLayout(cache_mode=mode, rope=rope, block_size=BLOCK)
    _run(h, h.layer(kv_layout=layout, **dims))


@pytest.mark.parametrize("kind", ["w8a8-dynamic", "w8a8-static"])
@pytest.mark.parametrize("rank", [48, None])
def test_absorb_with_int8_projections(h, kind, rank):
    """Tolerance: each int8 rounding of activations of a few deviations adds about a percent."""
    quant = dict.fromkeys(("fused_qkv_a_proj", "q_proj", "kv_a_proj_with_mqa", "q_b_proj"), kind)
    _run(h, h.layer(q_lora_rank=rank, quant=quant), tolerance=4e-2)


@pytest.mark.parametrize("kind", ["hif8", "fp8-block", "w8a16", "w4a8-dynamic"])
def test_absorb_says_what_it_does_not_execute_yet(h, kind):
    layer = h.layer(quant={"q_b_proj": kind})
    # 8-bit floats are of A5.
    plan = h.plan(layer, soc="A5" if kind in ("hif8", "fp8-block") else "A3")
    weights = h.weights(h.layer())
    for spec in loaded_weights(layer, 1):
        if spec.name.startswith("q_b_proj"):
            dtype = getattr(torch, spec.dtype)
            # Two 4-bit weights share a byte.
            rows = spec.bytes // dtype.itemsize // spec.shape[-1]
            weights[spec.name] = torch.zeros(rows, spec.shape[-1], dtype=torch.int8).to(dtype)
    with pytest.raises(PrepareError, match=f"q_b_proj in {kind} .* is not executed yet") as caught:
        h.bind(plan, weights).prepare()
    assert caught.value.remedy
    assert caught.value.why
    assert caught.value.whom == "layer 7, path, absorb"


@pytest.mark.parametrize("phase", ["decode", "target_verify", "idle"])
@pytest.mark.parametrize("mode", ["PA_BSND", "PA_NZ"])
def test_mlaprolog_continues_a_cache_that_absorb_extended(h, phase, mode):
    layer = h.fused_layer(
        kv_layout=KvLayout(cache_mode=mode, block_size=BLOCK), indexer=Indexer("own")
    )
    bound, result, _ = _run(h, layer, ["path=mlaprolog"], phase=Phase.parse(phase))
    assert [e.strategy for e in bound.plan.path if phase in e.phases] == ["mlaprolog"]
    assert result.q_lora.shape == (LENGTH - FIRST, 1536)
    assert result.q_lora_scale is None


def test_mlaprolog_of_a_layer_without_indexer_hands_no_q_lora_over(h):
    _, result, _ = _run(h, h.fused_layer(), ["path=mlaprolog"])
    assert result.q_lora is None


def test_mlaprolog_with_int8_throughout(h):
    quant = {"fused_qkv_a_proj": "w8a8-dynamic", "q_b_proj": "w8a8-dynamic"}
    layer = h.fused_layer(quant=quant, indexer=Indexer("own", "w8a8-dynamic"))
    bound, result, _ = _run(h, layer, ["path=mlaprolog"], tolerance=4e-2)
    assert result.q_lora.dtype == torch.int8
    assert result.q_lora_scale.shape == (LENGTH - FIRST, 1)
    (entry,) = (e for e in bound.plan.path if "decode" in e.phases)
    assert entry.offer.mode == "weight_quant_mode=2"


def test_mlaprolog_mode_1_reads_the_parameter_itself(h):
    quant = {"q_b_proj": "w8a8-dynamic"}
    layer = h.fused_layer(quant=quant)
    plan = h.plan(layer, requests="path=mlaprolog")
    weights = h.weights(layer)
    weights["q_b_proj"] = weights["q_b_proj"].contiguous()
    with pytest.raises(PrepareError, match="q_b_proj is not laid out as the op takes it"):
        h.bind(plan, weights).prepare()
    weights["q_b_proj"] = weights["q_b_proj"].t().contiguous().t()
    bound = h.bind(plan, weights)
    bound.prepare()
    assert bound.plan == plan
    before = h.step(bound)
    bound.release()
    assert "q_b_proj" not in bound.released
    assert all(torch.equal(a, b) for a, b in zip(before, h.step(bound), strict=True))
    other = h.bind(h.plan(layer, requests="path=absorb"), h.weights(layer))
    other.prepare()
    for mine, theirs in zip(before, h.step(other), strict=True):
        assert _error(mine, theirs) <= 3e-2


@pytest.mark.parametrize("library", ["sgl-kernel-npu", "vllm-ascend"])
@pytest.mark.parametrize("mode", ["PA_BSND", "PA_NZ"])
def test_mlapo_continues_a_cache_that_absorb_extended(h, mode, library):
    block = 128 if mode == "PA_NZ" else BLOCK
    layer = h.fused_layer(
        hidden_size=2048,
        kv_layout=KvLayout(cache_mode=mode, block_size=block),
        quant={"fused_qkv_a_proj": "w8a8-static", "q_b_proj": "w8a8-static"},
    )
    bound, result, _ = _run(h, layer, ["path=mlapo"], tolerance=4e-2, kernels=library)
    assert [e.strategy for e in bound.plan.path if "decode" in e.phases] == ["mlapo", "absorb"]
    assert result.q_lora is None


@pytest.mark.parametrize("library", ["sgl-kernel-npu", "vllm-ascend"])
def test_only_vllm_ascends_mlapo_hands_the_compressed_query_to_an_indexer(h, library):
    layer = h.fused_layer(
        hidden_size=2048,
        indexer=Indexer("own"),
        quant={"fused_qkv_a_proj": "w8a8-static", "q_b_proj": "w8a8-static"},
    )
    given = h.weights(layer)
    bound = h.bind(h.plan(layer, requests="path=mlapo", kernels=library), given)
    bound.prepare()
    other = h.bind(h.plan(layer, requests="path=absorb"), h.weights(layer))
    other.prepare()
    hidden = torch.randn(5, 2048, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    steps = (hidden, torch.arange(5), torch.arange(5))
    mine, theirs = (b.preprocess(*steps, phase=Phase.DECODE) for b in (bound, other))
    if library == "sgl-kernel-npu":
        assert mine.q_lora is None
    else:
        assert mine.q_lora.shape == (5, 1536)
        assert _error(mine.q_lora, theirs.q_lora) <= 4e-2


@pytest.mark.parametrize("library", ["sgl-kernel-npu", "vllm-ascend"])
def test_mlapo_in_float16_is_not_executed_yet(h, library):
    layer = h.fused_layer(
        hidden_size=2048,
        dtype="float16",
        quant={"fused_qkv_a_proj": "w8a8-static", "q_b_proj": "w8a8-static"},
    )
    plan = h.plan(layer, requests="path=mlapo", kernels=library)
    with pytest.raises(NotExecutedError, match=r"mla_preprocess .* is not executed yet"):
        h.bind(plan).prepare()


@pytest.mark.parametrize("nz", [False, True])
@pytest.mark.parametrize(
    "slots", [[3, -1, 40, -1], [-1, -1, 40, 3], [-1, -1, -1, -1], [0, 1, -1, 2]]
)
def test_padded_tokens_write_nothing(h, nz, slots):
    mode = "PA_NZ" if nz else "PA_BSND"
    layer = h.layer(kv_layout=KvLayout(cache_mode=mode, block_size=BLOCK), qk_rope_head_dim=16)
    bound = h.bind(h.plan(layer))
    bound.prepare()
    hidden = torch.randn(4, 64).to(torch.bfloat16)
    cache = bound.cache
    cache.k_nope.fill_(5.0)
    cache.k_rope.fill_(5.0)
    at = torch.tensor(slots)
    bound.preprocess(hidden, torch.arange(4), at, phase=Phase.IDLE)
    everywhere = torch.arange(cache.num_slots)
    written = at[at >= 0]
    kept = everywhere[~torch.isin(everywhere, written)]
    for tensor in (cache.k_nope, cache.k_rope):
        assert (read_slots(tensor, kept, layer.kv_layout) == 5.0).all()
        assert not (read_slots(tensor, written, layer.kv_layout) == 5.0).all(-1).any()


# What a wrong wiring would be, each caught by the reference: the list to extend with every path.
def _swap_halves(weights):
    fused = weights["fused_qkv_a_proj"]
    weights["fused_qkv_a_proj"] = torch.cat((fused[48:], fused[:48]))


def _shift_slots(bound):
    write, index = bound.cache.k_nope, torch.arange(bound.cache.num_slots)
    write.view(-1, 32)[:] = write.view(-1, 32)[(index + 1) % bound.cache.num_slots]


@pytest.mark.parametrize("mutation", ["halves", "slots", "rope", "gamma"])
def test_wrong_wiring_turns_the_comparison_red(h, mutation):
    layer = h.layer(dtype="float32")
    _run(h, layer, tolerance=1e-5)
    weights = h.weights(layer)
    if mutation == "halves":
        _swap_halves(weights)
    if mutation == "gamma":
        weights["kv_a_layernorm"] = weights["kv_a_layernorm"].flip(0)
    wrong = h.bind(h.plan(layer), weights)
    if mutation == "rope":
        wrong.cache.sin.neg_()
    wrong.prepare()
    right = h.bind(h.plan(layer))
    right.prepare()
    mine, theirs = h.step(wrong), h.step(right)
    if mutation == "slots":
        _shift_slots(wrong)
        mine = (wrong.cache.k_nope,)
        theirs = (right.cache.k_nope,)
    assert max(_error(a, b) for a, b in zip(mine, theirs, strict=True)) > 1e-1
