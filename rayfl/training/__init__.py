"""A client's work: settings, steps, distillation, and what is done to its update on the way to the server."""

from rayfl.training.settings import Loss as Loss
from rayfl.training.settings import Training as Training
from rayfl.training.transforms import Transform as Transform
