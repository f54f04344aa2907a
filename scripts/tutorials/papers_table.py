# %% [markdown]
# # From a paper's table to our numbers
#
# At the end you have checked the costs in HeteroFL's Table 1 without training, and seen our accuracies beside the
# published ones.

# %% [markdown]
# ## The file of the table
#
# Every published table is a file. Its rows are those of the table, and `published:` has its numbers.

# %%
from pathlib import Path

import pandas as pd

from rayfl.cli.files import find_config
from rayfl.config import load_yaml
from rayfl.experiment import read_experiment
from rayfl.reference.describe import describe
from rayfl.tuning.load import load_sweep

file = find_config(Path("heterofl_table1_mnist"))
load_yaml(file)["question"]

# %% [markdown]
# ## Costs come first
#
# Parameters and multiply-adds are checked before an hour of training. In row d-e half of the clients have width
# 1/8 and half 1/16:

# %%
experiment = read_experiment(load_sweep(file, rows="d-e").given("d-e"), "row d-e")
pd.DataFrame(describe(experiment))[["capacity", "width", "parameters", "flops"]]

# %% [markdown]
# `rayfl describe heterofl_table1_mnist --row d-e` prints the same.
#
# ## Then accuracy
#
# `rayfl sweep heterofl_table1_mnist --rows e,d-e,d` took two hours on two cores. It compares with the published
# numbers:

# %%
pd.read_csv(file.parent / "results/heterofl_table1_mnist.csv")[
    ["method", "published %", "ours %", "ours % std", "points"]
].round(2)

# %% [markdown]
# Every departure from the paper is numbered in the method's data sheet, `rayfl explain heterofl`.
