"""A worker for the option `worker_cls` that reports its drafts, and delays those of the second
rank."""

from __future__ import annotations

import hashlib
import random
import time
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker


class DelayedWorker(CPUWorker):
    """Counts its drafting steps, and computes a digest of its drafts. The drafts of the second rank
    are delayed, each by a random time."""

    def init_device(self) -> None:
        super().init_device()
        self._digest, self._steps = hashlib.sha256(), 0
        runner = self.model_runner
        drafter: Any = getattr(runner, "speculator", None) or runner.drafter
        propose = drafter.propose

        def propose_and_record(*args: Any, **kwargs: Any) -> Any:
            if self.rank == 1:
                time.sleep(random.random() / 100)
            result = propose(*args, **kwargs)
            drafts = result if isinstance(result, torch.Tensor) else result[0]
            self._digest.update(f"{drafts.tolist()}".encode())
            self._steps += 1
            return result

        drafter.propose = propose_and_record

    def report_drafts(self) -> tuple[str, int]:
        """Returns a digest of all drafts, and the number of steps."""
        return self._digest.hexdigest(), self._steps
