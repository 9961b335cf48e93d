"""Has a function of a hook's name and forgets the marker."""


def select_bmm_kernel(bmm, deployment):
    return None
