"""Local training of clients: settings, steps, distillation, and transforms of updates."""

from rayfl.training.settings import Loss as Loss
from rayfl.training.settings import Training as Training
from rayfl.training.transforms import Transform as Transform
