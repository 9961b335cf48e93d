"""RoPE rows are gathered once a forward, by whichever layer needs them first."""

from __future__ import annotations

import pytest
import torch

from npu_backend import Phase
from npu_backend.runtime import LayerCache, forward, one_forward, rope_tables


@pytest.fixture
def gathers(monkeypatch):
    """Count the gathers."""
    seen = []
    right = forward._gather
    monkeypatch.setattr(forward, "_gather", lambda *args: seen.append(args) or right(*args))
    return seen


def _layers(h, ids, **changes):
    """Layers of one model share one pair of tables, as a host's do."""
    cos, sin = rope_tables(8, 64)
    made = []
    for layer_id in ids:
        layer = h.layer(layer_id=layer_id, **changes)
        cache = LayerCache.allocate(layer, 4, cos=cos, sin=sin)
        bound = h.bind(h.plan(layer), cache=cache)
        bound.prepare()
        made.append(bound)
    return made


def _step(bound, positions):
    hidden = torch.ones(len(positions), 64, dtype=torch.bfloat16)
    return bound.preprocess(hidden, positions, torch.arange(len(positions)), phase=Phase.DECODE)


@pytest.mark.parametrize("first", [0, 7, 40], ids=lambda n: f"first layer {n}")
def test_the_first_layer_that_rotates_gathers_for_all(h, gathers, first):
    """Also on a pipeline stage that starts late, and where layer 0 has no latent attention."""
    layers = _layers(h, range(first, first + 3))
    positions = torch.tensor([3, 9])
    alone = [_step(layer, positions) for layer in layers]
    assert len(gathers) == 3
    gathers.clear()
    with one_forward():
        together = [_step(layer, positions) for layer in layers]
    assert len(gathers) == 1
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a.q_pe, b.q_pe)


def test_the_next_forward_gathers_again(h, gathers):
    (layer,) = _layers(h, [3])
    for position in (3, 4):
        with one_forward():
            turned = _step(layer, torch.tensor([position])).q_pe
        assert torch.equal(turned, _step(layer, torch.tensor([position])).q_pe)
    assert len(gathers) == 4


def test_other_positions_and_other_tables_are_told_apart(h, gathers):
    (one,), (other,) = _layers(h, [0]), _layers(h, [1])
    with one_forward():
        _step(one, torch.tensor([3]))
        _step(one, torch.tensor([4]))
        _step(other, torch.tensor([3]))
    assert len(gathers) == 3


def test_a_forward_that_fails_leaves_nothing_behind(h, gathers):
    (layer,) = _layers(h, [0])

    def failing():
        with one_forward():
            _step(layer, torch.tensor([3]))
            raise RuntimeError("host")

    with pytest.raises(RuntimeError, match="host"):
        failing()
    positions = torch.tensor([3])
    _step(layer, positions)
    _step(layer, positions)
    assert len(gathers) == 3


def test_layers_without_rope_gather_nothing(h, gathers):
    layer = h.layer(use_rope=False)
    bound = h.bind(h.plan(layer))
    bound.prepare()
    with one_forward():
        _step(bound, torch.tensor([3]))
    assert gathers == []
