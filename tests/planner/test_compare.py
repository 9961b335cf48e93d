"""Comparing plans: equal only where nothing differs, one cache only for one model and one form."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_backend.compare import compare_plans
from npu_backend.errors import NpuBackendError


@pytest.fixture
def plan_dict(plan):
    def make(model: str, *, layers: list[int] | None = None, **more: Any) -> dict[str, Any]:
        read = {} if layers is None else {"layers": layers}
        return json.loads(plan(model, read=read, **more).to_json())

    return make


@pytest.fixture
def pair(plan_dict):
    def make(model: str, other: str | None = None, **layers: Any) -> Any:
        a = plan_dict(model, role="prefill", layers=layers.get("a", [0]))
        b = plan_dict(other or model, role="decode", layers=layers.get("b", [0]))
        return compare_plans(a, b)

    return make


# --- one cache for a prefill and a decode worker -------------------------------------------------


def test_one_model_of_two_roles_shares_a_cache(pair):
    found = pair("deepseek-v3")
    assert found.pair
    assert found.kv_agree
    assert found.ok
    assert found.kv_reasons == found.kv_conflicts == ()


@pytest.mark.parametrize(
    ("a", "b"),
    [("deepseek-v3", "kimi-k2"), ("glm-5.2", "deepseek-v3.2"), ("kimi-k2", "deepseek-v3")],
)
def test_two_models_never_share_a_cache_though_their_sizes_agree(pair, a, b):
    found = pair(a, b)
    assert not found.kv_agree
    assert not found.ok
    assert any(f"name is {a} in a and {b} in b" in why for why in found.kv_reasons)


def test_layers_of_one_side_only_are_a_conflict(pair):
    found = pair("deepseek-v3", a=[0, 1, 2, 3], b=[0, 1, 7])
    assert not found.kv_agree
    assert found.kv_conflicts == (2, 3, 7)
    assert found.kv_reasons == ("only a plans layers 2-3", "only b plans layer 7")


def test_layers_that_never_meet_are_told_as_such(pair):
    found = pair("deepseek-v3", a=[0, 1], b=[2])
    assert not found.kv_agree
    assert "no layer in common" in found.kv_reasons
    assert all(not why.endswith("layers ") for why in found.kv_reasons)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_lora_rank", 256),
        ("qk_rope_head_dim", 32),
        ("block_size", 64),
        ("dtype", "int8"),
        ("cache_mode", "PA_NZ"),
        ("rope", "interleaved"),
    ],
)
def test_each_size_and_each_part_of_the_layout_counts(plan_dict, key, value):
    a = plan_dict("deepseek-v3", role="prefill", layers=[0, 1])
    b = plan_dict("deepseek-v3", role="decode", layers=[0, 1])
    was = b["layers"][1]["kv_layout"][key]
    b["layers"][1]["kv_layout"][key] = value
    found = compare_plans(a, b)
    assert found.kv_conflicts == (1,)
    assert found.kv_reasons == (f"layer 1: {key} is {was} in a and {value} in b",)


def test_the_json_of_a_plan_says_how_wide_the_cache_is(plan_dict):
    # The config of DeepSeek-V3: kv_lora_rank 512 and 64 RoPE dimensions in DeepSeek-V3.
    layout = plan_dict("deepseek-v3", layers=[0])["layers"][0]["kv_layout"]
    assert (layout["kv_lora_rank"], layout["qk_rope_head_dim"]) == (512, 64)


def test_a_folder_may_be_named_as_one_likes(plan_dict):
    a = plan_dict("deepseek-v3", role="prefill", layers=[0])
    b = plan_dict("deepseek-v3", role="decode", layers=[0])
    b["model"] |= {"name": "my-copy", "source": "config.json"}
    assert compare_plans(a, b).kv_agree
    b["model"]["model_type"] = "kimi_linear"
    assert not compare_plans(a, b).kv_agree


# --- equal ---------------------------------------------------------------------------------------


def _leaves(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of everything in a plan's JSON, containers too."""
    found = [at] if at else []
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        found += _leaves(item, (*at, key))
    return found


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 3),
    st.sampled_from(["", "keep", "release", "decode", "encode", "many"]),
    st.sampled_from([[], {}]),
)


@given(data=st.data())
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_an_edited_copy_is_refused_or_differs(plan_dict, data):
    good = plan_dict("deepseek-v3", role="decode", layers=[0, 1])
    bad = copy.deepcopy(good)
    *path, last = data.draw(st.sampled_from(_leaves(good)))
    place = bad
    for key in path:
        place = place[key]
    if data.draw(st.booleans()):
        del place[last]
    else:
        place[last] = data.draw(JUNK)
    same = json.dumps(good, sort_keys=True) == json.dumps(bad, sort_keys=True)
    for a, b in ((good, bad), (bad, good)):
        try:
            found = compare_plans(a, b)
        except NpuBackendError as err:
            assert not same
            assert "Error:" not in str(err), "what Python says is no reason"
        else:
            assert found.equal == same == (not found.differences)


def _edit(path: str, value: Any):
    def edit(plan: dict[str, Any]) -> None:
        *keys, last = [int(k) if k.isdigit() else k for k in path.split(".")]
        place: Any = plan
        for key in keys:
            place = place[key]
        if value is KeyError:
            del place[last]
        else:
            place[last] = value

    return edit


MALFORMED = {
    "role": ("deployment.role", "encode", "deployment.role is 'encode'"),
    "no layers": ("layers", [], "layers is empty"),
    "no layout": ("layers.0.kv_layout", KeyError, "layers[0] lacks kv_layout"),
    "no weights": ("layers.0.weights", None, "layers[0].weights is None, must be a list"),
    "no totals": ("totals", None, "totals is None, must be an object"),
    "bytes": ("layers.0.weights.0.bytes", "many", "layers[0].weights[0].bytes is 'many'"),
    "action": ("layers.0.weights.0.action", "burn", "layers[0].weights[0].action is 'burn'"),
}


@pytest.mark.parametrize(("path", "value", "told"), MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_plan_is_refused_with_the_place(plan_dict, path, value, told):
    good = plan_dict("deepseek-v3", role="decode", layers=[0])
    bad = copy.deepcopy(good)
    _edit(path, value)(bad)
    with pytest.raises(NpuBackendError) as caught:
        compare_plans(good, bad, names=("good.json", "bad.json"))
    assert caught.value.whom == "bad.json"
    assert any(told in why for why in caught.value.why)


def test_a_layer_or_a_weight_that_stands_twice_is_refused(plan_dict):
    good = plan_dict("deepseek-v3", role="decode", layers=[0, 1])
    twice = copy.deepcopy(good)
    twice["layers"].append(twice["layers"][0])
    with pytest.raises(NpuBackendError, match="layer 0 is there more than once"):
        compare_plans(good, twice)
    rows = copy.deepcopy(good)
    rows["layers"][1]["weights"].append(rows["layers"][1]["weights"][0])
    with pytest.raises(NpuBackendError, match=r"layer 1, weight .* more than once"):
        compare_plans(good, rows)


def test_a_changed_fate_differs_under_one_fingerprint(plan_dict):
    good = plan_dict("deepseek-v3", role="decode", layers=[0])
    other = copy.deepcopy(good)
    row = other["layers"][0]["weights"][0]
    row["action"] = "keep" if row["action"] != "keep" else "release"
    found = compare_plans(good, other)
    assert not found.equal
    assert [d.what for d in found.differences] == [f"weight {row['name']}"]
