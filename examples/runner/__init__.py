"""A model runner to copy from: continuous batching, paged KV cache, n-gram drafts, asynchronous.

`runner.py` is the loop, `scheduler.py` what it runs, `paged_model.py` the model, `draft_model.py` a
smaller one beside the n-grams, `sampling.py` how tokens are chosen, `trace.py` where the time goes.
docs/guides/own-runner.md explains it step by step. It needs torch and transformers, and is not part
of the installed package.
"""

from .draft_model import DraftModel
from .paged_model import PagedModel, load, paged
from .runner import Figures, Runner, RunnerConfig
from .sampling import Sampling
from .scheduler import Request, Scheduler
from .trace import Trace

__all__ = [
    "DraftModel",
    "Figures",
    "PagedModel",
    "Request",
    "Runner",
    "RunnerConfig",
    "Sampling",
    "Scheduler",
    "Trace",
    "load",
    "paged",
]
