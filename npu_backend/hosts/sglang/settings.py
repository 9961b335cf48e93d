"""SGLang's published configuration, as far as a plan depends on it, and the Deployment of it."""

from __future__ import annotations

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
        chunked_prefill_size: Tokens of a prefill chunk; None where prefill is not chunked.
        mixed_chunk: Decoding requests ride with a chunk.
        max_running_requests: Over all attention replicas; None where SGLang sizes it by memory.
        graph_rows: Largest batch that is captured; None where nothing is.
        draft_tokens: Tokens that one request brings to a verify step; 1 without speculation.
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
    chunked_prefill_size: int | None = None
    mixed_chunk: bool = False
    max_running_requests: int | None = None
    graph_rows: int | None = None
    draft_tokens: int = 1
    lora: bool = False
    role_switch: bool = False
    weight_update: bool = False
    deterministic: bool = False
    use_mlapo: bool = False
    fia_nz: bool = False
    foreign: tuple[str, ...] = ()


def _on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() in TRUE


def _foreign(parallel: Any, memory_model: Any, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return in words what of SGLang's options the routed functions would not do."""
    found = {
        "attention context parallelism (attn_cp_size > 1)": parallel.attn_cp_size > 1,
        "decode context parallelism (dcp_size > 1)": parallel.dcp_size > 1,
        "attention inputs scattered over TP (enable_attn_tp_input_scattered)": bool(
            getattr(parallel, "enable_attn_tp_input_scattered", False)
        ),
        "SGLANG_USE_AG_AFTER_QLORA": _on(environ, "SGLANG_USE_AG_AFTER_QLORA"),
        "SGLANG_NPU_ENABLE_SPARSE_KV_OFFLOAD": _on(environ, "SGLANG_NPU_ENABLE_SPARSE_KV_OFFLOAD"),
        "weights shared with other processes (weight_cache_mode)": (
            getattr(memory_model, "weight_cache_mode", "off") != "off"
        ),
    }
    return tuple(what for what, there in found.items() if there)


def _graph_rows(execution: Any) -> int | None:
    config = getattr(execution, "cuda_graph_config", None)
    decode = getattr(config, "decode", None)
    if decode is None or getattr(decode, "backend", "disabled") == "disabled":
        return None
    sizes = [*(getattr(decode, "bs", None) or ()), getattr(decode, "max_bs", None) or 0]
    return max(sizes) or None


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
    chunk = schedule.chunked_prefill_size
    return Settings(
        role=role,
        tp_size=tp_size,
        attn_tp_size=attn_tp_size,
        attn_dp_size=parallel.attn_dp_size,
        context_parallel_size=max(parallel.attn_cp_size, parallel.dcp_size),
        page_size=schedule.page_size or 128,
        kv_cache_dtype=model.kv_cache_dtype,
        chunked_prefill_size=chunk if chunk and chunk > 0 else None,
        mixed_chunk=bool(schedule.enable_mixed_chunk),
        max_running_requests=schedule.max_running_requests,
        graph_rows=_graph_rows(execution),
        draft_tokens=spec.speculative_num_draft_tokens or 1 if spec.speculative_algorithm else 1,
        lora=bool(lora.enable_lora),
        role_switch=bool(disagg.enable_pd_role_switch),
        weight_update=bool(
            model.custom_weight_loader or model.checkpoint_engine_wait_weights_before_ready
        ),
        deterministic=bool(execution.deterministic.enable_deterministic_inference),
        use_mlapo=_on(environ, "SGLANG_NPU_USE_MLAPO"),
        fia_nz=_on(environ, "SGLANG_USE_FIA_NZ"),
        foreign=_foreign(parallel, model, environ),
    )


def _bounds(settings: Settings) -> dict[Phase, int]:
    """Return the row bounds that SGLang's scheduler holds.

    A chunk is at most ``chunked_prefill_size`` tokens; with mixed chunks each running request adds
    one. A decode step has one row a request and a verify step ``draft_tokens``; captured batches
    are padded up to the largest captured size. Attention replicas pad to the largest of them, which
    holds the same bound.
    """
    found: dict[Phase, int] = {}
    running = settings.max_running_requests
    requests = None if running is None else max(1, running // settings.attn_dp_size)
    if settings.chunked_prefill_size is not None:
        if not settings.mixed_chunk:
            found[Phase.EXTEND] = settings.chunked_prefill_size
        elif requests is not None:
            found[Phase.EXTEND] = settings.chunked_prefill_size + requests
    if requests is not None:
        rows = max(requests, settings.graph_rows or 0)
        found[Phase.DECODE] = rows
        found[Phase.TARGET_VERIFY] = rows * settings.draft_tokens
        found[Phase.DRAFT_EXTEND] = rows * settings.draft_tokens
        found[Phase.IDLE] = rows * settings.draft_tokens
        if settings.chunked_prefill_size is not None and settings.attn_dp_size > 1:
            # An idle replica is padded to what the others extend.
            found[Phase.IDLE] = max(found[Phase.IDLE], found.get(Phase.EXTEND, 0))
    return found


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
        max_tokens=_bounds(settings) or None,
        requests=_requests(settings, environment, is_draft=is_draft),
        graph_capture=settings.graph_rows is not None,
        batch_invariant=settings.deterministic,
        promises=promises,
        restore=environment.restore,
        **more,
    )
