# %% [markdown]
# # Add your own method, in one file
#
# At the end a method of yours runs like the built-in ones: with submodels, exact costs and checkpoints.

# %% [markdown]
# ## The idea
#
# FedProx adds a proximal term to every client's loss. Ours differs: weak clients are pulled more strongly towards
# the global model. `Dense` has the rest: a client trains the first channels, and the server averages each
# coordinate over the clients that hold it.

# %%
from typing import Literal

from pydantic import Field

import rayfl


class Anchored(rayfl.Dense):
    """Proximal term mu / (2 r) |y - x|^2, where r is the client's capacity."""

    name: Literal["anchored"] = "anchored"
    mu: float = Field(default=0.01, ge=0)
    """Strength of the pull."""

    def local_update(self, payload, visit):
        received = payload["params"]
        module = self.module(visit, received)

        def pull(module):
            for name, parameter in module.named_parameters():
                parameter.grad.add_(parameter.detach() - received[name], alpha=self.mu / visit.client.capacity)

        metrics = self.fit(module, visit, adjust=pull)
        trained = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
        return self.answer(trained, {"params": trained}, visit, metrics)


# %% [markdown]
# Fields are options: they are checked, listed and can be tuned. The verbs of a method are in [the
# guide](../../rayfl/methods/README.md#add-a-method).
#
# ## Run it

# %%
experiment = {
    "rounds": 8,
    "data": "digits",
    "clients": {"count": 20, "cohort": 10, "capacities": [1, 0.25]},
    "model": {"name": "digits_cnn", "norm": "none"},
    "training": {"lr": 0.1},
    "evaluation": {"every": 4},
    "run": {"executor": "serial"},
}
scores = {}
for mu in (0, 0.1, 1):
    result = rayfl.run(experiment | {"method": Anchored(mu=mu)})
    scores[mu] = [round(result.summary[name], 3) for name in ("accuracy_1", "accuracy_0.25")]
scores

# %% [markdown]
# With mu = 0 it must be plain averaging of submodels: HeteroFL without Scaler and masks, with the same bits.

# %%
plain = rayfl.run(experiment | {"method": {"name": "heterofl", "scaler": False, "mask": "none", "label_rows": "all"}})
[round(plain.summary[name], 3) for name in ("accuracy_1", "accuracy_0.25")] == scores[0]

# %% [markdown]
# In a package of yours a file names it `method: "mylab.anchored:Anchored"`, and [one
# import](../../rayfl/PLUGINS.md#short-names-and-tests) tests it.
