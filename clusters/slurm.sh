#!/bin/bash
# Run a sweep on the exclusive nodes of a Slurm job. From the repository's root, after `uv sync`:
#
#     sbatch clusters/slurm.sh tune_configs/quickstart.yaml --rounds 10
#
# Two minutes before the job's time limit, the sweep writes a checkpoint and the job is requeued. The same command
# resumes an existing sweep. Not tested under Slurm, only with substitutes for Slurm's commands.
#
# RAYFL_OUTPUT is a shared folder, such as your home; the token ~/.ray/auth_token must be readable on all nodes too.
# MLFLOW_TRACKING_URI is your MLflow server. Default: a database in RAYFL_OUTPUT.
#SBATCH --job-name=rayfl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# not TERM, which a cancelled job receives: such a job must not be requeued
#SBATCH --signal=B:USR1@120
set -euo pipefail
: "${1:?CONFIG is missing. Allowed: sbatch clusters/slurm.sh CONFIG [OPTIONS of rayfl sweep]}"
for word in "${@:2}"; do
  case "$word" in --name | --name=* | --output | --output=* | --address | --address=* | --cluster | --cluster=*)
    echo "slurm.sh: ${word%%=*} is set by this script. Allowed: RAYFL_OUTPUT, and a copy of CONFIG for another name" >&2
    exit 2
    ;;
  esac
done

export PATH="$PWD/.venv/bin:$PATH"
export RAY_AUTH_MODE=token RAY_ENABLE_UV_RUN_RUNTIME_ENV=0
export RAYFL_OUTPUT="${RAYFL_OUTPUT:-${SCRATCH:-$PWD}/runs}"
# short, because a socket path has at most 107 bytes
export RAY_TMPDIR="/tmp/r$SLURM_JOB_ID"
# seconds to wait for all nodes; Ray's default, 30, is too short on a slow shared file system
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
ray get-auth-token --generate > /dev/null

nodes=(--nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES")
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
name="$(basename "$1" .yaml)"
sweep=("$@" --name "$name" --output "$RAYFL_OUTPUT" --address auto)
if [ -e "$RAYFL_OUTPUT/$name/run.json" ]; then sweep+=(--resume); fi

# this script runs on the head, so it can signal only the sweep: Ray must run until the checkpoint is written
pid="$RAY_TMPDIR.pid" ended="$RAY_TMPDIR.ended" warned=
rm -f "$pid" "$ended"
# before the sweep starts, this ends Ray's start instead; both may have ended already
trap 'warned=yes; kill -TERM "$(cat "$pid")" 2> /dev/null || kill -TERM "$step" || true' USR1

# shellcheck disable=SC2016
run='python -u scripts/sweep.py "${@:3}" & echo $! > "$1"; code=0; wait $! || code=$?; echo $code > "$2"; exit $code'
srun "${nodes[@]}" --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  ray symmetric-run --address "${hosts[0]}:6379" --min-nodes "$SLURM_NNODES" --num-cpus "$SLURM_CPUS_PER_TASK" -- \
  bash -c "$run" sweep "$pid" "$ended" "${sweep[@]}" &
step=$!

# other nodes notice only after a minute that the head has stopped, and the job may not have that minute
while [ ! -s "$ended" ] && kill -0 "$step" 2> /dev/null; do sleep 1; done
code=143
if [ -s "$ended" ]; then
  code="$(cat "$ended")"
elif [ -z "$warned" ]; then
  # Ray did not start
  wait "$step" && code=1 || code=$?
fi
if [ "$warned" ] && { [ "$code" -eq 143 ] || [ "$code" -eq 130 ]; }; then
  scontrol requeue "$SLURM_JOB_ID"
else
  wait "$step" || true
  srun "${nodes[@]}" rm -rf "$RAY_TMPDIR" "$pid" "$ended" || true
fi
exit "$code"
