"""Code paths of GPUs, with substitutes for torch.cuda: kernels, devices, and errors of a device."""

import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from helpers import simulate, tiny

from rayfl.config import RunFailed
from rayfl.engine import devices, worker
from rayfl.engine.jobs import Job
from rayfl.engine.on_ray import host
from rayfl.engine.serial import Serial
from rayfl.training.settings import Training, precise

GPU = torch.device("cuda", 0)


def flags():
    cudnn, attention = torch.backends.cudnn, torch.backends.cuda
    return {
        "deterministic": cudnn.deterministic and torch.are_deterministic_algorithms_enabled(),
        "warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": cudnn.benchmark,
        "fills": torch.utils.deterministic.fill_uninitialized_memory,  # pyright: ignore
        "tf32": cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32,
        "fast attention": attention.mem_efficient_sdp_enabled() or attention.cudnn_sdp_enabled(),
    }


def test_on_a_gpu_kernels_repeat_their_bits():
    """And the process keeps its own settings."""
    before = flags()
    with precise(Training(), GPU):
        assert flags() == {
            "deterministic": True,
            "warns": True,
            "benchmark": False,
            "fills": False,
            "tf32": False,
            "fast attention": False,
        }
    assert flags() == before and not before["deterministic"]
    with precise(Training(), torch.device("cpu")):
        assert flags() == before
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize("statistics", ["exact", "pooled"])
def test_all_work_of_a_worker_is_precise(monkeypatch, tmp_path, statistics):
    """On a GPU, evaluations would use TF32, which is torch's default for convolutions."""
    inside, seen = [], set()

    @contextmanager
    def block(training, device):
        inside.append(device)
        yield
        inside.pop()

    def watched(owner, name):
        real = getattr(owner, name)

        def call(*given, **options):
            assert inside, name
            seen.add(name)
            return real(*given, **options)

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(worker, "precise", block)
    watched(worker, "judge")
    watched(worker.norms, "collect")
    experiment = tiny(method="heterofl", rounds=1, evaluation={"statistics": statistics})
    simulate(experiment, tmp_path).run_round()
    assert seen == {"judge", "collect"}


def test_a_device_has_one_name(monkeypatch):
    """Networks are cached by device, and a tensor's device has an index."""
    assert devices.indexed("cpu") == torch.device("cpu")
    monkeypatch.setattr(devices.torch, "empty", lambda *_, device: SimpleNamespace(device=GPU))
    assert devices.indexed(torch.device("cuda")) == GPU


def test_answers_of_a_serial_run_are_on_the_cpu():
    """As those of client actors; here a copy shows it."""
    answer = {"sum": torch.ones(3)}
    for device, is_sent in (("cpu", False), ("cuda", True)):
        made = SimpleNamespace(device=torch.device(device), train=lambda message, job: answer)
        [got] = Serial(made).map("train", [Job("a", 0, lambda: None)], lambda key: None)  # pyright: ignore
        assert (got is not answer) == is_sent and torch.equal(got["sum"], answer["sum"])


@pytest.fixture
def actor(monkeypatch):
    """A client actor's host on a GPU, whose training raises `error`; a lost device raises in `synchronize`."""

    def of(error, is_lost):
        def synchronize(device):
            if is_lost:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

        def train(*_):
            raise error

        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
        monkeypatch.setattr(host, "unpack", lambda packed: packed)
        monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
        found = host.Host(torch.get_num_threads(), has_gpu=True)
        found.worker = SimpleNamespace(device=GPU, train=train)  # pyright: ignore
        return found

    emptied = []
    return of


@pytest.mark.parametrize("verb", ["train", "run"])
def test_a_process_that_has_lost_its_gpu_ends(actor, capsys, verb):
    """All its further jobs would fail too; the pool runs them in another process."""
    failing = actor(RuntimeError("CUDA error: device-side assert triggered"), is_lost=True)
    with pytest.raises(SystemExit, match="1"):
        failing.train(None, None) if verb == "train" else failing.run("train", None, None)
    assert "device-side assert triggered" in capsys.readouterr().err


def test_other_errors_keep_the_process(actor):
    with pytest.raises(ValueError, match="^wrong$"):
        actor(ValueError("wrong"), is_lost=False).train(None, None)


def test_full_memory_of_a_gpu_is_explained(actor):
    with pytest.raises(RunFailed) as error:
        actor(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), is_lost=False).train(None, None)
    first, second = str(error.value).split("\n")
    assert first.startswith("run.gpus: the memory of the GPU of a client actor on ")
    assert "a smaller training.batch_size" in first and second.startswith("CUDA out of memory")
