"""Has no opinion."""

from npu_backend import hookimpl


@hookimpl
def select_preprocess_path(layer, deployment):
    return None
