# Boots a copy of this system with a systemd of its own, in namespaces of its own, and uses the packages there as docs/install.md says.
# Nothing of it reaches the system. $1 is an empty folder, $2 the .deb, $3 the program that drives a disk as a guest would.
set -eu
work=$1 deb=$2 drive=$3
fail() { echo "$*" >&2; exit 1; }

# The second call of this script: the new system's first process, until systemd takes over.
if [ -n "${IS_INSIDE-}" ]; then
    mount -t tmpfs tmpfs "$work"
    root=$work/root
    mkdir "$work/upper" "$work/work" "$root"
    mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$root"
    cp "$deb" "$root/cleave.deb"
    cp "$drive" "$root/drive"
    # A group that this system has already would hide that the package makes none.
    sed -i '/^cleave:/d' "$root/etc/group"
    mount -t proc proc "$root/proc"
    mount -t sysfs sysfs "$root/sys"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
    for folder in dev run tmp; do mount -t tmpfs tmpfs "$root/$folder"; done
    for device in null zero full random urandom tty; do
        touch "$root/dev/$device"
        mount --bind "/dev/$device" "$root/dev/$device"
    done
    mkdir "$root/dev/shm"
    ln -s /proc/self/fd "$root/dev/fd"
    cd "$root"
    mkdir -p mnt
    pivot_root . mnt
    umount -l /mnt
    # Not the services of this system.
    exec env -i container=cleave PATH=/usr/sbin:/usr/bin:/sbin:/bin \
        /lib/systemd/systemd --unit=basic.target --log-target=console --show-status=0 </dev/null
fi

groups=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)
[ -n "$groups" ] || fail "no cgroup2 is mounted, which systemd needs"
group=$groups/cleave-check-$$
mkdir "$group"
sh -c 'echo $$ >"$0/cgroup.procs"; IS_INSIDE=1 exec unshare --mount --pid --fork --cgroup --uts --ipc --net --kill-child sh "$@"' \
    "$group" "$0" "$@" >"$work.log" 2>&1 &
outer=$!
end() {
    kill -KILL $outer 2>/dev/null || true
    wait $outer 2>/dev/null || true
    # Its processes are gone a moment later.
    for _ in $(seq 50); do
        find "$group" -depth -type d -exec rmdir {} + 2>/dev/null && break
        sleep 0.1
    done
}
trap end EXIT

until_true() {
    for _ in $(seq 200); do
        "$@" >/dev/null 2>&1 && return
        sleep 0.1
    done
    fail "after 20 s still not: $*; $(cat "$work.log"); $(inside journalctl --no-pager -n 30 2>&1 || true)"
}
first() { init=$(cat "/proc/$outer/task/$outer/children") && init=${init% } && [ -n "$init" ]; }
until_true first
inside() {
    nsenter --target "$init" --all --root --wd env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 \
        DEBIAN_FRONTEND=noninteractive "$@"
}
until_true inside systemctl is-active basic.target
# Writes the disk from end to end, and compares what it reads.
serves() { inside /drive --socket "$1" --seconds 0.3 --mix 50 --verify >/dev/null || fail "$1 does not serve: $(inside systemctl status --no-pager 'cleave*')"; }
pid() { inside systemctl show --property MainPID --value "$1"; }
is_another() { [ "$(pid "$1")" != 0 ] && [ "$(pid "$1")" != "$2" ] && inside systemctl is-active "$1"; }

inside apt-get install --yes --no-install-recommends /cleave.deb >"$work.log" 2>&1 || fail "$(cat "$work.log")"

# A disk as a service, which a kill -9 costs a pause.
inside mkdir -p /var/lib/images
inside truncate -s 16M /var/lib/images/a.img
inside sh -c "printf 'DISK=/var/lib/images/a.img\nOPTIONS=--serial a\n' >/etc/cleave/a.conf"
inside systemctl enable --now cleave@a 2>/dev/null
serves /run/cleave/a/disk.sock
inside systemctl status --no-pager cleave@a | grep -q /var/lib/images/a.img || fail "its status does not name the disk"
inside systemctl reload cleave@a
was=$(pid cleave@a)
inside systemctl kill --signal=KILL cleave@a
until_true is_another cleave@a "$was"
serves /run/cleave/a/disk.sock

# Members of the group may connect, and nobody else.
gid=$(inside getent group cleave | cut -d: -f3)
as_nobody() { inside setpriv --reuid=nobody --regid=nogroup "$@" /drive --socket /run/cleave/a/disk.sock --seconds 0.1 >/dev/null 2>&1; }
as_nobody --groups="$gid" || fail "a member of the group cleave cannot connect"
! as_nobody --clear-groups || fail "somebody outside of the group cleave can connect"

# Socket activation.
inside systemctl stop cleave@a
inside systemctl disable --quiet cleave@a
inside systemctl enable --quiet --now cleave@a.socket
! inside systemctl is-active --quiet cleave@a || fail "cleave@a runs before anybody connected"
serves /run/cleave/a/disk.sock
inside systemctl is-active --quiet cleave@a || fail "the socket did not start cleave@a"

# A node keeps its disks, and one that hangs is restarted.
inside truncate -s 16M /var/lib/images/b.img
inside systemctl enable --quiet --now cleave
inside cleave disk add d1 --disk /var/lib/images/b.img --queues 2 >/dev/null
serves /run/cleave/d1/disk.sock
inside systemctl restart cleave
inside cleave disk list | grep -q d1 || fail "the node forgot its disk: $(inside cleave disk list)"
serves /run/cleave/d1/disk.sock
inside mkdir -p /run/systemd/system/cleave.service.d
inside sh -c "printf '[Service]\nWatchdogSec=1s\n' >/run/systemd/system/cleave.service.d/watchdog.conf"
inside systemctl daemon-reload
inside systemctl restart cleave
was=$(pid cleave)
inside kill -STOP "$was"
until_true is_another cleave "$was"
serves /run/cleave/d1/disk.sock
inside cleave disk remove d1 >/dev/null

inside apt-get purge --yes cleave >"$work.log" 2>&1 || fail "$(cat "$work.log")"
! inside systemctl is-active --quiet cleave cleave@a cleave@a.socket || fail "a unit runs after the package was removed"
echo "booted with $(inside systemctl --version | head -n 1): units served, were killed, hung, and were removed"
