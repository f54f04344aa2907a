# %% [markdown]
# # Adapters of unequal ranks
#
# At the end clients with ranks 8, 4 and 2 have fine-tuned one frozen transformer. The base here is untrained and
# small, so that this page takes seconds; with `base: {name: roberta, weights: FOLDER}` the same lines fine-tune a
# language model.

# %%
import rayfl

experiment = {
    "rounds": 6,
    "data": "digits",
    "clients": {"count": 12, "cohort": 4, "capacities": [1, 0.5, 0.25]},
    "model": {
        "name": "lora",
        "base": {"name": "vit_b_16", "layers": 2, "heads": 2, "head_width": 16, "patch": 2},
        "rank": 8,
        "alpha": 16,
    },
    "training": {"lr": 0.01, "optimizer": "adam", "epochs": 2},
    "evaluation": {"every": 3},
    "run": {"executor": "serial"},
}

# %% [markdown]
# A capacity is a fraction of the rank. Only adapters and the head are trained, sent and counted:

# %%
results = {name: rayfl.run(experiment | {"method": name}) for name in ("zero_padding", "flexlora")}
for name, result in results.items():
    sent = result.summary["bytes_up"] / 1e6
    print(f"{name}: accuracy {result.summary['accuracy_mean']:.2f}, sent by clients {sent:.2f} MB")

# %% [markdown]
# Which rule for unequal ranks is best? With tuned rates on SST-2 [none was significantly better than
# zero-padding](../../tune_configs/README.md#what-we-found).
