"""Asks for an argument that the hook does not have, and gives another one a default."""

from npu_backend import hookimpl


@hookimpl
def select_bmm_kernel(bmm, deploymnet, retries=3):
    return None
