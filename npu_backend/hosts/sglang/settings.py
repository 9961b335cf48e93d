"""SGLang's published configuration, as far as a plan depends on it, and the Deployment of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from npu_backend.catalog import Catalog
from npu_backend.deployment import Deployment, KernelLibrary, Phase
from npu_backend.errors import DeploymentError
from npu_backend.hosts.sglang.environment import Environment

__all__ = ["Machine", "Settings", "deployment_of", "read_settings"]

TRUE = ("1", "true")
"""What SGLang's own reader of boolean variables takes for true, in any case."""


@frozen(kw_only=True)
class Machine:
    """The device and the packages of this process.

    Args:
        soc: The runtime's name of the chip.
        cann: CANN of the device.
        torch_npu: Version of torch-npu.
        kernels: Version of sgl-kernel-npu, or None where it is not installed as a package.
    """

    soc: str
    cann: str | None
    torch_npu: str | None = None
    kernels: str | None = None


@frozen(kw_only=True)
class Settings:
    """What a plan needs to know of SGLang's configuration.

    Args:
        role: ``disaggregation_mode``; None where nothing is published yet.
        tp_size: Ranks of the TP group.
        attn_tp_size: Ranks of an attention-TP group.
        attn_dp_size: Attention replicas in the TP group.
        context_parallel_size: Ranks that share one sequence's context.
        page_size: Tokens in one page of the KV pool.
        kv_cache_dtype: As the server arguments have it, ``auto`` or a dtype's name.
        chunk: Most tokens of a prefill chunk; None where prefill is not chunked.
        mixed_chunk: Decoding requests ride with a chunk.
        max_running_requests: Over all attention replicas; None where SGLang sizes it by memory.
        graph_rows: Largest batch of requests that is captured; None where nothing is.
        prefill_graph_rows: Largest captured prefill, which smaller ones are padded to.
        draft_tokens: Most tokens that one request brings to a verify step; 1 without speculation.
        draft_topk: Rows that one request has in a draft model's decode step.
        lora: LoRA adapters may be served.
        role_switch: The role may flip at run time.
        weight_update: The arguments say that weights come or change after load.
        deterministic: Results must not depend on the batch.
        use_mlapo: ``SGLANG_NPU_USE_MLAPO``.
        fia_nz: ``SGLANG_USE_FIA_NZ``: the KV pool is addressed in NZ.
        foreign: What SGLang does here that this adapter does not translate, each in words.
    """

    role: str | None
    tp_size: int = 1
    attn_tp_size: int = 1
    attn_dp_size: int = 1
    context_parallel_size: int = 1
    page_size: int = 128
    kv_cache_dtype: str = "auto"
    chunk: int | None = None
    mixed_chunk: bool = False
    max_running_requests: int | None = None
    graph_rows: int | None = None
    prefill_graph_rows: int | None = None
    draft_tokens: int = 1
    draft_topk: int = 1
    lora: bool = False
    role_switch: bool = False
    weight_update: bool = False
    deterministic: bool = False
    use_mlapo: bool = False
    fia_nz: bool = False
    foreign: tuple[str, ...] = ()


def _on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() in TRUE


def _foreign(
    parallel: Any, model: Any, execution: Any, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """Return in words what of SGLang's options the routed functions would not do, and who else
    holds the addresses of weights."""
    offload = execution.offload
    seed = model.remote_instance_weight_loader_start_seed_via_transfer_engine
    found = {
        "attention context parallelism (attn_cp_size > 1)": parallel.attn_cp_size > 1,
        "decode context parallelism (dcp_size > 1)": parallel.dcp_size > 1,
        "attention inputs scattered over TP (enable_attn_tp_input_scattered)": bool(
            parallel.enable_attn_tp_input_scattered
        ),
        "SGLANG_USE_AG_AFTER_QLORA": _on(environ, "SGLANG_USE_AG_AFTER_QLORA"),
        "SGLANG_NPU_ENABLE_SPARSE_KV_OFFLOAD": _on(environ, "SGLANG_NPU_ENABLE_SPARSE_KV_OFFLOAD"),
        "weights shared with other processes (weight_cache_mode)": model.weight_cache_mode != "off",
        "weights read by other instances at their addresses "
        "(remote_instance_weight_loader_start_seed_via_transfer_engine)": bool(seed),
        "weights that move between host and device (cpu_offload_gb, offload_group_size)": (
            offload.cpu_offload_gb > 0 or offload.offload_group_size > 0
        ),
    }
    return tuple(what for what, there in found.items() if there)


def _captured_rows(execution: Any, part: str) -> int | None:
    config = getattr(execution.graph.cuda_graph_config, part, None)
    if config is None or getattr(config, "backend", "disabled") == "disabled":
        return None
    sizes = [*(getattr(config, "bs", None) or ()), getattr(config, "max_bs", None) or 0]
    return max(sizes) or None


def _chunk(schedule: Any, pp_size: int) -> int | None:
    """Return the most tokens of a chunk; dynamic chunks grow, as SGLang's own bound has it."""
    size: int | None = schedule.chunked_prefill_size
    if not size or size < 0:
        return None
    if schedule.enable_dynamic_chunking and pp_size > 1:
        return max(size, schedule.max_prefill_tokens or 0, math.ceil(size * 1.25))
    return size


def _new_weights(model: Any, features: Any) -> bool:
    """Whether weights come or change after load: by a loader, or after a sleep that drops them."""
    sleeps = features.enable_memory_saver and not features.enable_weights_cpu_backup
    return bool(
        model.custom_weight_loader or model.checkpoint_engine_wait_weights_before_ready or sleeps
    )


def read_settings(context: Any, environ: Mapping[str, str]) -> Settings:
    """Read what SGLang has published.

    Args:
        context: SGLang's ``runtime_context`` module.
        environ: The process's environment.

    Raises:
        DeploymentError: ``role.unknown``: nothing is published yet.
    """
    try:
        disagg, parallel = context.get_disagg(), context.get_parallel()
        model, execution, schedule = context.get_model(), context.get_exec(), context.get_schedule()
        spec, lora = context.get_spec(), context.get_lora()
        role = disagg.disaggregation_mode
        tp_size, attn_tp_size = parallel.tp_size, parallel.attn_tp_size
    except (ValueError, RuntimeError) as err:
        raise DeploymentError(
            "the role is not known",
            whom="SGLang",
            why=f"its context is not published: {err}",
            remedy="plan once SGLang has published its context, after the model is loaded",
            code="role.unknown",
        ) from err
    speculates = bool(spec.speculative_algorithm)
    return Settings(
        role=role,
        tp_size=tp_size,
        attn_tp_size=attn_tp_size,
        attn_dp_size=parallel.attn_dp_size,
        context_parallel_size=max(parallel.attn_cp_size, parallel.dcp_size),
        page_size=schedule.page_size or 128,
        kv_cache_dtype=model.kv_cache_dtype,
        chunk=_chunk(schedule, parallel.pp_size),
        mixed_chunk=bool(schedule.enable_mixed_chunk),
        max_running_requests=schedule.max_running_requests,
        graph_rows=_captured_rows(execution, "decode"),
        prefill_graph_rows=_captured_rows(execution, "prefill"),
        draft_tokens=_draft_tokens(spec) if speculates else 1,
        draft_topk=(spec.speculative_eagle_topk or 1) if speculates else 1,
        lora=bool(lora.enable_lora),
        role_switch=bool(disagg.enable_pd_role_switch),
        weight_update=_new_weights(model, execution.features),
        deterministic=bool(execution.deterministic.enable_deterministic_inference),
        use_mlapo=_on(environ, "SGLANG_NPU_USE_MLAPO"),
        fia_nz=_on(environ, "SGLANG_USE_FIA_NZ"),
        foreign=_foreign(parallel, model, execution, environ),
    )


def _draft_tokens(spec: Any) -> int:
    return max(spec.speculative_num_draft_tokens or 1, spec.max_speculative_num_draft_tokens or 1)


def _bounds(settings: Settings, *, is_draft: bool) -> dict[Phase, int]:
    """Return the row bounds that SGLang's scheduler holds, padding included.

    A chunk is at most ``chunk`` tokens; with mixed chunks each running request adds one. A decode
    step has one row a request (a draft model's ``draft_topk``), a verify step ``draft_tokens``.
    Captured batches are padded up to a captured size, attention replicas up to the largest of them,
    and all of it to a multiple of ``attn_tp_size``.
    """
    running = settings.max_running_requests
    requests = None if running is None else max(1, running // settings.attn_dp_size)
    decode = None if requests is None else max(requests, settings.graph_rows or 0)
    extend = settings.chunk
    if extend is not None and settings.mixed_chunk:
        extend = None if requests is None else extend + requests
    if extend is not None:
        extend = max(extend, settings.prefill_graph_rows or 0)
    wide = None if decode is None else decode * settings.draft_tokens
    found = {
        Phase.EXTEND: extend,
        Phase.DECODE: decode and decode * (settings.draft_topk if is_draft else 1),
        Phase.TARGET_VERIFY: wide,
        Phase.DRAFT_EXTEND: wide,
        Phase.IDLE: wide,
    }
    if settings.attn_dp_size > 1:
        # A replica is padded to what another one runs at the same time, whatever its own phase.
        known = [rows for rows in found.values() if rows is not None]
        highest = max(known) if len(known) == len(found) else None
        found = dict.fromkeys(found, highest)
    part = settings.attn_tp_size
    return {p: -(-rows // part) * part for p, rows in found.items() if rows is not None}


def _requests(settings: Settings, environment: Environment, *, is_draft: bool) -> tuple[str, ...]:
    """``SGLANG_NPU_USE_MLAPO=1`` is ``path=fused``, unset it is ``path=absorb``.

    The variable decides what a decoding worker runs. A prefill worker extends only, by SGLang's own
    MHA or by absorb whatever the variable says, so there it is no request, which could not be met.
    """
    path = "fused" if settings.use_mlapo else "absorb"
    own = [f"path={path}", f"path={path}@nextn"]
    decodes = settings.role != "prefill" or settings.role_switch
    decodes = decodes or "role_switch" in environment.promises
    if not decodes or any(text.startswith("path=") for text in environment.requests):
        own = []
    # A path binds main layers or, with @nextn, MTP layers; a runner has one kind of them.
    return (*(r for r in own if r.endswith("@nextn") == is_draft), *environment.requests)


def deployment_of(
    settings: Settings,
    machine: Machine,
    environment: Environment,
    *,
    is_draft: bool = False,
    catalog: Catalog | None = None,
) -> Deployment:
    """Return the Deployment of a runner.

    Args:
        settings: What SGLang published.
        machine: The device and the packages.
        environment: The adapter's own variables.
        is_draft: The runner has the MTP layers.
        catalog: The figures; default: the bundled ones.

    Raises:
        DeploymentError: The role is unknown, a version or chip is, or SGLang is configured in a way
            that this adapter does not translate.
    """
    if settings.foreign:
        raise DeploymentError(
            "SGLang is configured in a way that is not translated",
            whom="SGLang",
            why=settings.foreign,
            remedy="leave these options out, or set NPU_BACKEND_SGLANG=0",
            code="parallel.context" if settings.context_parallel_size > 1 else None,
        )
    promises = set(environment.promises)
    promises |= {
        name for name in ("lora", "role_switch", "weight_update") if getattr(settings, name)
    }
    more: dict[str, Any] = {} if catalog is None else {"catalog": catalog}
    return Deployment(
        role=settings.role,
        soc=machine.soc,
        cann=machine.cann,
        torch_npu=machine.torch_npu,
        kernels=KernelLibrary("sgl-kernel-npu", machine.kernels),
        tp_size=settings.tp_size,
        attn_tp_size=settings.attn_tp_size,
        context_parallel_size=settings.context_parallel_size,
        host="sglang",
        max_tokens=_bounds(settings, is_draft=is_draft) or None,
        requests=_requests(settings, environment, is_draft=is_draft),
        graph_capture=settings.graph_rows is not None,
        batch_invariant=settings.deterministic,
        promises=promises,
        restore=environment.restore,
        **more,
    )
