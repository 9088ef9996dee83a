"""Workers for ``worker_cls`` whose second rank is odd."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

from ngram_npu.vllm.v2 import BESIDE
from noting_workers import note
from vllm.v1.worker.cpu_worker import CPUWorker

STEPS = 5
"""Before it is odd."""


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
            speculator = self.model_runner.speculator
            propose, file = speculator.propose, os.environ["NGRAM_NPU_VLLM_STORE_FILE"]

            def killed(*args: Any, **kwargs: Any) -> Any:
                if os.path.exists(file):
                    os.kill(os.getpid(), signal.SIGKILL)
                return propose(*args, **kwargs)

            speculator.propose = killed


class LateWorker(CPUWorker):
    """Its jobs are late, by another time each. Every rank prints a digest of its drafts."""

    def init_device(self) -> None:
        super().init_device()
        speculator = self.model_runner.speculator
        stream = getattr(speculator, BESIDE, speculator)._host._stream
        run = stream.run

        def late(job: int) -> None:
            time.sleep(random.random() / 100)
            run(job)

        note(speculator)
        if self.rank == 1:
            stream.run = late
