"""Declines."""

from npu_backend import Decline, Reason, hookimpl


@hookimpl
def select_preprocess_path(layer, deployment):
    return Decline(strategy="mlapo", reasons=Reason("quant.mode", "not int8"))
