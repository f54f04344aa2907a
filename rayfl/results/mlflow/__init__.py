"""MLflow: a copy of the run folders. It may lag behind, and runs never wait for it.

    store.py    connection to a tracking server, with timeouts
    sent.py     record of the copy in a run's folder
    study.py    contents of a sweep's run: pure functions of its folder
    copy.py     sending of run folders
    models.py   submodels as MLflow models
    sender.py   thread that sends during runs
    system.py   optional measurements of the machine
    reading.py  rows from a server

Everything is read from disk (`results/folder.py`), so it can be sent again at any time by any process: runs are found
by their tag `rayfl.run_id`, and times of metrics follow from their lines, so MLflow ignores duplicates.

An MLflow experiment is a study: a sweep or a run. A sweep is a run with its trials as children. Next to it, not below
it, is a run for each row with the means over the seeds of the row's best point, because MLflow's charts of an
experiment do not show children. A run's result is a tag, because a metric would become a chart of one point. Of the
checkpoints only the last one is sent, without client states: these can be as large as a network per client, so they
stay in the run's folder, which the tag `rayfl.client_states` names.
"""

from rayfl.results.mlflow.copy import Copy as Copy
from rayfl.results.mlflow.reading import Reader as Reader
from rayfl.results.mlflow.sender import Sender as Sender
from rayfl.results.mlflow.sender import unsent as unsent
from rayfl.results.mlflow.store import Store as Store
from rayfl.results.mlflow.store import default_uri as default_uri
