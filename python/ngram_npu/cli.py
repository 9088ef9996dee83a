"""The command `ngram-npu`, for callers in Python.

It is a package of its own, because importing anything of this one loads torch, which takes longer
than `--help` may.
"""

from ngram_npu_command import main

__all__ = ["main"]
