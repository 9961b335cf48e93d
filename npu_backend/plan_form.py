"""The form of a plan's JSON, schema 1: what must be there, and of which type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from npu_backend.deployment import Phase, Role
from npu_backend.plan import ACTIONS, SCHEMA

__all__ = ["faults_of"]

Faults = Iterator[str]
Form = Callable[[Any, str], Faults]


def _told(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"


def _is(words: str, test: Callable[[Any], bool]) -> Form:
    def form(value: Any, where: str) -> Faults:
        if not test(value):
            yield f"{where} is {_told(value)}, must be {words}"

    return form


def _one_of(words: tuple[str, ...]) -> Form:
    return _is(f"one of {', '.join(words)}", lambda v: isinstance(v, str) and v in words)


def _number(low: int) -> Form:
    return _is(
        f"a whole number of at least {low}",
        lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= low,
    )


def _or_null(form: Form) -> Form:
    return lambda value, where: iter(()) if value is None else form(value, where)


def _list(form: Form, least: int = 0) -> Form:
    def check(value: Any, where: str) -> Faults:
        if not isinstance(value, list):
            yield f"{where} is {_told(value)}, must be a list"
            return
        if len(value) < least:
            yield f"{where} is empty"
        for index, item in enumerate(value):
            yield from form(item, f"{where}[{index}]")

    return check


def _map(**forms: Form) -> Form:
    """Check the keys that must be there; a later release may add others."""

    def check(value: Any, where: str) -> Faults:
        if not isinstance(value, Mapping):
            yield f"{where} is {_told(value)}, must be an object"
            return
        prefix = f"{where}." if where else ""
        for key, form in forms.items():
            if key not in value:
                yield f"{where or 'the plan'} lacks {key}"
            else:
                yield from form(value[key], prefix + key)

    return check


def _tokens(value: Any, where: str) -> Faults:
    if not isinstance(value, list) or len(value) != 2:
        yield f"{where} is {_told(value)}, must be [first, last]"
        return
    yield from _NUMBER_1(value[0], f"{where}[0]")
    yield from _or_null(_NUMBER_1)(value[1], f"{where}[1]")


_NUMBER, _NUMBER_1 = _number(0), _number(1)
_TEXT = _is("a text", lambda v: isinstance(v, str))
_TEXTS = _list(_TEXT)
_BOOL = _is("true or false", lambda v: isinstance(v, bool))
_OBJECT = _is("an object", lambda v: isinstance(v, Mapping))
_ENTRIES = _list(
    _map(
        strategy=_TEXT,
        provider=_TEXT,
        phases=_list(_one_of(tuple(p.value for p in Phase)), least=1),
        tokens=_tokens,
    )
)
_NAMED = {"hook": _TEXT, "site": _or_null(_TEXT), "strategy": _TEXT, "provider": _TEXT}
_LAYER = _map(
    layer_id=_NUMBER,
    is_nextn=_BOOL,
    kv_layout=_map(
        cache_mode=_TEXT,
        dtype=_TEXT,
        block_size=_NUMBER_1,
        rope=_TEXT,
        kv_lora_rank=_NUMBER_1,
        qk_rope_head_dim=_NUMBER,
    ),
    path=_ENTRIES,
    q_absorb=_ENTRIES,
    v_up=_ENTRIES,
    declined=_list(_map(**_NAMED, reasons=_list(_map(code=_TEXT, message=_TEXT)))),
    unused=_list(_map(**_NAMED)),
    weights=_list(
        _map(
            name=_TEXT,
            dtype=_TEXT,
            bytes=_NUMBER,
            action=_one_of(ACTIONS),
            reasons=_TEXTS,
            readers=_TEXTS,
        )
    ),
)
_PLAN = _map(
    model=_map(name=_TEXT, model_type=_TEXT, num_hidden_layers=_or_null(_NUMBER), source=_TEXT),
    deployment=_map(
        role=_one_of(tuple(r.value for r in Role)),
        soc=_map(family=_TEXT),
        catalog=_TEXT,
    ),
    fingerprint=_TEXT,
    plugins=_list(_map(name=_TEXT, dist=_TEXT, version=_TEXT, status=_TEXT)),
    layers=_list(_LAYER, least=1),
    totals=_map(
        bytes=_map(
            **dict.fromkeys(("loaded", "prepared", "release", "restore", "duplicate"), _NUMBER),
            resident_after=_NUMBER,
        )
    ),
)


def faults_of(plan: Any) -> tuple[str, ...]:
    """Return what is not as schema 1 has it; empty for a plan."""
    if not isinstance(plan, Mapping):
        return ("it is not a JSON object",)
    if plan.get("schema") != SCHEMA or isinstance(plan.get("schema"), bool):
        return (f"its schema is {plan.get('schema')!r}, this release reads {SCHEMA}",)
    faults = list(_PLAN(plan, ""))
    if "mlp" in plan:
        faults += _OBJECT(plan["mlp"], "mlp")
    if faults:
        return tuple(faults)
    for what, names in _ids(plan):
        faults += [
            f"{what} {n} is there more than once" for n, c in Counter(names).items() if c > 1
        ]
    return tuple(faults)


def _ids(plan: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    yield "layer", [layer["layer_id"] for layer in plan["layers"]]
    for layer in plan["layers"]:
        yield f"layer {layer['layer_id']}, weight", [row["name"] for row in layer["weights"]]
