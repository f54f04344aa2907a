"""MLflow: a copy of the run folders, which may lag and is never what a run waits for.

    store.py    a tracking server, and how long it is waited for
    sent.py     what a run's folder remembers of its copy
    study.py    what people see of a sweep: pure functions of its folder
    copy.py     sends run folders
    models.py   submodels as MLflow's models
    sender.py   the thread that sends while runs go on
    system.py   what the machine does meanwhile, if it is asked for
    reading.py  rows back from a server

Everything is read from disk (`results/folder.py`), so it can be sent again at any time and from any process: a run is
found again by its tag `rayfl.run_id`, and the time of a metric follows from its line, so that MLflow ignores one that
it has.

An experiment is a study: a sweep, or a run. A sweep is a run whose children are its trials; beside it stands a run for
each of its rows, with the means over the seeds of the row's best point: MLflow's charts of the experiment show those
at once, and no children. A run's result is a tag, because a metric would be a chart of one point. Of the
checkpoints MLflow gets the last one, without what clients keep: that can be a network a client, so it stays in the
run's folder alone, and the tag `rayfl.client_states` says where.
"""

from rayfl.results.mlflow.copy import Copy as Copy
from rayfl.results.mlflow.reading import Reader as Reader
from rayfl.results.mlflow.sender import Sender as Sender
from rayfl.results.mlflow.sender import unsent as unsent
from rayfl.results.mlflow.store import Store as Store
from rayfl.results.mlflow.store import default_uri as default_uri
