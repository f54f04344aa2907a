# %% [markdown]
# # Simulated phones: how long does a round take?
#
# At the end you have seen which of four ways to handle slow phones reaches an accuracy first.

# %% [markdown]
# ## Clients with devices
#
# A `system:` section gives every client a device. Times come from the operations and bytes of each client's own
# network: nothing is measured on this machine.

# %%
import matplotlib.pyplot as plt

import rayfl

experiment = {
    "rounds": 15,
    "data": "digits",
    "clients": {"count": 40, "cohort": 8},
    "model": "digits_cnn",
    "training": {"lr": 0.1, "clip": 1},
    "evaluation": {"every": 3},
    "run": {"executor": "serial"},
}
ways = {
    "wait for all": {"system": {}},
    "first 8 of 12": {"system": {"mode": {"name": "sync", "select": 1.5}}},
    "asynchronous": {"system": {"mode": {"name": "buffered", "concurrency": 24, "buffer": 8}}},
    "submodels": {"system": {}, "method": "heterofl", "clients": {"count": 40, "cohort": 8, "capacities": [1, 0.25]}},
}
results = {name: rayfl.run({"method": "fedavg"} | experiment | way) for name, way in ways.items()}
{name: f"{result.metrics['sim_time'].iloc[-1]:.2f} s" for name, result in results.items()}

# %% [markdown]
# ## Accuracy over time

# %%
figure, axes = plt.subplots(figsize=(6, 3.5))
for name, result in results.items():
    lines = result.metrics.dropna(subset=["accuracy_mean"])
    axes.plot(lines["sim_time"], 100 * lines["accuracy_mean"], marker="o", label=name)
axes.set(xlabel="simulated seconds", ylabel="accuracy %")
axes.legend()
figure

# %% [markdown]
# Twelve phones at work finish sooner than eight, and 24 sooner still: compare ways with the same number of phones
# before you conclude. Who is left out is a question of its own: [simulated time](../../rayfl/system/README.md),
# [what we found](../../tune_configs/results/time_groups_fashion_mnist.md).
