# Reads the image for containers with umoci and runs it with runc, which are not ours. $1 is an empty folder, $2 the image, $3 the
# version, $4 the program that drives a disk as a guest would, $5 the folder of the manifests for Kubernetes.
set -eu
work=$1 image=$(realpath "$2") version=$3 drive=$4 manifests=$5
here=${0%/*} outside=
PATH=$PATH:/usr/sbin:/sbin
fail() { echo "$*" >&2; exit 1; }
name=cleave-check-$$
end() {
    runc delete --force "$name" >/dev/null 2>&1 || true
    [ -z "$outside" ] || kill $outside 2>/dev/null || true
}
trap end EXIT
trap 'exit 1' TERM INT
until_true() {
    for _ in $(seq 2400); do
        "$@" >/dev/null 2>&1 && return
        sleep 0.05
    done
    fail "after two minutes still not: $*; $(cat log)"
}

grep -q "image: localhost/cleave:$version\$" "$manifests/daemonset.yaml" || fail "the DaemonSet is of another version"
# The path of a socket may not be long.
cd "$work"
mkdir layout host
tar -C layout -xf "$image"
umoci unpack --image "layout:$version" bundle >log 2>&1 || fail "$(cat log)"
programs=$(cd bundle/rootfs && find . -type f -perm /111 ! -path './lib*')
[ "$programs" = ./usr/bin/cleave ] || fail "the image has other programs: $programs"

# Starts a container with these arguments of the program, or with the DaemonSet's.
begin() {
    cp bundle/config.json config.json
    /usr/bin/python3 "$here/pod.py" bundle "$manifests" host "$@"
    runc run --detach --bundle bundle --pid-file pid "$name" </dev/null >log 2>&1 || fail "$(cat log)"
    mv config.json bundle/config.json
    pid=$(cat pid)
}
finish() {
    runc kill "$name" TERM
    until_true ends
    runc delete "$name"
}
ends() { [ "$(runc state "$name" | grep -c '"status": "stopped"')" = 1 ]; }
# Writes the disk from end to end, and compares what it reads.
serves() { "$drive" --socket "$1" --seconds 0.1 --mix 50 --verify >/dev/null || fail "$1 does not serve: $(cat log)"; }
status() { sed -n "s/^$1:[[:space:]]*//p" "/proc/$pid/status"; }
cap_chown=$((1 << 0)) cap_ipc_lock=$((1 << 14))
# $1: the capabilities that it may have.
is_confined() {
    # One is the runtime's.
    [ "$(status Seccomp_filters)" -ge 2 ] || fail "the daemon has $(status Seccomp_filters) filters of system calls"
    [ "$(status NoNewPrivs)" = 1 ] || fail "the daemon may get new privileges"
    [ "$(($(status CapEff | sed 's/^/0x/') & ~$1))" = 0 ] || fail "the daemon has the capabilities $(status CapEff)"
}

run=host/run/cleave
begin serve --socket-path /run/cleave/disk.sock --disk ram:4M
until_true test -S "$run/disk.sock"
serves "$run/disk.sock"
is_confined $cap_ipc_lock
finish
# The kernel may lack some of the confinement. A container may not lack more.
missing() { sed -n 's/.*not all is confined/not all is confined/p' log; }
in_container=$(missing)
bundle/rootfs/usr/bin/cleave serve --socket-path disk.sock --disk ram:4M >log 2>&1 &
outside=$!
until_true test -S disk.sock
serves disk.sock
kill $outside
wait $outside || true
outside=
[ "$in_container" = "$(missing)" ] || fail "in a container $in_container; outside $(missing)"

mkdir -p host/var/lib/images
truncate -s 4M host/var/lib/images/a.img
begin
inside() { runc exec "$name" cleave "$@"; }
until_true inside disk list
inside disk add a --disk /var/lib/images/a.img --socket-group 107 >/dev/null
[ "$(stat -c %g "$run/a/disk.sock")" = 107 ] || fail "the socket is not of the group of the disk"
serves "$run/a/disk.sock"
is_confined $((cap_chown | cap_ipc_lock))
curl --silent --fail --unix-socket host/metrics/metrics.sock http://node/metrics | grep -q 'disk="a"' || fail "there are no metrics"
finish
begin
until_true test -S "$run/a/disk.sock"
is_served() { inside disk list | grep -q serving; }
until_true is_served
serves "$run/a/disk.sock"
finish
echo "umoci unpacked it, and runc ran serve and the node of the DaemonSet"
