"""The fp32 reference against loops, and against absorption, which must give the same layer."""

from __future__ import annotations

import math

import pytest
import torch

from npu_backend.runtime.prove.attention import gather_rows, latent_attention
from npu_backend.runtime.prove.mla_fp32 import MlaShape, dequantized, mla_reference

HIDDEN = 12
SHAPE = MlaShape(heads=2, nope=4, rope=6, v=3, latent=8, q_lora=5, epsilon=1e-5)


def weights_of(shape, seed=3):
    generator = torch.Generator().manual_seed(seed)

    def rand(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64) * size[-1] ** -0.5

    q_rows = shape.heads * (shape.nope + shape.rope)
    down = shape.latent + shape.rope
    weights = {"kv_b_proj": rand(shape.heads * (shape.nope + shape.v), shape.latent)}
    gammas = {"kv_a_layernorm": 1 + 0.1 * rand(shape.latent)}
    if shape.q_lora is None:
        weights |= {"q_proj": rand(q_rows, HIDDEN), "kv_a_proj_with_mqa": rand(down, HIDDEN)}
    else:
        weights |= {
            "fused_qkv_a_proj": rand(shape.q_lora + down, HIDDEN),
            "q_b_proj": rand(q_rows, shape.q_lora),
        }
        gammas["q_a_layernorm"] = 1 + 0.1 * rand(shape.q_lora)
    return weights, gammas


def tokens(*lengths, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, HIDDEN, generator=generator, dtype=torch.float64) for n in lengths]


def normed(values, gamma, epsilon):
    mean = sum(v * v for v in values) / len(values)
    return [v / math.sqrt(mean + epsilon) * g for v, g in zip(values, gamma, strict=True)]


def times(matrix, vector):
    return [sum(m * v for m, v in zip(row, vector, strict=True)) for row in matrix]


def rotated(values, position, theta=10000.0):
    out, width = [], len(values)
    for i in range(width // 2):
        angle = position * theta ** (-2 * i / width)
        a, b = values[2 * i], values[2 * i + 1]
        out += [
            a * math.cos(angle) - b * math.sin(angle),
            b * math.cos(angle) + a * math.sin(angle),
        ]
    return out


def by_hand(shape, weights, gammas, sequence, position):
    """One output row, written with lists of floats and nothing of torch."""
    w = {name: t.tolist() for name, t in weights.items()}
    g = {name: t.tolist() for name, t in gammas.items()}

    def kv(token):
        if shape.q_lora is None:
            return times(w["kv_a_proj_with_mqa"], token)
        return times(w["fused_qkv_a_proj"], token)[shape.q_lora :]

    x = sequence.tolist()
    if shape.q_lora is None:
        q = times(w["q_proj"], x[position])
    else:
        low = times(w["fused_qkv_a_proj"], x[position])[: shape.q_lora]
        q = times(w["q_b_proj"], normed(low, g["q_a_layernorm"], shape.epsilon))
    out = []
    for head in range(shape.heads):
        start = head * (shape.nope + shape.rope)
        mine = q[start : start + shape.nope + shape.rope]
        q_nope, q_rope = mine[: shape.nope], mine[shape.nope :]
        if shape.rotates:
            q_rope = rotated(q_rope, position)
        scores, values = [], []
        for at in range(position + 1):
            down = kv(x[at])
            latent = normed(down[: shape.latent], g["kv_a_layernorm"], shape.epsilon)
            key = down[shape.latent :]
            if shape.rotates:
                key = rotated(key, at)
            up = times(w["kv_b_proj"], latent)
            first = head * (shape.nope + shape.v)
            k_nope = up[first : first + shape.nope]
            values.append(up[first + shape.nope : first + shape.nope + shape.v])
            score = sum(a * b for a, b in zip(q_nope, k_nope, strict=True))
            score += sum(a * b for a, b in zip(q_rope, key, strict=True))
            scores.append(score / math.sqrt(shape.nope + shape.rope))
        total = sum(math.exp(s) for s in scores)
        shares = [math.exp(s) / total for s in scores]
        out.append(
            [sum(p * v[i] for p, v in zip(shares, values, strict=True)) for i in range(shape.v)]
        )
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        MlaShape(heads=3, nope=4, rope=2, v=5, latent=6, q_lora=None),
        MlaShape(heads=2, nope=4, rope=4, v=4, latent=6, q_lora=3, rotates=False),
    ],
    ids=["q_lora", "q_proj", "no-rope"],
)
def test_every_row_is_that_of_the_loops(shape):
    weights, gammas = weights_of(shape)
    sequences = tokens(4, 2)
    found = mla_reference(shape, weights, gammas, sequences, [1, 0], dtype=torch.float64)
    for index, (sequence, first) in enumerate(zip(sequences, [1, 0], strict=True)):
        for row, position in enumerate(range(first, len(sequence))):
            expected = by_hand(shape, weights, gammas, sequence, position)
            torch.testing.assert_close(found.outputs[index][row], expected, rtol=1e-10, atol=1e-12)


def test_a_later_token_does_not_change_an_earlier_output():
    weights, gammas = weights_of(SHAPE)
    (long,) = tokens(5)
    changed = long.clone()
    changed[4] += 1
    a = mla_reference(SHAPE, weights, gammas, [long], [0], dtype=torch.float64).outputs[0]
    b = mla_reference(SHAPE, weights, gammas, [changed], [0], dtype=torch.float64).outputs[0]
    assert torch.equal(a[:4], b[:4])
    assert not torch.allclose(a[4], b[4])


def test_quantized_weights_are_their_values_times_their_scales():
    weights, gammas = weights_of(SHAPE)
    sequences = tokens(3)
    quantized, scales = dict(weights), {}
    for name in ("fused_qkv_a_proj", "kv_b_proj"):
        scales[name] = weights[name].abs().amax(-1) / 127
        quantized[name] = (weights[name] / scales[name][:, None]).round().to(torch.int8)
    dense = dict(weights)
    for name, scale in scales.items():
        dense[name] = dequantized(quantized[name], scale, torch.float64)
    a = mla_reference(SHAPE, dense, gammas, sequences, [0], dtype=torch.float64)
    b = mla_reference(SHAPE, quantized, gammas, sequences, [0], scales=scales, dtype=torch.float64)
    torch.testing.assert_close(a.outputs[0], b.outputs[0])


def absorbed(shape, weights, gammas, sequences, first, *, order=None, blocks=None, nz=False):
    """The same layer by absorption, over a paged cache; returns one output a sequence."""
    ref = mla_reference(shape, weights, gammas, sequences, first, dtype=torch.float64)
    size, width = 16, 16
    halves = weights["kv_b_proj"].view(shape.heads, shape.nope + shape.v, shape.latent)
    w_kc, w_vc = halves[:, : shape.nope], halves[:, shape.nope :].transpose(1, 2)
    out = []
    for index, sequence in enumerate(sequences):
        table = torch.tensor(blocks or [2, 0])
        k_nope = torch.zeros(4, size, 1, shape.latent, dtype=torch.float64)
        k_rope = torch.zeros(4, size, 1, shape.rope, dtype=torch.float64)
        for at in range(len(sequence)):
            block, offset = table[at // size], at % size
            latent, key = ref.latents[index][at], ref.keys[index][at]
            key = key if order is None else key[order]
            if nz:
                for cache, row in ((k_nope, latent), (k_rope, key)):
                    flat = cache[block].view(-1)
                    for c in range(len(row)):
                        flat[(c // width) * size * width + offset * width + c % width] = row[c]
            else:
                k_nope[block, offset, 0], k_rope[block, offset, 0] = latent, key
        low = ref.q_loras[index]
        q = (low @ weights["q_b_proj"].t()).view(len(low), shape.heads, -1)
        q_nope = torch.einsum("thn,hnl->thl", q[..., : shape.nope], w_kc)
        q_pe = torch.stack(
            [
                torch.tensor(
                    [rotated(h, first[index] + t) for h in heads[:, shape.nope :].tolist()]
                )
                for t, heads in enumerate(q)
            ]
        ).double()
        q_pe = q_pe if order is None else q_pe[..., order]
        attended = latent_attention(
            q_nope,
            q_pe,
            k_nope,
            k_rope,
            table[None],
            [len(sequence)],
            [len(low)],
            scale=shape.scale,
            nz=nz,
        )
        out.append(torch.einsum("thl,hlv->thv", attended, w_vc))
    return ref, out


def test_absorption_over_a_paged_cache_is_the_same_layer():
    weights, gammas = weights_of(SHAPE)
    ref, out = absorbed(SHAPE, weights, gammas, tokens(19), [15])
    torch.testing.assert_close(out[0], ref.outputs[0], rtol=1e-5, atol=1e-6)


def test_any_rope_layout_gives_the_same_scores_while_queries_and_keys_agree():
    weights, gammas = weights_of(SHAPE)
    half = [0, 2, 4, 1, 3, 5]
    ref, out = absorbed(SHAPE, weights, gammas, tokens(5), [2], order=half)
    torch.testing.assert_close(out[0], ref.outputs[0], rtol=1e-5, atol=1e-6)


def test_an_nz_cache_is_read_in_its_own_order():
    shape = MlaShape(heads=2, nope=4, rope=16, v=3, latent=32, q_lora=5)
    weights, gammas = weights_of(shape)
    ref, out = absorbed(shape, weights, gammas, tokens(18), [14], nz=True)
    torch.testing.assert_close(out[0], ref.outputs[0], rtol=1e-5, atol=1e-6)


def test_gather_reads_blocks_in_the_order_of_the_table():
    cache = torch.arange(3 * 2).float().view(3, 2, 1, 1)
    assert gather_rows(cache, torch.tensor([2, 0]), 3).flatten().tolist() == [4, 5, 0]


def test_attention_serves_several_sequences_of_one_step():
    generator = torch.Generator().manual_seed(1)
    q_nope, q_pe = (
        torch.randn(3, 2, 8, generator=generator),
        torch.randn(3, 2, 4, generator=generator),
    )
    k_nope = torch.randn(4, 4, 1, 8, generator=generator)
    k_rope = torch.randn(4, 4, 1, 4, generator=generator)
    tables = torch.tensor([[1, 3], [2, 0]])
    both = latent_attention(q_nope, q_pe, k_nope, k_rope, tables, [6, 3], [2, 1], scale=0.5)
    first = latent_attention(q_nope[:2], q_pe[:2], k_nope, k_rope, tables[:1], [6], [2], scale=0.5)
    second = latent_attention(q_nope[2:], q_pe[2:], k_nope, k_rope, tables[1:], [3], [1], scale=0.5)
    torch.testing.assert_close(both, torch.cat([first, second]))


def test_what_lies_behind_a_sequence_is_not_read():
    q = torch.ones(1, 1, 4)
    cache = torch.full((1, 4, 1, 4), torch.nan)
    cache[0, :2] = 1.0
    out = latent_attention(q, q, cache, cache, torch.tensor([[0]]), [2], [1], scale=1.0)
    assert torch.equal(out, torch.ones(1, 1, 4))
