"""Contract tests of methods whose clients run different networks (`rayfl.methods.distillation`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import SkipTest

from rayfl.config import ConfigError
from rayfl.experiment import Experiment
from rayfl.methods.base import Method
from rayfl.testing.methods import MethodPromises, assert_equal_ends
from rayfl.testing.tiny import assert_same, run, simulate

MIX = {
    "name": "mix",
    "networks": {"0.3": "mcmahan_cnn", "0.2": {"name": "resnet8", "channels": 4}, "0.1": "digits_cnn"},
    "features": 6,
}
"""Mix of three families with equal classifier shapes."""
SPLIT = {
    "name": "mix",
    "networks": {
        "0.3": {"name": "resnet55_gkt", "channels": 4, "depth": [1, 1]},
        "0.2": {"name": "resnet8_gkt", "channels": 4, "depth": [2]},
        "0.1": {"name": "resnet8_gkt", "channels": 4, "depth": [1]},
    },
}
"""Mix of a server network and two client networks with the same extractor."""
FITTING: Mapping[str, tuple[Any, ...]] = {"networks": ("digits_cnn", MIX), "features": (MIX,), "extractors": (SPLIT,)}
"""Requirement of a method -> models that meet it."""
DATA = {"samples": 120, "test_samples": 24, "classes": 4, "shape": [1, 8, 8]}


class NetworksContract(MethodPromises):
    """A subclass sets `method`, and `models` if the method needs others."""

    public: Mapping[str, Any] = {"share": 0.25, "labeled": True}
    """Public data, as in a `data.public:` section."""

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "model" in metafunc.fixturenames:
            metafunc.parametrize("model", self.fitting, ids=lambda model: model if isinstance(model, str) else "mix")

    def given(self, **options: Any) -> Method:
        """Return the unbound method with few distillation steps."""
        method = super().given()
        short = dict(self.contract.short)
        if (how := getattr(method, "distillation", None)) is not None:
            few = {"steps": 5, "epochs": None, "batch_size": 8, "average_from": None}
            short["distillation"] = how.model_dump() | few
        return super().given(**short | options)

    @property
    def fitting(self) -> Any:
        return self.models or FITTING[self.contract.wants]

    def experiment(self, model: Any = None, options: Any = (), **sections: Any) -> Experiment:
        """Return a tiny experiment with public data and validation data."""
        made_up = {} if "data" in self.sections else DATA
        data = {**made_up, "public": self.public} | sections.pop("data", {})
        held = {"holdout": 0.2, "local_holdout": 0.2} | sections.pop("evaluation", {})
        partition = sections.pop("partition", "iid")
        return super().experiment(model, options, data=data, evaluation=held, partition=partition, **sections)

    def test_a_round_is_judged(self, model: Any, tmp_path: Path) -> None:
        simulation = simulate(self.experiment(model, rounds=1), tmp_path)
        [line] = run(simulation)
        assert [line[name] for name in ("round", "clients", "refused")] == [1, 4, 0]
        assert line["train_flops"] > 0 and line["bytes_up"] > 0
        assert {"local_accuracy_mean", "local_validation_accuracy_mean"} <= line.keys()
        self.check_deployments(simulation, line)

    def test_it_goes_on_from_the_middle_of_a_round(self, tmp_path: Path) -> None:
        """A run resumed from a checkpoint of a partial round, before its first server task or its last, equals the
        uninterrupted run bit for bit."""
        experiment = self.experiment(self.fitting[-1], rounds=1)
        straight = simulate(experiment, tmp_path / "straight")
        if type(straight.method).plan is Method.plan:
            raise SkipTest("its rounds have no server tasks")
        line, saved = straight.advance(), 0
        while line is None:
            saved += 1
            straight.save(tmp_path / f"checkpoints {saved}")
            line = straight.advance()
        assert saved
        del line["seconds"]
        for i in sorted({1, saved}):
            again = simulate(experiment, tmp_path / f"again {i}")
            assert again.restore(tmp_path / f"checkpoints {i}")[0] == 0
            assert again.partial_round
            assert run(again) == [line]
            assert_equal_ends(again, straight)

    def test_labels_of_public_data_are_not_looked_at(self, tmp_path: Path) -> None:
        """Methods that require labels are skipped."""
        unlabeled = {"data": {"public": {**self.public, "labeled": False}}}
        try:
            experiment = self.experiment(rounds=1, **unlabeled)
        except ConfigError as error:
            assert "labeled" in str(error)
            raise SkipTest("it needs labels") from None
        one, other = simulate(experiment, tmp_path / "one"), simulate(self.experiment(rounds=1), tmp_path / "other")
        assert run(one) == run(other)
        assert_same(one.state, other.state)
