"""Fed-SB: between two frozen factors a client trains a square core, whose mean is exact.

Paper: Singhal, Ponkshe, Vepakomma, "Fed-SB: A Silver Bullet for Extreme Communication Efficiency and Performance in
(Private) Federated LoRA Fine-Tuning", 2025, https://arxiv.org/abs/2502.15436.

Symbols: as in `base`; a layer is W0 x + s B M A x, with M [r, r].

    A, B           frozen; their rows and columns are orthonormal
    M_k            steps from M
    M  <-  sum_k w_k M_k;   P* = s B M A, exactly, where all ranks are equal
    down and up    r_k^2 a layer, whatever in and out are

`start: gradient`: round 0 trains nothing. Every client of the cohort sends G_k, the gradient of its loss by W0 over
`batches` batches, cut to its first R singular directions; the server takes U S V^T of sum_k w_k G_k, and

    A  <-  V[:, :R]^T,   B  <-  U[:, :R],   M  <-  - eta S[:R] / s

which is the first step of full fine-tuning at the rate eta, as far as rank R reaches.

    >>> from rayfl.methods import METHODS
    >>> METHODS["fedsb"]().trains(1)
    ('M',)

Departures:
1. In the code the gradient is one client's, before the first round, and M = S. Here it is the cohort's, and costs a
   round in which G_k comes up and A and B go down; -eta / s makes M a step downhill.
2. `start: seed`: A and B are random with orthonormal rows and columns, and M is 0. The paper says that the gradient is
   better.
3. The paper has one rank. A client of rank r trains the first r rows and columns of M; every entry is averaged over
   those who hold it.
"""
