"""Serial executor: jobs in this process, in order. The specification, and useful with a debugger."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from rayfl.core.seeds import PROCESS
from rayfl.core.tensors import pack, unpack
from rayfl.engine.jobs import Executor, Job, Verb
from rayfl.engine.worker import Worker


class Serial(Executor):
    def __init__(self, worker: Worker, threads: int = 1):
        self.worker, self.threads = worker, threads

    def map(self, verb: Verb, jobs: Sequence[Job], shared: Callable[[Hashable], Any]) -> Iterator[Any]:
        run = getattr(self.worker, verb)
        key, message = None, None
        for job in jobs:
            if message is None or job.key != key:
                key, message = job.key, shared(job.key)
            # another thread may simulate too
            with PROCESS:
                before = torch.get_num_threads()
                torch.set_num_threads(self.threads)
                try:
                    answer = self._here(run(message, job.make()))
                finally:
                    torch.set_num_threads(before)
            yield answer
            del answer  # frees it before the next job runs

    def _here(self, answer: Any) -> Any:
        """Return an answer with its tensors on the CPU, as a client actor sends them."""
        return answer if self.worker.device.type == "cpu" else unpack(pack(answer))
