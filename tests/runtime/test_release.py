"""``release()``: exactly what the plan says, validated first, destroyed last, and accounted."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from npu_backend import Phase, PrepareError, WeightReleasedError
from npu_backend.model.records import Indexer
from npu_backend.runtime import LayerCache, bind, is_tombstone
from npu_backend.runtime.storages import StorageWatch


class _Host(torch.nn.Module):
    """Parameters in modules, as a host has them."""

    def __init__(self, weights):
        super().__init__()
        for name, tensor in weights.items():
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            parameter.weight_loader = f"loader of {name}"
            self.register_parameter(name.replace(".", "_"), parameter)


def _released(h, layer=None, **deployment):
    plan = h.plan(layer or h.fused_layer(), **deployment)
    weights = h.weights(plan.layer, parameters=True)
    bound = h.bind(plan, weights)
    bound.prepare()
    return bound, weights


def test_what_goes_is_what_the_plan_says_and_outputs_stay_equal(h):
    layer, weights = _released(h)
    before = h.step(layer)
    planned = {r.name: r.bytes for r in layer.plan.released()}
    assert set(planned) == {"fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "w_kc"}
    ledger = layer.release()
    assert {r.name: r.freed for r in ledger.rows} == planned
    assert {r.name: r.planned for r in ledger.rows} == planned
    assert ledger.agrees
    assert ledger.freed == layer.plan.totals.release
    assert all(r.how == "swapped" and r.held_by is None for r in ledger.rows)
    assert [n for n, t in weights.items() if is_tombstone(t)] == list(planned)
    assert all(torch.equal(a, b) for a, b in zip(before, h.step(layer), strict=True))


def test_the_ledger_is_plain_data(h):
    layer, _ = _released(h)
    data = layer.release().to_dict()
    assert data["layer_id"] == 7
    assert data["planned"] == data["freed"] == layer.plan.totals.release
    assert data["agrees"] is True
    assert data["allocator"] is None
    assert data["weights"][0] == {
        "name": "fused_qkv_a_proj",
        "action": "release",
        "planned": 2112 * 1024 * 2,
        "freed": 2112 * 1024 * 2,
        "how": "swapped",
        "held_by": None,
    }


def test_a_second_release_returns_the_same_ledger(h):
    layer, _ = _released(h)
    assert layer.release() is layer.release()
    assert "released" in repr(layer)


def test_nothing_is_released_before_prepare(h):
    layer = h.bind(h.plan(h.fused_layer()))
    with pytest.raises(PrepareError, match="nothing was freed"):
        layer.release()
    assert not any(is_tombstone(t) for t in layer.weights.values())


@pytest.mark.parametrize("said", ["at bind", "later"])
def test_nothing_is_released_after_a_graph_capture(h, said):
    layer = h.bind(h.plan(h.fused_layer()), captured=said == "at bind")
    layer.prepare()
    layer.captured = True
    with pytest.raises(PrepareError, match="nothing is released after a graph capture"):
        layer.release()
    assert layer.released == ()
    h.step(layer)


def test_every_python_reference_sees_the_tombstone(h):
    plan = h.plan(h.fused_layer())
    host = _Host(h.weights(plan.layer))
    weights = {n.replace("_scale", ".scale"): p for n, p in host.named_parameters()}
    names = [n for n, _ in host.named_parameters()]
    elsewhere = [host.kv_b_proj]
    layer = bind(plan, weights, LayerCache.allocate(plan.layer, 4))
    layer.prepare()
    layer.release()
    assert [n for n, _ in host.named_parameters()] == names
    assert elsewhere[0] is host.kv_b_proj
    assert isinstance(host.kv_b_proj, torch.nn.Parameter)
    assert host.kv_b_proj.weight_loader == "loader of kv_b_proj"
    with pytest.raises(WeightReleasedError) as caught:
        elsewhere[0].sum()
    assert (caught.value.layer, caught.value.weight) == (7, "kv_b_proj")
    assert "nothing reachable reads it" in str(caught.value)
    assert caught.value.remedy
    with pytest.raises(WeightReleasedError):
        host.state_dict()


def test_where_the_host_keeps_storages_they_are_resized(h):
    plan = h.plan(h.fused_layer())
    weights = h.weights(plan.layer, parameters=True)
    kept_by_the_host = {n: t.untyped_storage() for n, t in weights.items()}
    layer = h.bind(plan, weights, host_keeps_storage=True)
    layer.prepare()
    before = h.step(layer)
    ledger = layer.release()
    assert ledger.agrees
    assert {r.how for r in ledger.rows} == {"resized"}
    for row in ledger.rows:
        assert kept_by_the_host[row.name].nbytes() == 0
        assert weights[row.name].shape
        with pytest.raises(WeightReleasedError):
            weights[row.name] + 1
    assert all(torch.equal(a, b) for a, b in zip(before, h.step(layer), strict=True))


@pytest.mark.parametrize("host_keeps_storage", [False, True])
def test_an_object_that_cpp_holds_is_kept(h, host_keeps_storage):
    """An autograd edge reads past every Python class: freed bytes would end the process."""
    plan = h.plan(h.fused_layer())
    weights = h.weights(plan.layer, parameters=True)
    layer = h.bind(plan, weights, host_keeps_storage=host_keeps_storage)
    layer.prepare()
    parameter = weights["kv_b_proj"]
    before = parameter.detach().clone()
    parameter.requires_grad_(True)
    with torch.enable_grad():
        edge = (parameter.float() * 1).grad_fn
    parameter.requires_grad_(False)
    ledger = layer.release()
    assert "kv_b_proj" not in {r.name for r in ledger.rows}
    assert ledger.agrees
    assert "torch's C++" in layer.plan.weight("kv_b_proj").reasons[0]
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(torch.tensor(parameter.tolist()), before.float())
    del edge


class _HostParameter(torch.nn.Parameter):
    """As engines have them, with methods of their loaders."""

    def load(self):
        return "the host's"


def test_a_restored_weight_is_of_the_hosts_own_class_again(h):
    plan = h.plan(h.fused_layer(), promises="weight_update", restore=True)
    weights = {n: _HostParameter(t, requires_grad=False) for n, t in h.weights(plan.layer).items()}
    layer = h.bind(plan, weights)
    layer.prepare()
    layer.release()
    gone = layer.released
    assert gone
    assert not any(isinstance(weights[n], _HostParameter) for n in gone)
    layer.restore()
    for name in gone:
        assert type(weights[name]) is _HostParameter
        assert weights[name].load() == "the host's"


def test_a_failing_host_copy_frees_nothing(h, monkeypatch):
    layer, weights = _released(h, promises="weight_update", restore=True)
    assert {r.action for r in layer.plan.released()} == {"restore"}
    from npu_backend.runtime import release

    def no_room(tensor):
        raise MemoryError

    monkeypatch.setattr(release.HostCopy, "of", no_room)
    with pytest.raises(MemoryError):
        layer.release()
    assert not any(is_tombstone(t) for t in weights.values())
    assert layer.ledger is None


@pytest.mark.parametrize("parameters", [True, False])
def test_what_goes_restorably_comes_back_into_the_same_objects(h, parameters):
    plan = h.plan(h.fused_layer(), promises="weight_update", restore=True)
    weights = h.weights(plan.layer, parameters)
    values = {n: t.clone() for n, t in weights.items()}
    strides = {n: t.stride() for n, t in weights.items()}
    for name, tensor in weights.items():
        tensor.weight_loader = name
    objects = dict(weights)
    layer = h.bind(plan, weights)
    layer.prepare()
    ledger = layer.release()
    names = {"fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "w_kc"}
    assert {r.name for r in ledger.rows} == names == set(layer.released)
    assert ledger.agrees
    with pytest.raises(WeightReleasedError, match=r"call layer\.restore\(\) first"):
        weights["q_b_proj"].copy_(values["q_b_proj"])
    assert set(layer.restore()) == names
    assert layer.released == ()
    for name, tensor in weights.items():
        assert tensor is objects[name]
        assert tensor.stride() == strides[name]
        assert torch.equal(tensor, values[name])
        assert isinstance(tensor, torch.nn.Parameter) == parameters
        assert tensor.weight_loader == name
    again = layer.release()
    assert again.agrees
    assert {r.name for r in again.rows} == names
    h.step(layer)


def test_restoring_without_memory_leaves_the_layer_as_it_was(h, monkeypatch):
    layer, weights = _released(h, promises="export", restore=True)
    layer.release()
    from npu_backend.runtime import release

    def no_room(self, device):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(release.HostCopy, "on", no_room)
        with pytest.raises(PrepareError, match="cannot be brought back"):
            layer.restore()
    assert is_tombstone(weights["q_b_proj"])
    assert layer.released
    layer.restore()
    assert not is_tombstone(weights["q_b_proj"])


def test_a_layer_that_released_nothing_has_an_empty_ledger(h):
    layer = h.bind(h.plan(promises=["export", "weight_update"]))
    layer.prepare()
    ledger = layer.release()
    assert (ledger.rows, ledger.freed, ledger.agrees) == ((), 0, True)
    assert layer.restore() == ()


def test_a_bound_layer_dies_with_its_last_reference(h):
    """Layers are taken one at a time; a cycle would keep two in memory."""
    layer, _ = _released(h)
    layer.release()
    h.step(layer)
    watch = weakref.ref(layer)
    storage = weakref.ref(layer.cache)
    gc.disable()
    try:
        del layer
        assert watch() is None
        assert storage() is None
    finally:
        gc.enable()


class _Peak(TorchDispatchMode):
    """Follows the bytes of storages made inside, op by op."""

    def __init__(self):
        super().__init__()
        self.watches, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                watch = StorageWatch(tensor)
                if watch.identity not in given:
                    self.watches[watch.identity] = watch
        self.watches = {i: w for i, w in self.watches.items() if not w.dead}
        self.peak = max(self.peak, self.live)
        return result

    @property
    def live(self):
        return sum(w.nbytes for w in self.watches.values() if not w.dead)


def test_peak_memory_while_preparing_is_resident_plus_the_copies(h):
    """After prepare() there is what the plan counts. On the way one weight is there twice more: as
    rows turned round, which the cast then lays out anew."""
    plan = h.plan(h.fused_layer())
    layer = h.bind(plan)
    with _Peak() as memory:
        layer.prepare()
    assert memory.live == plan.totals.prepared
    largest = max(t.numel() * t.element_size() for t in layer.weights.values())
    assert memory.peak <= plan.totals.prepared + largest


def test_decode_and_target_verify_agree_before_and_after(h):
    layer, _ = _released(h)
    twice = []
    for _ in range(2):
        twice.append([h.step(layer, phase=p) for p in (Phase.DECODE, Phase.TARGET_VERIFY)])
        layer.release()
    for before, after in zip(*twice, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_came_back_goes_again_beside_what_was_released_for_good(h):
    """A role that may flip: kv_b_proj of a DSA layer is read by nobody, w_kc by the other role."""
    dsa = h.fused_layer(indexer=Indexer("own"))
    layer, weights = _released(h, dsa, promises="role_switch", restore=True)
    layer.release()
    actions = {r.name: r.action for r in layer.plan.released()}
    assert set(actions.values()) == {"release", "restore"}
    freed = layer.ledger.freed
    back = set(layer.restore())
    assert back == {name for name, action in actions.items() if action == "restore"}
    assert not any(is_tombstone(weights[name]) for name in back)

    ledger = layer.release()

    assert all(is_tombstone(weights[name]) for name in actions)
    assert ledger.freed == freed
    assert set(layer.released) == set(actions)
    assert layer.release() is ledger
