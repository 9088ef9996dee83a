"""Workers for ``worker_cls``: they tell what they drafted; or the second rank is odd."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from typing import Any

import torch
from ngram_npu.engines.vllm.v2 import LOOKUP_ATTRIBUTE
from vllm.v1.worker.cpu_worker import CPUWorker

STEPS = 5
"""Before it is odd."""


class NotingWorker(CPUWorker):
    """It can be asked for all that it drafted."""

    def init_device(self) -> None:
        super().init_device()
        self._digest, self._steps, drafter = hashlib.sha256(), 0, _drafter(self)
        propose = drafter.propose

        def noted(*args: Any, **kwargs: Any) -> Any:
            found = propose(*args, **kwargs)
            drafts = found if isinstance(found, torch.Tensor) else found[0]
            self._digest.update(f"{drafts.tolist()}".encode())
            self._steps += 1
            return found

        drafter.propose = noted

    def drafted(self) -> tuple[str, int]:
        """A digest of all drafts, and the number of steps."""
        return self._digest.hexdigest(), self._steps


class LateWorker(NotingWorker):
    """The jobs of the second rank are late, by another time each."""

    def init_device(self) -> None:
        super().init_device()
        if self.rank == 1:
            speculator = self.model_runner.speculator
            stream = getattr(speculator, LOOKUP_ATTRIBUTE, speculator)._host._stream
            run = stream.run

            def late(job: int) -> None:
                time.sleep(random.random() / 100)
                run(job)

            stream.run = late


class FailingWorker(CPUWorker):
    """It cannot draft after a few steps."""

    def init_device(self) -> None:
        super().init_device()
        if self.rank == 1:
            host = self.model_runner.speculator._host
            propose, self.steps = host.propose, 0

            def fails(*args: Any) -> Any:
                self.steps += 1
                if self.steps > STEPS:
                    raise RuntimeError("no drafts")
                return propose(*args)

            host.propose = fails


class KilledWorker(CPUWorker):
    """It is killed in a step after its engine's store was saved."""

    def init_device(self) -> None:
        super().init_device()
        if self.rank == 1:
            drafter = _drafter(self)
            propose, file = drafter.propose, os.environ["NGRAM_NPU_VLLM_STORE_FILE"]

            def killed(*args: Any, **kwargs: Any) -> Any:
                if os.path.exists(file):
                    os.kill(os.getpid(), signal.SIGKILL)
                return propose(*args, **kwargs)

            drafter.propose = killed


def _drafter(worker: CPUWorker) -> Any:
    """Of either runner."""
    return getattr(worker.model_runner, "speculator", None) or worker.model_runner.drafter
