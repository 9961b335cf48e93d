"""The options that ``plan`` and ``run`` share, and what they build."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from attrs import frozen

from npu_backend.api import Backend, load
from npu_backend.catalog.versions import suggest
from npu_backend.deployment import HOSTS, PROMISES, Deployment, Phase, Role
from npu_backend.errors import DeploymentError
from npu_backend.mlp.options import OPTION_NAMES, AttnTpOptions, flag_of
from npu_backend.mlp.parallel import MlpParallel, parse_parallel
from npu_backend.mlp.plan import MlpPlan, plan_mlp
from npu_backend.mlp.rules import broken
from npu_backend.model.records import KV_DTYPES
from npu_backend.plan import ModelPlan

__all__ = [
    "SEED",
    "F",
    "Planned",
    "apply_options",
    "mlp_options",
    "model_and_deployment_options",
    "plan_from",
    "plugin_options",
]

F = TypeVar("F", bound=Callable[..., Any])

SEED = click.IntRange(0, 2**32 - 1)
"""What ``--seed`` takes: torch's generators hold 64 bits, and each layer has a seed of its own."""

_QUANTS = ("none", "w8a8-static", "w8a8-dynamic", "mxfp8", "fp8-block")


@frozen
class Planned:
    """What the options amount to."""

    backend: Backend
    plan: ModelPlan


def apply_options(decorators: list[Callable[[F], F]], function: F) -> F:
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def plugin_options(function: F) -> F:
    """Add the options that choose plugins and figures."""
    return apply_options(
        [
            click.option("--no-third-party", is_flag=True, help="Only npu-backend's own plugins."),
            click.option(
                "--plugin",
                "enable",
                multiple=True,
                metavar="NAME",
                help="Allow list: only these plugins; repeatable.",
            ),
            click.option(
                "--disable", multiple=True, metavar="NAME", help="Not this plugin; repeatable."
            ),
            click.option("--strict", is_flag=True, help="A plugin's failure is an error."),
            click.option(
                "--catalog",
                type=click.Path(path_type=Path),
                metavar="FILE",
                help="JSON file with figures that override the bundled catalog.",
            ),
        ],
        function,
    )


def model_and_deployment_options(function: F) -> F:
    """Add MODEL and every option of a deployment."""
    return apply_options(
        [
            click.argument("model"),
            click.option(
                "--role",
                default="null",
                show_default=True,
                metavar="|".join(Role),
                help="Disaggregation role.",
            ),
            click.option(
                "--tp-size", type=click.IntRange(1), help="TP size [default: attention TP]."
            ),
            click.option(
                "--attn-tp-size", type=click.IntRange(1), help="Attention-TP size [default: TP]."
            ),
            click.option(
                "--context-parallel-size",
                type=click.IntRange(1),
                default=1,
                show_default=True,
                help="Ranks that share one sequence's context.",
            ),
            click.option(
                "--soc",
                default="A3",
                show_default=True,
                metavar="NAME",
                help="A2, A3, A5, 310P, or the runtime's name such as Ascend910_9391.",
            ),
            click.option("--cann", metavar="VERSION", help="CANN release [default: newest known]."),
            click.option(
                "--torch-npu", metavar="VERSION", help="torch-npu package or TorchNPU line."
            ),
            click.option(
                "--kernels",
                default="sgl-kernel-npu",
                show_default=True,
                metavar="NAME[==VERSION]",
                help="Library of the ops torch_npu lacks: sgl-kernel-npu, vllm-ascend, none.",
            ),
            click.option(
                "--quant",
                default="none",
                show_default=True,
                type=click.Choice(_QUANTS),
                help="Quantization where the files say nothing.",
            ),
            click.option(
                "--dtype",
                default="bfloat16",
                show_default=True,
                type=click.Choice(["bfloat16", "float16", "float32"]),
                help="Dtype of activations and unquantized weights.",
            ),
            click.option(
                "--block-size",
                default=128,
                show_default=True,
                type=click.IntRange(1),
                help="Tokens in one block of the KV cache.",
            ),
            click.option(
                "--kv-dtype",
                type=click.Choice(KV_DTYPES),
                help="What the KV cache holds [default: --dtype].",
            ),
            click.option(
                "--cache-mode",
                default="PA_BSND",
                show_default=True,
                metavar="PA_BSND|PA_NZ|...",
                help="How the KV cache is laid out.",
            ),
            click.option(
                "--rope-layout",
                default="half",
                show_default=True,
                type=click.Choice(["half", "interleaved"]),
                help="How rotated key components stand in the KV cache.",
            ),
            click.option("--host", metavar="|".join(HOSTS), help="The engine that serves."),
            click.option(
                "--phases",
                multiple=True,
                metavar="PHASE[,PHASE]",
                help="Reachable phases, instead of the role's.",
            ),
            click.option(
                "--max-tokens",
                multiple=True,
                metavar="N|PHASE=N",
                help="Row bound of all phases or of one; repeatable.",
            ),
            *(
                click.option(f"--{name.replace('_', '-')}", name, is_flag=True, help=text)
                for name, text in {
                    "local_prefill": "Promise: extend runs here too.",
                    "lora": "Promise: LoRA on q_a, q_b or kv_b.",
                    "weight_update": "Promise: weights are updated while serving.",
                    "role_switch": "Promise: the role may flip.",
                    "export": "Promise: the weights may be saved.",
                    "draft_sharing": "Promise: a draft model takes these weights as its own.",
                    "parallel_copies": "Promise: other EP or PP ranks copy these weights.",
                }.items()
            ),
            click.option("--restore", is_flag=True, help="Release restorably instead of keeping."),
            click.option("--graph-capture", is_flag=True, help="Steps are captured into graphs."),
            click.option(
                "--batch-invariant", is_flag=True, help="One strategy for all row counts."
            ),
            click.option(
                "--request",
                "requests",
                multiple=True,
                metavar="KIND=NAME",
                help="path=, q_absorb= or v_up=, [DIST/]NAME[@nextn]; a contract; repeatable.",
            ),
            click.option("--layers", metavar="IDS", help="Only these layers, such as 0-2,78."),
            plugin_options,
            click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        ],
        function,
    )


def mlp_options(function: F) -> F:
    """Add the options that ask for the layouts of MLPs."""
    texts = {
        OPTION_NAMES[0]: "Split shared experts over attention TP, with an EP all-to-all.",
        OPTION_NAMES[1]: "Keep dense MLPs inside the attention-TP replica, with DP attention.",
    }
    return apply_options(
        [
            click.option(
                "--parallel",
                metavar="KEY=VALUE[,...]",
                help="tp=N,attn_tp=N,dp_attention=on|off,ep=BACKEND: also plan the MLPs' layouts.",
            ),
            *(
                click.option(
                    f"{flag_of(name)}/--no-{flag_of(name)[2:]}", name, default=None, help=text
                )
                for name, text in texts.items()
            ),
            click.option(
                flag_of(OPTION_NAMES[2]),
                type=click.IntRange(1),
                metavar="N",
                help="Ranks that share the shared experts; overrides the flag.",
            ),
        ],
        function,
    )


def _sizes(options: dict[str, Any], said: dict[str, Any]) -> dict[str, int | None]:
    """Return TP and attention-TP size, which both --parallel and two options can say."""
    for name in ("tp_size", "attn_tp_size"):
        one, other = options[name], said.get(name)
        if one is not None and other is not None and one != other:
            flag = flag_of(name)
            raise broken(
                "parallel.agrees",
                f"{flag} is {one} and --parallel says {other}",
                whom="--parallel",
                remedy=f"give {flag} or its part of --parallel, not both",
            )
    return {
        n: said.get(n) if options[n] is None else options[n] for n in ("tp_size", "attn_tp_size")
    }


def _mlp(options: dict[str, Any], said: dict[str, Any], deployment: Deployment) -> MlpPlan | None:
    """Return the layouts of the MLPs where any option asks for them."""
    given: dict[str, Any] = {name: options.get(name) for name in OPTION_NAMES}
    if not said and all(value is None for value in given.values()):
        return None
    from npu_backend.model.read_mlp import read_mlp_layers

    sizes = {"tp_size": deployment.tp_size, "attn_tp_size": deployment.attn_tp_size}
    parallel = MlpParallel(**{**said, **sizes})
    layers = read_mlp_layers(options["model"], dtype=options["dtype"], catalog=deployment.catalog)
    return plan_mlp(layers, AttnTpOptions(**given), parallel)


def _max_tokens(values: tuple[str, ...]) -> dict[Phase, int]:
    general: dict[Phase, int] = {}
    single: dict[Phase, int] = {}
    for value in values:
        phase, equals, number = value.rpartition("=")
        try:
            bound = int(number)
        except ValueError as err:
            raise DeploymentError(
                f"{value!r} is not a row bound",
                whom="--max-tokens",
                why="a bound is a number, or PHASE=NUMBER",
                remedy="write for example --max-tokens 1024 or --max-tokens decode=1024",
                code="tokens.limit",
            ) from err
        said = single if equals else general
        for each in [Phase.parse(phase)] if equals else list(Phase):
            if said.setdefault(each, bound) != bound:
                whose = f"phase {each}" if equals else "all phases"
                raise DeploymentError(
                    f"two row bounds are given for {whose}: {said[each]} and {bound}",
                    whom="--max-tokens",
                    why="one of them would be ignored",
                    remedy="give one; PHASE=N stands for its phase beside a bound of all",
                    code="tokens.limit",
                )
    return {**general, **single}


def _given(option: str | None, installed: str | None) -> str | None:
    """Return the option where it is there, also an empty one, which then is an error."""
    return installed if option is None else option


def plan_from(options: dict[str, Any], **installed: str | None) -> Planned:
    """Read the model, load the plugins, and plan.

    Args:
        options: The options of :func:`model_and_deployment_options`, by name.
        installed: For ``run``: ``torch_npu`` and ``cann`` of this machine, which are used where
            the options name none.
    """
    from npu_backend.model.read import read_model

    backend = load(
        enable=options["enable"] or None,
        disable=options["disable"],
        strict=options["strict"] or None,
        third_party=not options["no_third_party"],
        catalog=options["catalog"],
    )
    host = options["host"]
    if host is not None and host not in HOSTS:
        raise DeploymentError(
            f"{host!r} is not a host{suggest(host, HOSTS)}",
            whom="--host",
            why="the hosts are " + ", ".join(HOSTS),
            remedy="name one of them, or leave --host out",
        )
    parallel = options.get("parallel")
    said = {} if parallel is None else parse_parallel(parallel)
    deployment = Deployment(
        role=options["role"],
        catalog=backend.catalog,
        soc=options["soc"],
        cann=_given(options["cann"], installed.get("cann")),
        torch_npu=_given(options["torch_npu"], installed.get("torch_npu")),
        kernels=options["kernels"],
        **_sizes(options, said),  # type: ignore[arg-type] # None is the default of both
        context_parallel_size=options["context_parallel_size"],
        host=host,
        phases=",".join(options["phases"]) if options["phases"] else None,
        max_tokens=_max_tokens(options["max_tokens"]) or None,
        requests=options["requests"],
        graph_capture=options["graph_capture"],
        batch_invariant=options["batch_invariant"],
        promises=[name for name in PROMISES if options[name]],
        restore=options["restore"],
    )
    model = read_model(
        options["model"],
        quant=options["quant"],
        dtype=options["dtype"],
        block_size=options["block_size"],
        kv_dtype=options["kv_dtype"],
        cache_mode=options["cache_mode"],
        rope_layout=options["rope_layout"],
        host=host,
        layers=options["layers"],
        catalog=backend.catalog,
    )
    mlp = _mlp(options, said, deployment)
    return Planned(backend, backend.plan(model, deployment, mlp=mlp))
