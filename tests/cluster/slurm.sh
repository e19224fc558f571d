#!/usr/bin/env bash
# A Slurm of one node on loopback, whole in one folder: `slurm.sh up DIR` starts it, `slurm.sh down DIR` stops it.
# Then SLURM_CONF=DIR/slurm.conf makes sbatch and the others talk to it. Needs root on Debian; nothing outside DIR but
# the installed packages changes. Accounting is on, since submitit learns from sacct that a killed job has ended.
set -euo pipefail
command=${1:?up or down} dir=$(realpath -m "${2:?a folder}")
host=$(hostname -s)
export SLURM_CONF=$dir/slurm.conf

refuse() { echo "make test-cluster: $*" >&2; exit 1; }

install_packages() {
  [ -f /etc/debian_version ] || refuse "installs Debian's slurm-wlm: run it on Debian, or set up your own cluster (docs/cluster.md)"
  [ "$(id -u)" = 0 ] || refuse "starts daemons that need root: run it as root, for instance in a container"
  local package missing=()
  for package in slurm-wlm slurmdbd munge mariadb-server; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing+=("$package")
  done
  [ ${#missing[@]} = 0 ] && return
  echo "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q >/dev/null
  apt-get install -q -y --no-install-recommends "${missing[@]}" >/dev/null
}

write_configs() {
  cat > "$dir/slurm.conf" <<END
ClusterName=loopback
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
SlurmctldPort=16817
SlurmdPort=16818
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
# No cgroups, so that a container can run it.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=16819
AccountingStoragePass=$dir/munge.socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
NodeName=node1 NodeHostname=$host NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=$(($(getconf _PHYS_PAGES) * ($(getconf PAGESIZE) / 1024) / 1024)) State=UNKNOWN
PartitionName=main Nodes=node1 Default=YES MaxTime=60 State=UP
END
  cat > "$dir/slurmdbd.conf" <<END
DbdHost=$host
DbdAddr=127.0.0.1
DbdPort=16819
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
PidFile=$dir/slurmdbd.pid
LogFile=$dir/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=13306
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
END
  chmod 600 "$dir/slurmdbd.conf"
}

# wait_for SECONDS WHAT COMMAND...: until the command succeeds.
wait_for() {
  local seconds=$1 what=$2 end=$((SECONDS + $1))
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$end" ] || refuse "no $what after $seconds seconds: see the logs in $dir"
    sleep 0.5
  done
}

start_database() {
  mariadb-install-db --no-defaults --user=mysql --datadir="$dir/mysql" --auth-root-authentication-method=normal >/dev/null
  mariadbd --no-defaults --user=mysql --datadir="$dir/mysql" --socket="$dir/mysql/socket" --pid-file="$dir/mysql/pid" \
    --bind-address=127.0.0.1 --port=13306 --innodb-use-native-aio=0 --log-error="$dir/mysql/log" >/dev/null 2>&1 &
  wait_for 60 database mariadb-admin --no-defaults --socket="$dir/mysql/socket" ping
  mariadb --no-defaults --socket="$dir/mysql/socket" -e \
    "create database slurm; create user slurm@'127.0.0.1' identified by 'slurm'; grant all on slurm.* to slurm@'127.0.0.1'"
}

is_idle() { [ "$(sinfo -h -o %T)" = idle ]; }

up() {
  install_packages
  mkdir -p "$dir"/{state,spool,mysql}
  chmod 755 "$dir"
  chown mysql "$dir/mysql"
  write_configs
  head -c 1024 /dev/urandom > "$dir/munge.key"
  chmod 400 "$dir/munge.key"
  munged --socket="$dir/munge.socket" --key-file="$dir/munge.key" --pid-file="$dir/munged.pid" \
    --log-file="$dir/munged.log" --seed-file="$dir/munged.seed"
  start_database
  slurmdbd
  wait_for 60 "accounting" sacctmgr -n show cluster
  sacctmgr -i add cluster loopback >/dev/null
  slurmctld
  slurmd
  wait_for 60 "idle node" is_idle
}

down() {
  local file process
  for file in "$dir"/{slurmd,slurmctld,slurmdbd}.pid "$dir"/mysql/pid "$dir"/munged.pid; do
    process=$(cat "$file" 2>/dev/null) && kill "$process" 2>/dev/null || continue
    wait_for 60 "end of process $process" has_ended "$process"
  done
}

# A container's first process may leave those that ended as zombies.
has_ended() { [[ "$(ps -o stat= -p "$1")" =~ ^(Z.*)?$ ]]; }

"$command"
