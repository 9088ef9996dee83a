"""An example model runner: continuous batching, paged KV cache, n-gram drafts, asynchronous steps.

`runner.py` contains the loop, `scheduler.py` chooses the requests of a step, `paged_model.py` runs
the model, `draft_model.py` adds a neural drafter, `sampling.py` chooses tokens, and `pipeline.py`
divides the model among processes.
docs/guides/own-runner.md explains the runner step by step. The example needs torch and
transformers. It is meant to be copied and is not part of the installed package.
"""

from .draft_model import DraftModel
from .paged_model import PagedModel, load, use_paged_attention
from .pipeline import Pipeline, keep_layers_of_stage
from .runner import Figures, Runner, RunnerConfig
from .sampling import Sampling
from .scheduler import Request, Scheduler

__all__ = [
    "DraftModel",
    "Figures",
    "PagedModel",
    "Pipeline",
    "Request",
    "Runner",
    "RunnerConfig",
    "Sampling",
    "Scheduler",
    "keep_layers_of_stage",
    "load",
    "use_paged_attention",
]
