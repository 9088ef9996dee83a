"""Workers for ``worker_cls`` whose second rank is odd."""

from __future__ import annotations

import atexit
import hashlib
import random
import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class FailingWorker(CPUWorker):
    """It cannot draft after a few steps."""

    def init_device(self) -> None:
        super().init_device()
        if self.rank == 1:
            host = self.model_runner.speculator._host
            propose, self.steps = host.propose, 0

            def fails(*args: Any) -> Any:
                self.steps += 1
                if self.steps > 5:
                    raise RuntimeError("no drafts")
                return propose(*args)

            host.propose = fails


class LateWorker(CPUWorker):
    """Its jobs are late, by another time each. Every rank prints a digest of its drafts."""

    def init_device(self) -> None:
        super().init_device()
        host = self.model_runner.speculator._host
        propose, run = host.propose, host._stream.run
        drafted = hashlib.sha256()

        def late(job: int) -> None:
            time.sleep(random.random() / 100)
            run(job)

        def noted(*args: Any) -> Any:
            found = propose(*args)
            drafted.update(found.draft_token_ids.numpy().tobytes())
            return found

        host.propose = noted
        if self.rank == 1:
            host._stream.run = late
        atexit.register(lambda: print("DRAFTED", drafted.hexdigest(), flush=True))
