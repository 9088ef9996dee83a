"""A worker for ``worker_cls`` in which the second rank cannot draft after a few steps."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker


class FailingWorker(CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        if self.rank == 1:
            store = self.model_runner.speculator._store
            check, self.steps = store.check_not_skipped, 0

            def fails() -> None:
                self.steps += 1
                if self.steps > 5:
                    raise RuntimeError("no drafts")
                check()

            store.check_not_skipped = fails
