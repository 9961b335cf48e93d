"""Tiny layers, the built-in plugins asked directly, and implementations to plant faults with."""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import sys
import types

import pytest
import torch

import npu_backend_builtin.absorb
import npu_backend_builtin.mlapo
import npu_backend_builtin.mlaprolog
import npu_backend_builtin.role_release
import npu_backend_builtin.transpose_bmm
from npu_backend import Deployment, Envelope, Indexer, MlaLayer, Offer
from npu_backend.offers import Answer, PluginInfo
from npu_backend.planner import plan_model

PATHS = (
    npu_backend_builtin.mlaprolog,
    npu_backend_builtin.mlapo,
    npu_backend_builtin.absorb,
)


def _answer(module, record):
    name = module.__name__.rpartition(".")[2]
    records = record if isinstance(record, tuple) else (record,)
    return Answer(PluginInfo(name, "npu-backend", "0.1.0"), records)


class BuiltIns:
    """The built-in plugins, and before them whatever offers a test plants."""

    def __init__(self, paths=(), kernels=()):
        self.paths, self.kernels = paths, kernels

    def _planted(self, offers):
        return tuple(Answer(PluginInfo("planted", "tests", "1"), (o,)) for o in offers)

    def ask_paths(self, layer, deployment):
        own = tuple(_answer(m, m.select_preprocess_path(layer, deployment)) for m in PATHS)
        return self._planted(self.paths) + own

    def ask_bmm(self, bmm, deployment):
        module = npu_backend_builtin.transpose_bmm
        offers = [o for o in self.kernels if o.reads == {bmm.weight}]
        return (
            *self._planted(offers),
            _answer(module, module.select_bmm_kernel(bmm, deployment)),
        )

    def ask_release(self, layer, deployment, readers):
        module = npu_backend_builtin.role_release
        return (_answer(module, module.release_weights(layer, deployment, readers)),)


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny matmuls are slower on two threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny():
    """Return ``tiny(**changes)``: a small DSA layer that only absorb serves."""

    def make(**changes):
        dims = {
            "layer_id": 0,
            "hidden_size": 64,
            "num_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "indexer": Indexer("own"),
        }
        return MlaLayer(**(dims | changes))

    return make


@pytest.fixture
def fused(tiny):
    """Return ``fused(**changes)``: dimensions that the fused ops take, two heads."""

    def make(**changes):
        dims = {
            "hidden_size": 1024,
            "num_heads": 2,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        }
        return tiny(**(dims | changes))

    return make


@pytest.fixture
def plan_of():
    """Return ``plan_of(*layers, paths=, kernels=, **deployment)``: a model plan."""

    def make(*layers, paths=(), kernels=(), **deployment):
        given = {"soc": "A3", "cann": "9.1.0"} | deployment
        return plan_model(layers, Deployment(**given), BuiltIns(paths, kernels))

    return make


@pytest.fixture
def plant(monkeypatch):
    """Return ``plant(cls, site=None, tokens=..., **offer)``: an offer of an implementation."""
    module = types.ModuleType("planted_implementations")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def make(cls, *, reads, tokens=(1, None), **offer):
        setattr(module, cls.__name__, cls)
        return Offer(
            strategy=cls.__name__,
            impl=f"{module.__name__}:{cls.__name__}",
            envelope=Envelope(tokens=tokens),
            reads=reads,
            **offer,
        )

    return make
