"""FedPer: the base layers are averaged, and every client keeps its own personalisation layers.

Paper: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", 2019,
https://arxiv.org/abs/1912.00818. Its text could not be read for this file: the algorithm is the one of its abstract, of
the option `--alg fedper` of FedRep's code (lgcollins/FedRep, main_fedrep.py), of FedBABU's code (jhoon-oh/FedBABU,
main_fed.py: update full, aggregate body), and of TsingZ0/PFLlib (clientper.py), which agree but for the weights.

Symbols: $B$ the base layers, $P_k$ client $k$'s personalisation layers, $n_k$ its number of samples.

    $(B_k, P_k)$   SGD from $(B, P_k)$ on client $k$'s data, all layers together
    $B$            $<- (sum_k n_k B_k)/(sum_k n_k)$ over the cohort

Cost per round: $B$ down and up, the start of $P_k$ down once per client; the client's training; one sum on the server.

Departures:
1. All P_k start equal, as in the three codes.
2. A client is evaluated with the server's B and its last P_k, before it trains, as in PFLlib. FedRep's code trains all
   clients once more after the last round.
3. The network of the server has the P that all clients start from, which is never trained.
4. Running statistics of batch norms do not exist in training: they are collected before an evaluation
   (`evaluation.statistics`). FedRep's networks have no norms; FedBABU's code averages the statistics.
5. PFLlib weights clients by samples, as here. FedBABU's code does not, and FedRep's only for FEMNIST and Sent140; their
   mean is `weight: uniform`.
6. `size: own` is ours: a personal head on a narrow network. B is a holder mean over submodels, and P_k has the inputs
   of the client's network, so its capacity is fixed.
"""

from typing import ClassVar, Literal

from rayfl.methods.contract import Contract
from rayfl.methods.personal.base import PersonalLayers


class FedPer(PersonalLayers):
    contract: ClassVar = Contract(fedavg=None, traffic=lambda whole, head: (whole, whole - head))

    name: Literal["fedper"] = "fedper"
    weight: Literal["samples", "uniform"] = "samples"
