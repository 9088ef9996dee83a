"""A worker for ``worker_cls`` in which the second rank cannot draft after a few steps."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class FailingWorker(CPUWorker):
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
