#!/usr/bin/env bash
# Start the cluster's MLflow server on the head if it is not running: http://127.0.0.1:5000, user admin.
#
# Secrets are created at the first start. They are stored in files that only the user can read, never in command lines.
# - MLFLOW_BACKEND: database. Default: sqlite on the head's disk, deleted with it. sqlite does not work on NFS.
# - MLFLOW_ARTIFACTS: folder or s3://BUCKET/PATH. Default: the shared folder.
# Set them before the command in the cluster's file, or, if they contain a password, as a line of ~/.rayfl/mlflow.env on
# the head. A running server reads new values after `kill $(cat ~/.rayfl/mlflow.pid)`.
set -euo pipefail
umask 077

own=$HOME/.rayfl
# shellcheck source=/dev/null
. "$own/env.sh"
mkdir -p "$own" ~/.mlflow

answers() { curl -sf -o /dev/null http://127.0.0.1:5000/health; }

if ! grep -qs ^MLFLOW_AUTH_ADMIN_PASSWORD= "$own/mlflow.env"; then
    password=$(openssl rand -hex 24)
    {
        echo "MLFLOW_AUTH_ADMIN_PASSWORD=$password"
        echo "MLFLOW_FLASK_SERVER_SECRET_KEY=$(openssl rand -hex 32)"
    } >>"$own/mlflow.env"
    {
        echo "[mlflow]"
        echo "mlflow_tracking_username = admin"
        echo "mlflow_tracking_password = $password"
    } >~/.mlflow/credentials
    chmod 600 "$own/mlflow.env" ~/.mlflow/credentials
fi

if answers; then exit; fi

set -a
# shellcheck source=/dev/null
. "$own/mlflow.env"
set +a
export MLFLOW_BACKEND_STORE_URI=${MLFLOW_BACKEND:-sqlite:///$own/mlflow.db}
export MLFLOW_ARTIFACTS_DESTINATION=${MLFLOW_ARTIFACTS:-$RAYFL_SHARED/mlflow}
export MLFLOW_AUTH_CONFIG_PATH=$own/mlflow.ini
cat >"$own/mlflow.ini" <<END
[mlflow]
default_permission = READ
database_uri = sqlite:///$own/mlflow_users.db
admin_username = admin
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
END
case $MLFLOW_BACKEND_STORE_URI in
postgresql*) uv pip install --quiet --python ~/env psycopg2-binary ;;
esac

# one process: uvicorn kills workers that respond late on a busy head. MLflow's jobs are not used.
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false
setsid nohup mlflow server --host 127.0.0.1 --port 5000 --workers 1 --app-name basic-auth \
    >"$own/mlflow.log" 2>&1 </dev/null &
echo $! >"$own/mlflow.pid"
for _ in $(seq 300); do
    if answers; then exit; fi
    kill -0 $! 2>/dev/null || break
    sleep 1
done
echo "head.sh: MLflow did not start; the end of $own/mlflow.log:" >&2
tail -n 20 "$own/mlflow.log" >&2
exit 1
