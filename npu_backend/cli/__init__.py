"""The command line, which is the machine interface as well: every command takes ``--json``.

Exit codes: 0 done, 1 a proof failed, 2 bad input or no legal plan.
"""

from npu_backend.cli.main import main

__all__ = ["main"]
