# %% [markdown]
# # Your own network and data
#
# At the end your network has been trained in three sizes on your arrays, without a line of federated code.

# %% [markdown]
# ## A network
#
# Any module of torch. Nothing is declared: rayfl finds out which channels belong together.

# %%
import numpy as np
from torch import nn

import rayfl


class Network(nn.Module):
    """Pixels [B, 1, 16, 16] -> logits [B, classes], with a residual connection."""

    def __init__(self, width=16, num_classes=3):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, stride=2)
        self.norm, self.conv = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        x = self.stem(x).relu()
        x = x + self.conv(self.norm(x)).relu()
        return self.head(x.mean((2, 3)))


# %% [markdown]
# ## Data
#
# Arrays x [N, C, H, W] and classes y [N]. A fifth is held out for tests. Here: noisy stripes in three directions.

# %%
generator = np.random.default_rng(0)
y = generator.integers(3, size=600)
rows, columns = np.indices((16, 16))
stripes = np.stack([(rows // 2) % 2, (columns // 2) % 2, ((rows + columns) // 2) % 2])
x = (stripes[y] + generator.normal(0, 0.5, (600, 16, 16)))[:, None].astype(np.float32)

# %% [markdown]
# ## Train

# %%
experiment = {
    "rounds": 10,
    "data": rayfl.InMemory(x, y),
    "model": rayfl.Module(Network),
    "clients": {"count": 12, "cohort": 6, "capacities": [1, 0.5, 0.25]},
    "training": {"lr": 0.1, "epochs": 2},
    "method": "fedrolex",
    "evaluation": {"every": 5},
    "run": {"executor": "serial"},
}
result = rayfl.run(experiment)
result.metrics[["accuracy_1", "accuracy_0.5", "accuracy_0.25"]].dropna().round(2)

# %% [markdown]
# What a client of each capacity has:

# %%
{capacity: sum(p.numel() for p in result.submodel(capacity).parameters()) for capacity in (1, 0.5, 0.25)}

# %% [markdown]
# [Datasets of torch](../../rayfl/data/README.md#datasets-of-torch), tables, texts and folders work alike: ["I
# have ..."](../docs/guides/i_have.md).
