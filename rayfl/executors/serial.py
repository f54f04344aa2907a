"""In this process, in order: the specification, and what a debugger wants."""

from collections.abc import Callable, Hashable, Iterator, Sequence

import torch

from rayfl.executors.base import Executor, Job, Message, Verb


class Serial(Executor):
    def __init__(self, worker, threads: int = 1):
        self.worker, self.threads = worker, threads

    def map(self, verb: Verb, jobs: Sequence[Job], shared: Callable[[Hashable], Message]) -> Iterator[Message]:
        run = getattr(self.worker, verb)
        key, message = None, None
        for job in jobs:
            if message is None or job.key != key:
                key, message = job.key, shared(job.key)
            before = torch.get_num_threads()
            torch.set_num_threads(self.threads)
            try:
                answer = run(message, job.message())
            finally:
                torch.set_num_threads(before)
            yield answer
