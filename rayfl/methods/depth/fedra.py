"""FedRA: every client trains a random subset of the blocks, drawn anew in every round.

Paper: Su, Li, Xue, "FedRA: A Random Allocation Strategy for Federated Tuning to Unleash the Power of Heterogeneous
Clients", ECCV 2024, https://arxiv.org/abs/2311.11227. Read: the abstract, and the authors' code
(https://github.com/leondada/FedRA: `main.py`, `server.py`, `client.py`), which the equations follow.

Symbols: $L$ the number of blocks of the server's network, $L_k$ that of client $k$'s network, $x$ the global
parameters.

    $A_k$         row of the allocation matrix: $L_k$ of the $L$ blocks, drawn uniformly without replacement, anew for
                every client and round (`get_para_range`)
    $S_k$         the blocks of $A_k$ in their order, and all layers outside blocks
    $y_k$         SGD from $S_k x$ on cross-entropy (`train_baseline`)
    $x$           $<- (sum_k S_k^T y_k)/(sum_k S_k^T 1)$, uniform weights; a block that nobody drew is unchanged
                (`agg_range_fill`)

Cost per round: $S_k x$ down and $y_k$ up, without the allocation, which follows from round and client; the client's
training; one sum on the server.

Departures:
1. The paper fine-tunes adapters of a frozen foundation model. Here all parameters of the drawn blocks are trained, of
   any model with residual blocks; rayfl's adapters have a capacity in ranks, not in blocks.
2. Several stages (ResNets): the number of blocks per stage is that of the first blocks within the capacity (NeFL's
   `auto`), and blocks are drawn within their stage. A transformer has one stage, as in the paper. The skip of an
   omitted block stays, with its projection. The first block of a stage can cost less than the others, so that a drawn
   network can cost more than its capacity.
3. A random method defines no submodel of a capacity outside training: a device runs the first blocks, which is ours.
   The code evaluates only the server's network.
4. The code clips gradients at 10 and uses momentum 0.9; here `training` decides. In the code no client trains more than
   one batch per epoch above the number of batches of the smallest client.
5. The code contains, as a comment, a draw that covers all blocks if every client is small. It is not supported, because
   clients draw independently.
6. Norms are static: statistics are collected before an evaluation. Transformers have none.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from rayfl.core.fold import State
from rayfl.core.net import Net
from rayfl.core.seeds import numpy_generator
from rayfl.core.submodel import Slice, prefix
from rayfl.methods.base import Client, Task
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.methods.sizes import nested, random_depth


class FedRA(Dense):
    contract: ClassVar = Contract(wants="blocks", clients={"metric": "params"})

    name: Literal["fedra"] = "fedra"
    scaler: Literal[False] = False
    """Not supported: all networks have full width."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return nested(task, "auto", ("D",))

    def select(self, state: State, client: Client) -> Slice:
        generator = numpy_generator(self.task.seed, "subset", client.round, client.id)
        return prefix(self.task.server, random_depth(self.net_at(client.capacity), self.task.server, generator))
