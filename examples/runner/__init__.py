"""An example model runner: continuous batching, paged KV cache, n-gram drafts, asynchronous steps.

`runner.py` contains the loop, `scheduler.py` chooses the requests of a step, `paged_model.py` runs
the model, `draft_model.py` adds a neural drafter, and `sampling.py` chooses tokens.
docs/guides/own-runner.md explains the runner step by step. The example needs torch and
transformers. It is meant to be copied and is not part of the installed package.
"""

from .draft_model import DraftModel
from .paged_model import PagedModel, load, use_paged_attention
from .runner import Figures, Runner, RunnerConfig
from .sampling import Sampling
from .scheduler import Request, Scheduler

__all__ = [
    "DraftModel",
    "Figures",
    "PagedModel",
    "Request",
    "Runner",
    "RunnerConfig",
    "Sampling",
    "Scheduler",
    "load",
    "use_paged_attention",
]
