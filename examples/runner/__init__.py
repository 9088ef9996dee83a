"""An example model runner: continuous batching, paged KV cache, n-gram drafts, asynchronous steps.

`runner.py` contains the loop, `scheduler.py` chooses the requests of a step, and `paged_model.py`
runs the model. docs/guides/own-runner.md explains the calls of `AsyncSpecState`. The example needs
torch and transformers. It is meant to be copied and is not part of the installed package.
"""

from .paged_model import PagedModel, load
from .runner import Figures, Runner, RunnerConfig
from .scheduler import Request, Scheduler

__all__ = ["Figures", "PagedModel", "Request", "Runner", "RunnerConfig", "Scheduler", "load"]
