# %% [markdown]
# # Ten minutes with rayfl
#
# At the end you have compared two methods on clients of unequal capacity, and you hold a small network for a weak
# device.

# %% [markdown]
# ## One experiment
#
# Twenty clients share handwritten digits with skewed labels. A third can train all channels of a small network, a
# third a quarter of them, a third a sixteenth. `serial` runs everything in this process; without it, rayfl starts
# Ray.

# %%
import torch

import rayfl

experiment = {
    "rounds": 12,
    "data": "digits",
    "partition": {"name": "dirichlet", "alpha": 0.5},
    "clients": {"count": 20, "cohort": 10, "capacities": [1, 0.25, 0.0625]},
    "model": "digits_cnn",
    "training": {"lr": 0.1, "clip": 1},
    "evaluation": {"every": 4},
    "run": {"executor": "serial"},
}

heterofl = rayfl.run(experiment | {"method": "heterofl"})
heterofl.metrics[["train_loss", "accuracy_1", "accuracy_0.25", "accuracy_0.0625"]].dropna().round(2)

# %% [markdown]
# `metrics` is a data frame with one row per round. `accuracy_0.25` is the test accuracy of the network that a
# client of capacity 1/4 gets.

# %%
heterofl.plots["accuracy_by_capacity"]

# %% [markdown]
# ## Another method
#
# The baseline of every comparison: all clients train the smallest network.

# %%
smallest = rayfl.run(experiment | {"method": {"name": "fedavg", "size": "smallest"}})
{
    name: round(result.summary["accuracy_0.0625"], 2)
    for name, result in {"HeteroFL": heterofl, "smallest": smallest}.items()
}

# %% [markdown]
# One run of each, with one learning rate, is no comparison: `rayfl sweep` tunes both with the same budget, on
# several seeds.
#
# ## The network of a weak device

# %%
network = heterofl.submodel(0.0625)
sum(p.numel() for p in network.parameters()), network(torch.zeros(1, 1, 8, 8)).shape
