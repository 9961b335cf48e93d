"""Measured orders: from times to a file, from the file to later plans, the same every time."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import npu_backend
from npu_backend import CatalogError, Deployment, Offer
from npu_backend.api import Backend
from npu_backend.catalog import load_catalog
from npu_backend.planner import matmul
from npu_backend.runtime.measure import fastest_first, measure, overall_order, tuned_ranges

T102 = "npu_transpose_batchmatmul[1,0,2]"
T012 = "npu_transpose_batchmatmul[0,1,2]"
BMT = "batch_matmul_transpose"
BMM = "torch.bmm"

ROW = {
    "soc": "A3",
    "cann": "9.0.0",
    "site": "v_up",
    "B": 64,
    "K": 512,
    "N": 128,
    "dtype": "bfloat16",
    "order": [BMM, T102],
    "rows": [
        {"tokens": [1, 64], "order": [BMT, T012]},
        {"tokens": [65, 2000], "order": [T012, BMT]},
        {"tokens": [2001, None], "order": [BMM]},
    ],
    "source": "our lab",
    "measured": {"rows": {"1": {BMM: 3.0}}},
}


@pytest.fixture
def file(tmp_path):
    """``file(row, ...) -> path`` of an override with these rows."""

    def write(*rows, name="tuned.json", **sections):
        path = tmp_path / name
        path.write_text(json.dumps({"tuning": {"bmm": list(rows)}, **sections}))
        return path

    return write


def _backend(path):
    loaded = npu_backend.load(third_party=False, catalog=path)
    return Backend(loaded.registry, loaded.catalog)


def _table(backend, *, spec=None, **said):
    deployment = {"soc": "A3", "cann": "9.0.0", **said}
    plan = backend.plan_bmm(
        spec or matmul("v_up", 64, 512, 128), Deployment(catalog=backend.catalog, **deployment)
    )
    return [(e.strategy, e.tokens) for e in sorted(plan.table, key=lambda e: e.tokens[0])]


# --- from times to orders ------------------------------------------------------------------------


def test_kernels_within_a_twentieth_of_the_fastest_are_equals():
    assert fastest_first({"a": 100.0, "b": 96.0, "c": 94.0}) == ("b", "c", "a")
    assert fastest_first({"a": 100.0, "b": 95.0}) == ("a", "b")
    assert fastest_first({"a": 100.0, "b": 94.9}) == ("b", "a")


@given(st.permutations(range(6)), st.data())
def test_clear_differences_give_the_order_of_times_whatever_the_call_order(order, data):
    times = {f"k{i}": 2.0**i * data.draw(st.floats(1.0, 1.8)) for i in order}
    found = fastest_first(times)
    assert sorted(found) == sorted(times)
    assert all(times[a] < times[b] for a, b in pairwise(found))


@given(st.lists(st.floats(1.0, 1.049), min_size=1, max_size=6))
def test_equals_keep_the_call_order(taken):
    times = {f"k{i}": t for i, t in enumerate(taken)}
    assert fastest_first(times) == tuple(times)


def test_an_order_holds_from_the_row_count_before_it_and_the_last_one_beyond():
    times = {
        1: {"a": 1.0, "b": 2.0},
        16: {"a": 1.0, "b": 2.0},
        1024: {"a": 2.0, "b": 1.0},
        2048: {"b": 1.0},
    }
    assert tuned_ranges(times) == (((1, 16), ("a", "b")), ((17, None), ("b", "a")))
    assert tuned_ranges({64: {"a": 1.0}}) == (((1, None), ("a",)),)
    # a takes no 2048 rows: where the choice may not move with the rows it comes last.
    assert overall_order(times) == ("b", "a")


@given(
    st.dictionaries(
        st.integers(1, 4096),
        st.dictionaries(st.sampled_from("abc"), st.sampled_from([1.0, 2.0, 4.0]), min_size=1),
        min_size=1,
        max_size=5,
    )
)
def test_ranges_cover_every_row_once_and_give_each_measured_row_its_fastest(by_rows):
    ranges = tuned_ranges(by_rows)
    assert ranges[0][0][0] == 1
    assert ranges[-1][0][1] is None
    assert all(a[0][1] + 1 == b[0][0] for a, b in pairwise(ranges))
    for rows, times in by_rows.items():
        (order,) = [o for (low, high), o in ranges if low <= rows <= (high or rows)]
        first = next(name for name in order if name in times)
        assert times[first] == min(times.values())


# --- from the file to plans ----------------------------------------------------------------------


def test_later_plans_use_the_order_of_each_row_range(file):
    assert _table(_backend(file(ROW))) == [
        (BMT, (1, 64)),
        (T012, (65, 2000)),
        (BMM, (2001, None)),
    ]
    assert _table(_backend(None)) == [(T102, (1, None))]


def test_a_plan_of_a_model_uses_it_too_and_says_whose_order_it_is(file):
    path = file({**ROW, "B": 16})
    backend = _backend(path)
    layers = npu_backend.read_model("deepseek-v3", layers="5", catalog=backend.catalog)
    said = Deployment(
        role="decode", cann="9.0.0", attn_tp_size=8, catalog=backend.catalog, max_tokens=2000
    )
    plan = backend.plan(layers, said)
    assert [(e.strategy, e.tokens) for e in plan.layers[0].v_up] == [
        (BMT, (1, 64)),
        (T012, (65, 2000)),
    ]
    assert {e["order"] for e in plan.layers[0].to_dict()["v_up"]} == {"our lab"}
    assert "order: our lab" in plan.explain()
    assert "order" not in plan.layers[0].to_dict()["path"][0]


@pytest.mark.parametrize(
    "said",
    [
        {"soc": "A2"},
        {"cann": "9.1.0"},
        {"spec": matmul("v_up", 32, 512, 128)},
        {"spec": matmul("v_up", 64, 512, 256)},
        {"spec": matmul("v_up", 64, 512, 128, dtype="float16")},
        {"spec": matmul("q_absorb", 64, 512, 128)},
    ],
)
def test_an_order_holds_only_for_what_it_was_measured_with(file, said):
    assert _table(_backend(file(ROW)), **said) == [(T102, (1, None))]


def test_batch_invariance_takes_the_one_order_over_all_rows(file):
    assert _table(_backend(file(ROW)), batch_invariant=True) == [(BMM, (1, None))]
    only = {**ROW, "order": [BMT, T012], "rows": []}
    assert _table(_backend(file(only)), batch_invariant=True) == [(T012, (1, None))]
    assert _table(_backend(file(only))) == [(BMT, (1, 1024)), (T012, (1025, None))]


def test_an_order_never_makes_an_illegal_kernel_serve(file):
    row = {**ROW, "B": 128, "rows": [], "order": [T102, BMM, T012]}
    assert _table(_backend(file(row)), spec=matmul("v_up", 128, 512, 128)) == [(BMM, (1, None))]


def test_a_request_comes_before_a_measured_order(file):
    backend = _backend(file({**ROW, "B": 16}))
    layers = npu_backend.read_model("deepseek-v3", layers="5", catalog=backend.catalog)
    said = {"role": "decode", "cann": "9.0.0", "attn_tp_size": 8, "catalog": backend.catalog}
    plan = backend.plan(layers, Deployment(**said, requests=f"v_up={T102}"))
    assert [(e.strategy, e.tokens) for e in plan.layers[0].v_up] == [(T102, (1, None))]


def test_a_plugin_installed_after_the_measurement_keeps_its_place_before_the_built_ins(file):
    backend = _backend(file(ROW))

    @npu_backend.hookimpl
    def select_bmm_kernel(bmm):
        return Offer(strategy="acme", impl="acme:kernel", reads=[bmm.weight])

    plugin = type("Acme", (), {"select_bmm_kernel": staticmethod(select_bmm_kernel)})()
    backend.registry.register(plugin, name="acme", dist="acme-npu", version="1.0")
    assert _table(backend) == [("acme", (1, None))]
    named = {**ROW, "rows": [], "order": [BMM, "acme-npu/acme"]}
    mine = Backend(backend.registry, load_catalog(file(named, name="named.json")))
    assert _table(mine) == [(BMM, (1, None))]
    other = {**ROW, "rows": [], "order": [BMM, "other/acme"]}
    mine = Backend(backend.registry, load_catalog(file(other, name="other.json")))
    assert _table(mine) == [("acme", (1, None))]


@given(
    st.lists(st.sampled_from([T102, T012, BMT, BMM]), unique=True, min_size=1),
    st.lists(st.sampled_from([1, 1023, 1024, 1025]), unique=True, max_size=3).map(sorted),
    st.permutations([T102, T012, BMT, BMM]),
)
def test_whatever_is_measured_every_row_count_has_exactly_one_entry(order, bounds, inner):
    from attrs import evolve

    from npu_backend.catalog.tuning import KernelOrder, order_key

    loaded = npu_backend.load(third_party=False)
    ranges, low = [], 1
    for bound in bounds:
        ranges.append(((low, bound), tuple(inner)))
        inner = [*inner[1:], inner[0]]
        low = bound + 1
    key = order_key("A3", "9.0.0", "v_up", (64, 512, 128), "bfloat16")
    catalog = evolve(
        loaded.catalog, orders={key: KernelOrder(tuple(order), tuple(ranges), "drawn")}
    )
    table = _table(Backend(loaded.registry, catalog))
    assert table[0][1][0] == 1
    assert table[-1][1][1] is None
    assert all(a[1][1] + 1 == b[1][0] for a, b in pairwise(table))
    assert all(a[0] != b[0] for a, b in pairwise(table))
    for strategy, (_, high) in table:
        assert strategy != BMT or high <= 1024
    for row in (1, 1023, 1024, 1025, 5000):
        (served,) = [s for s, (a, b) in table if a <= row <= (b or row)]
        found = [o for (a, b), o in ranges if a <= row <= b]
        # What the order does not name comes after it, in call order.
        wanted = [*(found[0] if found else order), T102, T012, BMT, BMM]
        assert served == next(n for n in wanted if n != BMT or row <= 1024)


# --- reproducibly --------------------------------------------------------------------------------


def test_equal_files_give_equal_bytes_and_times_play_no_part(file):
    layers = npu_backend.read_model("kimi-k2", layers="0")

    def planned(path):
        backend = _backend(path)
        said = Deployment(role="decode", cann="9.0.0", catalog=backend.catalog)
        return backend.plan(layers, said)

    one = planned(file(ROW))
    assert planned(file(ROW, name="again.json")).to_json() == one.to_json()
    slower = {**ROW, "measured": {"rows": {"1": {BMM: 4.0}}}}
    assert planned(file(slower, name="slower.json")).fingerprint == one.fingerprint
    turned = {**ROW, "rows": [], "order": [T102, BMM]}
    assert planned(file(turned, name="turned.json")).fingerprint != one.fingerprint
    assert planned(None).fingerprint != one.fingerprint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"soc": "A9"}, "'A9' is no chip family"),
        ({"site": "o_proj"}, "its site is not q_absorb or v_up"),
        ({"B": 0}, "B is not a size"),
        ({"K": True}, "K is not a size"),
        ({"cann": "nine"}, "'nine' is not a CANN version"),
        ({"cann": None}, "is not a CANN version"),
        ({"source": ""}, "names no source"),
        ({"order": []}, "order is not a list of strategies"),
        ({"order": [BMM, BMM]}, "names a strategy twice"),
        ({"extra": 1}, "unknown part 'extra'"),
        ({"rows": {}}, "rows is not a list of objects"),
        ({"rows": [{"tokens": [0, 4], "order": [BMM]}]}, "is not a row range"),
        ({"rows": [{"tokens": [5, 4], "order": [BMM]}]}, "is not a row range"),
        ({"rows": [{"tokens": [1, 4]}]}, "order is not a list of strategies"),
        (
            {"rows": [{"tokens": [1, 4], "order": [BMM]}, {"tokens": [4, 9], "order": [BMM]}]},
            "does not follow",
        ),
        (
            {"rows": [{"tokens": [1, None], "order": [BMM]}, {"tokens": [4, 9], "order": [BMM]}]},
            "does not follow",
        ),
    ],
)
def test_a_bad_order_is_an_error_that_names_the_file(file, change, words):
    with pytest.raises(CatalogError) as caught:
        load_catalog(file({**ROW, **change}))
    assert words in str(caught.value)
    assert "tuned.json" in str(caught.value)


def test_two_orders_for_one_matmul_or_another_form_are_errors(file, tmp_path):
    with pytest.raises(CatalogError, match="a second time"):
        load_catalog(file(ROW, {**ROW, "cann": "9.0"}))
    for section in ([], {"bmm": {}}, {"bmm": [3]}, {"gemm": []}):
        path = tmp_path / "other.json"
        path.write_text(json.dumps({"tuning": section}))
        with pytest.raises(CatalogError, match="tuning"):
            load_catalog(path)


# --- measuring -----------------------------------------------------------------------------------


def test_every_legal_kernel_is_measured_in_call_order_with_its_error(plan_bmm):
    plan = plan_bmm("q_absorb", 2, 128, 256)
    found = measure(plan, 1024, device="cpu", blocks=3, seconds=0)
    assert [t.strategy for t in found] == [T102, T012, BMT, BMM]
    beyond = measure(plan, 1025, device="cpu", blocks=3, seconds=0)
    assert [t.strategy for t in beyond] == [T102, T012, BMM]
    for timing in (*found, *beyond):
        assert timing.seconds > 0
        assert timing.blocks == 3
        # bf16 keeps eight bits: half a unit in the last place of the largest value.
        assert 0 < timing.error <= 2**-8


def test_a_wrong_kernel_shows_in_its_error(backend, monkeypatch):
    import sys
    import types

    class Wrong:
        def prepare(self, weights):
            return None

        def bind(self, prepared, cache):
            weight = prepared.weights["w_vc"]
            return lambda x: (x.transpose(0, 1) @ weight).transpose(0, 1) * 1.5

    module = types.ModuleType("acme_wrong")
    module.Wrong = Wrong
    monkeypatch.setitem(sys.modules, "acme_wrong", module)

    @npu_backend.hookimpl
    def select_bmm_kernel(bmm):
        return Offer(strategy=BMM, impl="acme_wrong:Wrong", reads=[bmm.weight])

    plugin = type("Acme", (), {"select_bmm_kernel": staticmethod(select_bmm_kernel)})()
    backend.registry.register(plugin, name="acme", dist="acme-npu", version="1.0")
    plan = backend.plan_bmm(matmul("v_up", 2, 128, 128), Deployment(cann="9.0.0"))
    found = {t.strategy: t for t in measure(plan, 4, device="cpu", blocks=3, seconds=0)}
    # Two distributions use one name: each is called by both.
    assert found[f"acme-npu/{BMM}"].error == pytest.approx(0.5, abs=0.01)
    assert found[f"npu-backend/{BMM}"].error < 0.01
