#!/usr/bin/env bash
# Set up a node: the shared folder, a Python environment with rayfl, and environment variables for every shell.
# The cluster files call it on every node. Repeated calls have no effect.
#
#     node.sh head          workers mount the head's disk by NFS; it is deleted with the head
#     node.sh HOST:/PATH    all nodes mount this EFS or other NFS server
#     node.sh mounted       the folder is already mounted on every node
#
# RAYFL_SHARED: the folder. Default: /mnt/rayfl. Ray sets RAY_HEAD_IP only on workers. Not tested on AWS or GCP.
set -euo pipefail

storage=${1:?what all nodes see: head, HOST:/PATH or mounted}
shared=${RAYFL_SHARED:-/mnt/rayfl}
head=${RAY_HEAD_IP:-}
own=$HOME/.rayfl
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PATH="$HOME/env/bin:$HOME/.local/bin:$PATH"

fail() {
    echo "node.sh: $*" >&2
    exit 1
}

packages() {
    # a newly started machine installs its updates and holds the apt lock meanwhile
    local tries=0
    until sudo apt-get -qq update; do
        [ $((tries += 1)) -lt 60 ] || fail "apt-get update fails"
        sleep 10
    done
    sudo DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=600 install "$@" >/dev/null
}

mount_nfs() {
    local mounted
    mounted=$(findmnt -n -o SOURCE --mountpoint "$shared" || true)
    [ "$mounted" = "$1" ] && return
    # mount of a deleted head, which no longer responds
    [ -z "$mounted" ] || sudo umount -fl "$shared"
    [ -x /sbin/mount.nfs4 ] || packages nfs-common
    sudo mkdir -p "$shared"
    sudo mount -t nfs4 -o "nfsvers=4.1,hard,timeo=600,retrans=2$2" "$1" "$shared"
}

export_nfs() {
    command -v exportfs >/dev/null || [ -x /usr/sbin/exportfs ] || packages nfs-kernel-server
    sudo mkdir -p "$shared" /etc/exports.d
    sudo chown "$(id -u):$(id -g)" "$shared"
    # private networks; on AWS, the cluster's security group restricts access
    local options="(rw,no_subtree_check)"
    echo "$shared 10.0.0.0/8$options 172.16.0.0/12$options 192.168.0.0/16$options" |
        sudo tee /etc/exports.d/rayfl.exports >/dev/null
    sudo exportfs -ra
}

share() {
    case $storage in
    head) if [ -n "$head" ]; then mount_nfs "$head:$shared" ""; else export_nfs; fi ;;
    *:/*)
        mount_nfs "$storage" ,noresvport
        [ -w "$shared" ] || sudo chown "$(id -u):$(id -g)" "$shared"
        ;;
    mounted)
        [ -d "$shared" ] || fail "$shared: no such folder; mount one that all nodes see, or name it by RAYFL_SHARED"
        ;;
    *) fail "$storage is not valid. Allowed: head, HOST:/PATH, mounted" ;;
    esac
    [ -w "$shared" ] || fail "$shared: $(id -un) may not write there; change its owner or mode"
}

install() {
    command -v uv >/dev/null || curl -LsSf https://astral.sh/uv/install.sh | UV_NO_MODIFY_PATH=1 sh
    # workers install the head's versions: Ray requires equal versions, and newer ones may have been released since
    local same=$shared/nodes python=3.12 versions=()
    if [ -n "$head" ]; then
        [ -s "$same/versions.txt" ] || fail "$same/versions.txt: the head has not written it; is $shared the head's?"
        python=$(cat "$same/python.txt")
        versions=(--constraints "$same/versions.txt")
    fi
    [ -x ~/env/bin/python ] || uv venv --quiet --python "$python" ~/env
    uv pip install --quiet --python ~/env --compile-bytecode "${versions[@]}" --editable "${here}[aws]" "mlflow[auth]"
    if [ -z "$head" ]; then
        mkdir -p "$same"
        ~/env/bin/python -c 'import platform; print(platform.python_version())' >"$same/python.txt"
        uv pip freeze --quiet --python ~/env --exclude-editable >"$same/versions.txt"
    fi
}

environment() {
    mkdir -p "$own"
    chmod 700 "$own"
    {
        # nested shells would add it twice
        echo "case :\$PATH: in *:$HOME/env/bin:*) ;; *) export PATH=$HOME/env/bin:$HOME/.local/bin:\$PATH ;; esac"
        echo "export RAY_AUTH_MODE=token RAY_ENABLE_UV_RUN_RUNTIME_ENV=0"
        echo "export RAYFL_SHARED=$shared RAYFL_OUTPUT=$shared/runs"
        [ -n "$head" ] || echo "export RAY_ADDRESS=auto MLFLOW_TRACKING_URI=http://127.0.0.1:5000"
    } >"$own/env.sh"
    # at the top: Ubuntu's .bashrc returns early in non-interactive shells
    local line=". $own/env.sh" all
    all=$(cat ~/.bashrc 2>/dev/null || true)
    grep -qxF "$line" <<<"$all" || printf '%s\n%s\n' "$line" "$all" >~/.bashrc
}

share
install
environment
