"""Workers for the option `worker_cls` that report drafts. The second rank of some is delayed or
killed."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from typing import Any

import torch
from ngram_npu.engines.vllm import saving
from vllm.v1.worker.cpu_worker import CPUWorker


class ReportingWorker(CPUWorker):
    """Counts its drafting steps, and computes a digest of its drafts."""

    def init_device(self) -> None:
        super().init_device()
        self._digest, self._steps, drafter = hashlib.sha256(), 0, _get_drafter(self)
        propose = drafter.propose

        def propose_and_record(*args: Any, **kwargs: Any) -> Any:
            result = propose(*args, **kwargs)
            drafts = result if isinstance(result, torch.Tensor) else result[0]
            self._digest.update(f"{drafts.tolist()}".encode())
            self._steps += 1
            return result

        drafter.propose = propose_and_record

    def report_drafts(self) -> tuple[str, int]:
        """Returns a digest of all drafts, and the number of steps."""
        return self._digest.hexdigest(), self._steps


class DelayedWorker(ReportingWorker):
    """Delays the drafts of the second rank, each by a random time."""

    def init_device(self) -> None:
        super().init_device()
        if self.rank == 1:
            drafter = _get_drafter(self)
            propose = drafter.propose

            def delay_and_propose(*args: Any, **kwargs: Any) -> Any:
                time.sleep(random.random() / 100)
                return propose(*args, **kwargs)

            drafter.propose = delay_and_propose


class KilledWorker(CPUWorker):
    """Saves the store in each step. Kills its process on the second rank in the first step after
    the store was saved."""

    def init_device(self) -> None:
        saving.BUSY_SAVE_S = saving.IDLE_SAVE_S = 0.01
        super().init_device()
        if self.rank == 1:
            drafter = _get_drafter(self)
            propose, file = drafter.propose, os.environ["NGRAM_NPU_VLLM_STORE_FILE"]

            def kill_or_propose(*args: Any, **kwargs: Any) -> Any:
                if os.path.exists(file):
                    os.kill(os.getpid(), signal.SIGKILL)
                return propose(*args, **kwargs)

            drafter.propose = kill_or_propose


def _get_drafter(worker: CPUWorker) -> Any:
    """Returns the drafter of either runner."""
    return getattr(worker.model_runner, "speculator", None) or worker.model_runner.drafter
