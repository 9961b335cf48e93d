"""transpose_bmm: four kernels for the two batched matmuls, each with its limits.

In the order of preference: ``npu_transpose_batchmatmul`` that transposes by itself ([1,0,2]), the
same op behind an explicit transpose ([0,1,2]), ``batch_matmul_transpose`` of a kernel library, and
``torch.bmm``.
"""

from __future__ import annotations

import re
from functools import lru_cache

from npu_backend import BmmSpec, Decline, Deployment, Envelope, Forbid, Offer, Reason, hookimpl
from npu_backend_builtin._limits import Check

TRANSPOSING = "npu_transpose_batchmatmul[1,0,2]"
EXPLICIT = "npu_transpose_batchmatmul[0,1,2]"
CUSTOM = "batch_matmul_transpose"
PLAIN = "torch.bmm"

OP = "npu_transpose_batchmatmul"
CUSTOM_OPS = {
    "sgl-kernel-npu": "npu::batch_matmul_transpose",
    "vllm-ascend": "_C_ascend::batch_matmul_transpose",
}
_IMPL = "npu_backend_builtin.impl.bmm"
_DATE = re.compile(r"v?(20\d\d)\.?(\d{1,2})\.?(\d{1,2})(?!\d)")

Answers = tuple[Offer | Decline | Forbid, ...]


def _mixed(bmm: BmmSpec) -> str | None:
    if bmm.dtype == bmm.weight_dtype:
        return None
    return f"the activation is {bmm.dtype}, {bmm.weight} is {bmm.weight_dtype}"


def _transpose_check(bmm: BmmSpec, deployment: Deployment) -> Check:
    """Check what both permutations of npu_transpose_batchmatmul have in common."""
    check = Check(OP, deployment)
    check.op_present(f"npu::{OP}")
    documented = check.soc()
    if mixed := _mixed(bmm):
        check.add("dtype", f"{OP} takes one dtype; {mixed}", "dtypes")
    check.member("dtype", "dtypes", bmm.dtype, "dtypes")
    nz = bmm.weight_format == "nz"
    if nz and not (check.figure("nz_weight") and check.figure("nz_weight_line")):
        check.add(
            "format.nz",
            f"line {deployment.line} with CANN {deployment.limits_cann} does not take a FRACTAL_NZ "
            "weight",
            "nz_weight_line",
        )
    if not documented or deployment.soc.family in check.figure("soc_unlimited"):
        return check
    for axis, size, key in (("B", bmm.B, "b_below"), ("N", bmm.N, "n_below")):
        limit = check.figure(key)
        if limit is not None and size >= limit:
            check.add("bmm.k_limit", f"{axis} = {size} is not below {limit}", key)
    key = "kn_multiple_nz" if nz else "kn_multiple"
    multiple = check.figure(key) or 1
    for axis, size in (("K", bmm.K), ("N", bmm.N)):
        if size % multiple:
            check.add("bmm.alignment", f"{axis} = {size} is not a multiple of {multiple}", key)
    return check


def _limit_applies(check: Check) -> bool:
    return check.deployment.soc.family not in check.figure("soc_unlimited")


def _answer(strategy: str, check: Check, impl: str, **offer: object) -> Offer | Decline:
    if check.reasons:
        return Decline(strategy=strategy, reasons=check.reasons)
    return Offer(strategy=strategy, impl=f"{_IMPL}:{impl}", **offer)  # type: ignore[arg-type]


def _transposing(bmm: BmmSpec, deployment: Deployment) -> Offer | Decline:
    check = _transpose_check(bmm, deployment)
    key = "bk_below_nz" if bmm.weight_format == "nz" else "bk_below"
    limit = check.figure(key)
    if limit is not None and _limit_applies(check) and limit <= bmm.B * bmm.K:
        check.add(
            "bmm.bk_limit",
            f"B x K = {bmm.B} x {bmm.K} = {bmm.B * bmm.K} is not below {limit}; the number of rows "
            "plays no part",
            key,
        )
    return _answer(TRANSPOSING, check, "Transposing", reads=(bmm.weight,))


def _explicit(bmm: BmmSpec, deployment: Deployment) -> Offer | Decline:
    check = _transpose_check(bmm, deployment)
    limit = check.figure("k_below")
    if limit is not None and _limit_applies(check) and limit <= bmm.K:
        check.add("bmm.k_limit", f"K = {bmm.K} is not below {limit}", "k_below")
    return _answer(EXPLICIT, check, "Explicit", reads=(bmm.weight,), copies_input=True)


def _library_version(check: Check) -> None:
    """Refuse a kernel library that is known to be older than its fix."""
    kernels = check.deployment.kernels
    fixed = check.figure("fixed_release")
    if kernels.name != "sgl-kernel-npu" or kernels.version is None or fixed is None:
        return
    # Its versions are dates. One that is no whole date says nothing of its age: then it is offered.
    date = _DATE.match(kernels.version)
    if date and [int(part) for part in date.groups()] < [int(part) for part in fixed.split(".")]:
        check.add(
            "library.version",
            f"{kernels} is older than {fixed}, where {CUSTOM} was mended for CANN 8.5 and newer",
            "fixed_release",
        )


def _custom(bmm: BmmSpec, deployment: Deployment) -> Offer | Decline:
    check = Check(CUSTOM, deployment)
    check.soc()
    check.library_op(CUSTOM_OPS)
    _library_version(check)
    if mixed := _mixed(bmm):
        check.add("dtype", f"{CUSTOM} takes one dtype; {mixed}", "dtypes")
    check.member("dtype", "dtypes", bmm.dtype, "dtypes")
    if bmm.weight_format == "nz":
        multiple = check.figure("kn_multiple_nz")
        for axis, size in (("K", bmm.K), ("N", bmm.N)):
            if size % multiple:
                check.add(
                    "bmm.alignment",
                    f"{axis} = {size} is not a multiple of {multiple}",
                    "kn_multiple_nz",
                )
    rows = check.figure("m_max")
    # The op takes raw pointers: a strided weight is made contiguous while preparing, a strided
    # activation once a step (sgl-project/sglang#13980).
    return _answer(
        CUSTOM,
        check,
        "Custom",
        envelope=Envelope(tokens=(1, rows), contiguous=True),
        reads=(bmm.weight,),
        copies_input=bmm.input_layout == "strided",
        capture_slot=CUSTOM,
        mode=CUSTOM_OPS.get(deployment.kernels.name, ""),
        limits=()
        if rows is None
        else Reason("tokens.limit", f"{CUSTOM} takes 1 to {rows} rows{check.cited('m_max')}"),
    )


def _plain(bmm: BmmSpec) -> Offer | Decline:
    if mixed := _mixed(bmm):
        return Decline(
            strategy=PLAIN, reasons=Reason("dtype", f"torch.bmm takes one dtype; {mixed}")
        )
    return Offer(strategy=PLAIN, impl=f"{_IMPL}:Plain", reads=(bmm.weight,))


def _numerics(bmm: BmmSpec, deployment: Deployment) -> list[Forbid]:
    """Forbid what the catalog's model notes forbid, whoever offers it."""
    return [
        Forbid(
            strategy=note["strategy"],
            reasons=Reason(note["code"], f"{note['message']} [{note['source']}]"),
        )
        for note in deployment.catalog.notes_for(bmm.layer.model_type)
    ]


@lru_cache(maxsize=512)
def _answers(bmm: BmmSpec, deployment: Deployment) -> Answers:
    return (
        _transposing(bmm, deployment),
        _explicit(bmm, deployment),
        _custom(bmm, deployment),
        _plain(bmm),
        *_numerics(bmm, deployment),
    )


@hookimpl
def select_bmm_kernel(bmm: BmmSpec, deployment: Deployment) -> Answers:
    """Offer or decline each of the four kernels."""
    return _answers(bmm.kind, deployment)
