"""The experiments of goldens.py: three rounds of every method on two models, and of the options that have code of
their own. A new method adds its lines here."""

from collections.abc import Mapping
from typing import Any

BASE: dict[str, Any] = {
    "rounds": 3,
    "data": {"name": "synthetic", "samples": 80, "test_samples": 24, "classes": 4},
    "partition": {"name": "shards", "labels": 2},
    "clients": {"count": 6, "cohort": 4, "capacities": [1.0, 0.6, 0.3]},
    "model": {"name": "digits_cnn"},
    "training": {"batch_size": 5, "steps": 2},
    "evaluation": {"every": 1, "batch_size": 7},
    "run": {"executor": "serial", "chunk": 2, "threads": 1},
}
"""Base of the sections of each case. Capacities divide nothing: of 32 channels they are 32, 20 and 10."""

DIGITS = {"name": "digits_cnn"}
RESNET = {"name": "resnet18", "channels": 8}
EXITS = {"name": "depthfl_resnet18", "channels": 8, "exits": ["stage1.1", "stage2.1"]}
OTHER_EXITS = RESNET | {"exits": ["stage1.0", "stage2.0"]}
PREACT = {"name": "preact_resnet18"}
VIT = {"name": "vit_b_16", "layers": 4, "heads": 2, "head_width": 8, "patch": 4}
LENET = {"name": "lenet5_caffe"}
LORA = {"name": "lora", "rank": 10, "alpha": 5, "base": VIT | {"layers": 2}}

MIX = {"name": "mix", "features": 6, "networks": {"1": "mcmahan_cnn", "0.6": "lenet5_caffe", "0.3": "digits_cnn"}}
SPLIT = {
    "name": "mix",
    "networks": {
        "1": {"name": "resnet55_gkt", "channels": 4, "depth": [1, 1], "norm": "layer"},
        "0.6": {"name": "resnet8_gkt", "channels": 4, "depth": [2], "norm": "layer"},
        "0.3": {"name": "resnet8_gkt", "channels": 4, "depth": [1], "norm": "layer"},
    },
}
PUBLIC = {"shape": [1, 16, 16], "public": {"share": 0.25, "labeled": True}}

NARROW = {"capacities": [0.2, 0.12, 0.06]}
"""Models with 64 constant channels."""
BY_PARAMETERS = {"metric": "params"}
PRUNING = {"alpha": 0.2}
"""Settings with which SpaFL prunes in three rounds."""
MOMENTUM = {"momentum": 0.9, "weight_decay": 0.001}

CASES: dict[str, dict[str, Any]] = {}
"""Name -> experiment."""


def case(name: str, **sections: Any) -> None:
    """Adds the case `method-what`; its sections are laid over BASE's, and `method` has options alone."""
    given: dict[str, Any] = {**BASE, "method": {"name": name.partition("-")[0]}}
    for section, value in sections.items():
        below = {} if section in ("model", "partition") else given.get(section, {})
        given[section] = {**below, **value} if isinstance(below, Mapping) else value
    assert name not in CASES, name
    CASES[name] = given


# every method on two models

for method in (
    "fedavg",
    "heterofl",
    "sheterofl",
    "adaptivefl",
    "splitmix",
    "flanc",
    "fedrolex",
    "feddropout",
    "fjord",
    "lg_fedavg",
    "standalone",
    "fedper",
    "fedbn",
    "fedrep",
    "fedbabu",
    "ditto",
    "apfl",
    "pfedme",
    "fedprox",
    "scaffold",
    "nefl",
    "fiarse_neurons",
    "spafl",
    "fedpm",
    "fiarse",
    "pruning_greedy",
):
    options = PRUNING if method == "spafl" else {}
    case(f"{method}-digits_cnn", model=DIGITS, method=options)
    case(f"{method}-resnet18", model=RESNET, method=options)
for method in ("depthfl", "scalefl"):
    case(f"{method}-depthfl_resnet18", model=EXITS)
    case(f"{method}-resnet18", model=OTHER_EXITS)
for method in ("depthfl_nefl", "scalefl_nefl", "inclusivefl", "fedra", "fedepth"):
    case(f"{method}-resnet18", model=RESNET, clients=BY_PARAMETERS)
    case(f"{method}-vit_b_16", model=VIT, clients=BY_PARAMETERS)
for method in (
    "fedit",
    "zero_padding",
    "rbla",
    "hetlora",
    "ffa_lora",
    "rolora",
    "lora_a2",
    "fed_plora",
    "rolling_lora",
    "important_lora",
    "fedsvd",
    "fedsb",
    "lora_fair",
    "fedex_lora",
    "flora",
    "florist",
    "flexlora",
    "raflora",
    "fedrora",
):
    case(f"{method}-lora", model=LORA)
STUDENT = {
    **{"steps": 6, "batch_size": 8, "lr": 0.05, "optimizer": "sgd", "momentum": 0, "cosine": False, "clip": None},
    **{"weight_decay": 0, "patience": 0, "average_from": None},
}
KNOWLEDGE: dict[str, tuple[Any, dict[str, Any]]] = {
    "feddf": (DIGITS, {"distillation": STUDENT}),
    "dsfl": (DIGITS, {"distillation": STUDENT, "open": 12, "distill_epochs": 1}),
    "fedet": (MIX, {"distillation": STUDENT}),
    "fedbe": (DIGITS, {"distillation": STUDENT, "samples": 2}),
    "takfl": (MIX, {"distillation": STUDENT, "candidates": 3}),
    "fedmd": (DIGITS, {"subset": 12, "warmup_epochs": 1, "private_warmup_epochs": 1}),
    "fedproto": (MIX, {}),
    "feddistill": (DIGITS, {}),
    "fml": (DIGITS, {}),
    "fedgen": (MIX, {"hidden": 8, "server": {"steps": 5}}),
    "fedgh": (MIX, {}),
    "fedl2g": (DIGITS, {}),
    "fedkd": (MIX, {"energy": [0.5, 0.8]}),
    "fedmrl": (MIX, {"features": 4}),
    "fedtgp": (MIX, {"server": {"epochs": 5}}),
}
"""Method -> model and options, with short rounds."""
for method, (model, options) in KNOWLEDGE.items():
    case(f"{method}-{model['name']}", model=model, data=PUBLIC, partition={"name": "iid"}, method=options)
case("fedgkt-mix", model=SPLIT, method={"server": {"epochs": 2, "batch_size": 8}}, clients={"weights": [0, 1, 1]})

# other models

for method in ("heterofl", "fedrolex", "feddropout"):
    case(f"{method}-preact_resnet18", model=PREACT, clients=NARROW)
for method in ("heterofl", "fedrolex", "fjord", "fiarse", "fedpm"):
    case(f"{method}-vit_b_16", model=VIT)
case("spafl-lenet5_caffe", model=LENET, data={"shape": [1, 16, 16]}, method=PRUNING)
case("spafl-spafl_resnet18", model={"name": "spafl_resnet18", "channels": 8}, method=PRUNING)
case("heterofl-liang_mlp", model={"name": "liang_mlp"})
case(
    "fjord-wide_resnet101_2",
    model={"name": "wide_resnet101_2", "channels": 4, "maxpool": False},
    training={"lr": 0.0005},
    rounds=1,
)
case(
    "fedavg-group_norm",
    model=DIGITS | {"norm": "group"},
    method={"size": "own"},
    clients={"capacities": [1.0, 0.5, 0.25]},
)
case("fedavg-no_norm", model=DIGITS | {"norm": "none"}, method={"size": "own"})

# options of methods

case("fedavg-smallest", method={"size": "smallest"})
case("fedavg-own", method={"size": "own", "weight": "uniform", "label_rows": "present", "mask": "neg_inf"})
case("fedprox-stragglers", method={"stragglers": 0.5, "mu": 0.1}, training={"steps": 3})
case("fedprox-epochs", method={"stragglers": 0.9, "size": "own"}, training={"steps": None, "epochs": 3})
case("scaffold-option_1", method={"option": "I"})
case("scaffold-own", method={"size": "own", "weight": "samples", "label_rows": "present"})
case("adaptivefl-fitting", method={"dispatch": "fitting", "starts": [0.2, 0.6]}, model=RESNET, clients=BY_PARAMETERS)
case("fedepth-mutual", method={"distill": 1.0}, model=RESNET, clients={"metric": "flops"})
case("fedrolex-overlap", method={"overlap": 0.5})
case("fedrolex-direction", method={"direction": -1, "deploys": "prefix"})
case("feddropout-untied", method={"tie_residual": False}, model=RESNET)
case("feddropout-draw_round", method={"draw": "round", "deploys": "prefix"})
case("fjord-distill", method={"distill": True, "alpha": 0.5, "temperature": 2.0}, model=RESNET)
case("fjord-round", method={"sample": "round"}, model=RESNET)
case("fjord-affine", method={"norms": "per_width_affine"}, model=RESNET)
case("fjord-affine_round", method={"norms": "per_width_affine", "sample": "round"}, model=RESNET, training=MOMENTUM)
case("fjord-static", method={"norms": "static", "scaler": True}, model=RESNET)
case("lg_fedavg-warmup", method={"shared": ["conv1", "conv2"], "warmup": 1})
case("lg_fedavg-own", method={"size": "own", "label_rows": "present"})
case("standalone-largest", method={"size": "largest"})
case("fedbn-own", method={"size": "own", "label_rows": "present"})
case("fedrep-own", method={"size": "own", "head_epochs": 1}, training=MOMENTUM)
case("fedbabu-all", method={"size": "own", "tuned": "all", "tuning_epochs": 1}, training=MOMENTUM)
case("ditto-own", method={"size": "own", "personal_epochs": 1, "lam": 0.1}, training=MOMENTUM)
case("apfl-adaptive", method={"size": "own", "adaptive": True, "alpha": 0.3}, training=MOMENTUM)
case("pfedme-own", method={"size": "own", "inner_steps": 2, "lam": 2, "eta": 0.1, "beta": 0.5}, training=MOMENTUM)
case("fedper-own", method={"size": "own", "personal": ["hidden", "head"]})
case("nefl-depth", method={"variant": "D"}, model=RESNET, clients=BY_PARAMETERS)
case("nefl-width_depth", method={"variant": "WD"}, model=RESNET, clients={"metric": "flops"})
case(
    "nefl-skipping",
    method={"variant": "D", "skipping_steps": True, "learn_steps": False},
    model=RESNET,
    clients=BY_PARAMETERS,
)
case("nefl-layer_norms", method={"layer_norms": "own"}, model=VIT)
case(
    "nefl-listed",
    method={
        "submodels": [
            {"capacity": 1.0},
            {"capacity": 0.6, "blocks": "11 01 10 11"},
            {"capacity": 0.3, "width": "sqrt(0.2)", "blocks": "11 00 10 10"},
        ],
        "projections": "with_block",
        "norms_init": "fresh",
    },
    model=RESNET,
)
case("depthfl-plain", method={"alpha": 0}, model=EXITS)
case("depthfl-last_exit", method={"exits_trained": "last", "distill": False}, model=EXITS)
case("depthfl-ramp", method={"ramp_rounds": 2}, model=EXITS)
case("scalefl-distill", method={"gamma": 0.05, "widths": [0.5, 0.75, 1.0]}, model=EXITS)
case(
    "scalefl-official",
    method={"gamma": 0.5, "distill_from": 1, "detach": False, "reduction": "mean"},
    model=OTHER_EXITS,
    clients=BY_PARAMETERS,
)
case("fiarse-layer", method={"threshold": "layer"})
case("fiarse-shard", method={"threshold": "shard"}, model=RESNET)
case("fiarse-flops", clients={"metric": "flops"})
case("fiarse-momentum", training=MOMENTUM)
case("fiarse-unheld_momentum", method={"mask_update": False, "biased_term": False}, training=MOMENTUM)
case("fiarse-nonzero", method={"count": "nonzero", "weight": "samples"}, clients=BY_PARAMETERS)
case("pruning_greedy-shards", method={"threshold": "shard", "shards": [["conv1"], ["conv2", "hidden"], ["head"]]})
case("spafl-local", method=PRUNING | {"exchange": False})
case("spafl-steered", method={"target_density": 0.5, "alpha": 0.1})
case("spafl-momentum", method=PRUNING | {"persistent_momentum": True}, training=MOMENTUM)
case(
    "spafl-official",
    method={
        "w_grad": "official_fmnist",
        "eq13_divisor": "official",
        "step_backward": "official_cifar",
        "alpha": 1.0,
        "alpha_ramp": 1,
        "classifier": False,
    },
)
case("spafl-bounds", method=PRUNING | {"clamp_weights": [-0.1, 0.1], "clamp_thresholds": [0, 0.05]})
case("spafl-thresholds_alone", method=PRUNING | {"train_weights": False, "eq13": False, "weight": "samples"})
case("fedpm-prior", method={"prior_reset": 2, "soften": True})
case("fedpm-participation", method={"prior_reset": "ceil_inv_participation", "deployed": "threshold"})
case(
    "fedpm-official",
    method={"init_c": "official", "ste": "official_p", "deployed": "mean"},
    training={"optimizer": "adam", "lr": 0.1},
)
case("rolling_lora-left_out", model=LORA, method={"others": "left_out"})
case("important_lora-left_out", model=LORA, method={"others": "left_out"})
case("fedsb-seed", model=LORA, method={"start": "seed"})
case("lora_fair-ridge", model=LORA, method={"by": "ridge"})
case("flexlora-alpha_over_r", model=LORA | {"scaling": "alpha_over_r", "head": "frozen"})
case("fml-official", model=MIX, data=PUBLIC, method={"detach": False, "reduction": "mean", "common": 1.0})
case("feddistill-logits", model=MIX, data=PUBLIC, method={"outputs": "logits", "weight": "samples"})
case("hetlora-halving", model=LORA, method={"gamma": 0.5, "tail_weight": 10.0})

# clients, data and partitions

case("heterofl-dynamic", clients={"assignment": "dynamic"})
case("depthfl-dynamic", clients={"assignment": "dynamic"}, method={"alpha": 0}, model=EXITS)
case("heterofl-tiers", clients={"assignment": "tiers", "reach": 1})
case("heterofl-letters", clients={"capacities": "a0-b1-c2"})
case("fjord-weights", clients={"weights": [1, 2, 3]}, model=RESNET)
case("fedavg-iid", partition={"name": "iid"}, data={"shape": [3, 8, 8], "size": 12})
case("fedavg-quantity", partition={"name": "quantity"}, data={"pixels": "raw"}, training={"lr": 0.0001})
case("fedavg-dirichlet", partition={"name": "dirichlet", "alpha": 1.0})
case("fedavg-dirichlet_cap", partition={"name": "dirichlet", "alpha": 1.0, "balance": "cap"})
case("fedavg-dirichlet_equal", partition={"name": "dirichlet", "alpha": 1.0, "balance": "equal"})
case("fedavg-keep", partition={"name": "shards", "labels": 2, "duplicates": "keep"})
case("fedavg-resample", partition={"name": "shards", "labels": 2, "duplicates": "resample"})

# training, evaluation and refused updates

case("fedavg-adamw", training={"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1})
case("fedavg-cosine", training={"warmup": 3, "cosine_rounds": 4, **MOMENTUM})
case("fedavg-schedule", training={"milestones": [1], "round_decay": 0.9, "floor": 0.01, "clip": 0.5})
case("heterofl-pooled", evaluation={"statistics": "pooled"}, model=RESNET)
case("heterofl-cumulative", evaluation={"statistics": "cumulative"}, model=RESNET)
case("heterofl-batch", evaluation={"statistics": "batch"}, model=RESNET)
case("heterofl-statistics_clients", evaluation={"statistics_clients": 3})
case("heterofl-server", evaluation={"local": "server", "label_mask": "zero"})
case("heterofl-no_clients", evaluation={"clients": False, "holdout": 0, "every": 2})
case("standalone-label_mask", evaluation={"label_mask": "neg_inf"}, clients={"cohort": 3})
case("fedavg-refused", training={"lr": 0.3}, updates={"growth": 1.0})
case("scaffold-refused", method={"size": "own"}, training={"lr": 0.3}, updates={"growth": 1.0})
case("scaffold-chunks", run={"chunk": 1}, method={"size": "own"}, model=RESNET)

# in float64, and what version control keeps

FLOAT32 = ("fiarse", "pruning_greedy")
"""Methods that cannot run in float64: they find thresholds in the bits of float32."""


def for_float64(experiment: dict[str, Any]) -> dict[str, Any]:
    """The same with norms by the batch: statistics that are collected are float32."""
    return experiment | {"evaluation": experiment["evaluation"] | {"statistics": "batch"}}


FIRST = {name.partition("-")[0]: name for name in reversed(CASES)}
"""Method -> the first of its cases, on its smallest model."""
VALUES = {
    # of 8x8 pixels a residual network leaves one, and norms by the batch make rounding errors 10,000 times larger
    method: for_float64(
        CASES[FIRST[method]]
        | {
            "data": CASES[FIRST[method]]["data"] | {"shape": [1, 16, 16]},
            "evaluation": BASE["evaluation"] | {"every": 3},
        }
    )
    for method in sorted(FIRST)
}
"""Method -> the experiment of which version control keeps values."""
