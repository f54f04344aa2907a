import pytest
import torch

from rayfl.methods import base


@pytest.fixture
def clients_answer(monkeypatch):
    """`clients_answer(3, 1)`: instead of training, the first client sets all its parameters to 3, the second
    to 1."""

    def answer(*values: float) -> None:
        left = iter(values)

        def fill(module, *args, **kwargs):
            value = next(left)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(value)
            return {"train_loss": 0.0, "train_samples": 1, "steps": 1}

        monkeypatch.setattr(base, "fit", fill)

    return answer
