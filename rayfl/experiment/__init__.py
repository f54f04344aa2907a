"""The configuration of one federated run."""

from rayfl.experiment.base import DEFAULTS as DEFAULTS
from rayfl.experiment.base import NAMED as NAMED
from rayfl.experiment.base import Experiment as Experiment
from rayfl.experiment.base import Resources as Resources
from rayfl.experiment.base import read_experiment as read_experiment
from rayfl.experiment.base import unchecked as unchecked
from rayfl.experiment.files import blamed as blamed
from rayfl.experiment.files import lay_over as lay_over
from rayfl.experiment.files import load_experiment as load_experiment
from rayfl.experiment.files import opened as opened
from rayfl.experiment.files import overlaid as overlaid
from rayfl.experiment.files import with_settings as with_settings
