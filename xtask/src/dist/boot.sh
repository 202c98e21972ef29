# Boots a copy of a system with a systemd of its own, in namespaces of its own, and uses the packages there as docs/install.md says.
# Nothing of it reaches the system. $1 is an empty folder, $2 the root of the system, $3 the .deb, $4 the program that drives a disk as a
# guest would, $5 a folder with what a guest boots, which is /guest in the copy. The other words are the command that boots it there.
set -eu
work=$1 system=$2 deb=$3 drive=$4 guest=$5
fail() { echo "$*" >&2; exit 1; }

# The second call of this script: the new system's first process, until systemd takes over.
if [ -n "${IS_INSIDE-}" ]; then
    mount -t tmpfs tmpfs "$work"
    root=$work/root
    mkdir "$work/upper" "$work/work" "$root"
    mount -t overlay overlay -o "lowerdir=$system,upperdir=$work/upper,workdir=$work/work" "$root"
    cp "$deb" "$root/cleave.deb"
    cp "$drive" "$root/drive"
    cp -r "$guest" "$root/guest"
    # A group that the system has already would hide that the package makes none.
    sed -i '/^cleave:/d' "$root/etc/group"
    # With each package that is unpacked, an index of all pages would be made anew.
    rm -f "$root/var/lib/man-db/auto-update"
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
    # Not the services of the system.
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
trap 'exit 1' TERM INT

until_true() {
    for _ in $(seq 1200); do
        "$@" >/dev/null 2>&1 && return
        sleep 0.1
    done
    fail "after two minutes still not: $*; $(cat "$work.log"); $(inside journalctl --no-pager -n 30 2>&1 || true)"
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
# The status of the unit $1 says $2. The last lines come a moment after the end of the process, even after `journalctl --sync`.
says() {
    inside systemctl status --no-pager --full "$1" >"$work.log" || true
    grep -q "$2" "$work.log"
}
pid() { inside systemctl show --property MainPID --value "$1"; }
# Root's other sockets. A ring of a session that was taken over could connect to them.
reaches_no_socket_but_its_own() {
    for socket in /run/systemd/private /run/systemd/journal/stdout /run/victim.sock /run/victim/sock /var/lib/libvirt/qemu/victim; do
        inside test -S $socket || fail "the check of $socket checks nothing"
        ! inside nsenter --target "$(pid "$1")" --mount test -S $socket || fail "$1 reaches $socket"
    done
    inside nsenter --target "$(pid "$1")" --mount test -S /run/systemd/notify || fail "$1 does not reach systemd"
}
is_another() { [ "$(pid "$1")" != 0 ] && [ "$(pid "$1")" != "$2" ] && inside systemctl is-active "$1"; }

shift 5

inside apt-get install --yes --no-install-recommends /cleave.deb >"$work.log" 2>&1 || fail "$(cat "$work.log")"

. "${0%/*}/pages.sh"
. "${0%/*}/handover.sh"

for socket in /run/victim.sock /run/victim/sock /var/lib/libvirt/qemu/victim; do
    inside mkdir -p ${socket%/*}
    inside systemd-socket-activate --listen=$socket /bin/true >/dev/null 2>&1 &
    until_true inside test -S $socket
done

# Without its file a unit fails at once, and says which it is.
! inside systemctl start cleave@nope 2>/dev/null || fail "cleave@nope started"
until_true says cleave@nope 'DISK= in /etc/cleave/NAME.conf'
[ "$(inside systemctl show --property NRestarts --value cleave@nope)" = 0 ] || fail "cleave@nope is tried again"

# A disk as a service, which a kill -9 costs a pause.
inside truncate -s 16M /var/lib/images/a.img
inside sh -c "printf 'DISK=/var/lib/images/a.img\nOPTIONS=--serial a --stop-deadline 60\n' >/etc/cleave/a.conf"
inside systemctl enable --now cleave@a 2>/dev/null
serves /run/cleave/a/disk.sock
reaches_no_socket_but_its_own cleave@a
says cleave@a /var/lib/images/a.img || fail "its status does not name the disk"
# systemd goes on without it where it lacks the right.
[ "$(inside systemctl show --property OOMScoreAdjust --value cleave@a)" = -900 ] || fail "cleave@a may be killed for lack of memory"
! inside setpriv --reuid 65534 --regid 65534 --clear-groups cat /var/lib/images/a.img >/dev/null 2>&1 ||
    fail "every user may read the images"
inside cleave doctor --user root --socket-path /run/cleave/a/disk.sock --disk /var/lib/images/a.img >"$work.log" ||
    fail "doctor finds a problem of a disk that is served: $(cat "$work.log")"
inside truncate -s 16M /srv/a.img
! inside cleave doctor --user root --socket-path /run/cleave/a/disk.sock --disk /srv/a.img >"$work.log" ||
    fail "doctor has not seen that the unit may only read /srv: $(cat "$work.log")"
grep -q 'systemctl edit cleave@, \[Service\] ReadWritePaths=/srv$' "$work.log" || fail "doctor: $(cat "$work.log")"

# A unit that may not open its image names what lets it, before any other remedy, and so does doctor.
inside sh -c "printf 'DISK=/srv/a.img\n' >/etc/cleave/srv.conf"
! inside systemctl start cleave@srv 2>/dev/null || fail "cleave@srv started"
until_true says cleave@srv 'cleave@srv is the reason: systemctl edit cleave@srv, \[Service\] ReadWritePaths=/srv; else'
inside truncate -s 16M /var/lib/images/o.img
inside chown nobody /var/lib/images/o.img
inside sh -c "printf 'DISK=/var/lib/images/o.img\n' >/etc/cleave/o.conf"
! inside systemctl start cleave@o 2>/dev/null || fail "cleave@o started"
until_true says cleave@o 'chown root:root /var/lib/images/o.img, or systemctl edit cleave@o'
! inside cleave doctor --user root --socket-path /run/cleave/o/disk.sock --disk /var/lib/images/o.img >"$work.log" ||
    fail "doctor has not seen that cleave@o may not write: $(cat "$work.log")"
grep -q "^problem  disk .*: chown root:root '/var/lib/images/o.img', or systemctl edit cleave@o" "$work.log" || fail "doctor: $(cat "$work.log")"

reload cleave@a 1
was=$(pid cleave@a)
inside systemctl kill --signal=KILL cleave@a
until_true is_another cleave@a "$was"
serves /run/cleave/a/disk.sock

# An image that comes later, as from a network file system.
inside sh -c "printf 'DISK=/var/lib/images/late.img\n' >/etc/cleave/late.conf"
inside systemctl start --no-block cleave@late
is_tried_again() { [ "$(inside systemctl show --property NRestarts --value cleave@late)" -gt 0 ]; }
until_true is_tried_again
inside truncate -s 16M /var/lib/images/late.img
until_true inside systemctl is-active cleave@late
serves /run/cleave/late/disk.sock

# At a shutdown of the host the guests end first. This one says whether its disk is still there.
inside sh -c "printf '[Unit]\nDefaultDependencies=no\n[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\nExecStop=/bin/sh -c \"sleep 1; test -S /run/cleave/a/disk.sock && touch /tmp/in-order\"\n' >/run/systemd/system/libvirt-guests.service"
inside systemctl daemon-reload
inside systemctl start libvirt-guests
inside systemctl stop libvirt-guests cleave@a
inside test -e /tmp/in-order || fail "cleave@a was stopped before the guests"
inside systemctl start cleave@a

# Members of the group may connect, and nobody else.
gid=$(inside getent group cleave | cut -d: -f3)
as_nobody() { inside setpriv --reuid=nobody --regid=nogroup "$@" /drive --socket /run/cleave/a/disk.sock --seconds 0.1 >/dev/null 2>&1; }
as_nobody --groups="$gid" || fail "a member of the group cleave cannot connect"
! as_nobody --clear-groups || fail "somebody outside of the group cleave can connect"

# A restart hands the disk over with the connection of its frontend, and a stop ends it.
begin_drive --socket /run/cleave/a/disk.sock
restart cleave@a
end_drive cleave@a 5
begin_drive --socket /run/cleave/a/disk.sock --inflight
reload cleave@a
kill_it cleave@a
reload cleave@a
end_drive cleave@a 10 1
reload cleave@a 1
begin_drive --socket /run/cleave/a/disk.sock
stops cleave@a
! inside /drive --socket /run/cleave/a/disk.sock --seconds 0.1 2>"$work.drive" || fail "something serves the disk of a daemon that was stopped"
grep -qi 'connection refused' "$work.drive" || fail "a socket without a daemon: $(cat "$work.drive")"
inside systemctl start cleave@a
serves /run/cleave/a/disk.sock

# Socket activation.
inside systemctl stop cleave@a
inside systemctl disable --quiet cleave@a
inside systemctl enable --quiet --now cleave@a.socket
! inside systemctl is-active --quiet cleave@a || fail "cleave@a runs before anybody connected"
serves /run/cleave/a/disk.sock
inside systemctl is-active --quiet cleave@a || fail "the socket did not start cleave@a"
begin_drive --socket /run/cleave/a/disk.sock --inflight
restart cleave@a
! inside systemctl reload cleave@a 2>/dev/null || fail "a disk with a socket of systemd's was taken over"
kill_it cleave@a
restart cleave@a
end_drive cleave@a 10 1
begin_drive --socket /run/cleave/a/disk.sock --inflight
stops cleave@a
serves /run/cleave/a/disk.sock

# A node keeps its disks, and one that hangs is restarted.
inside truncate -s 16M /var/lib/images/b.img
inside systemctl enable --quiet --now cleave
inside cleave disk add d1 --disk /var/lib/images/b.img --queues 2 --stop-deadline 60 >/dev/null
serves /run/cleave/d1/disk.sock
reaches_no_socket_but_its_own cleave
inside setpriv --reuid=nobody --regid=cleave-metrics --clear-groups curl --silent --fail --unix-socket /run/cleave/metrics.sock \
    http://node/metrics | grep -q 'disk="d1"' || fail "a member of the group cleave-metrics gets no metrics"
! inside setpriv --reuid=nobody --regid=cleave --clear-groups curl --silent --unix-socket /run/cleave/metrics.sock http://node/metrics ||
    fail "a VMM reads the metrics"
inside cleave disk add d2 --disk ram:16M --socket-group 4321 >/dev/null
inside setpriv --reuid=nobody --regid=nogroup --groups=4321 \
    /drive --socket /run/cleave/d2/disk.sock --seconds 0.1 >/dev/null || fail "the group of a disk cannot connect"
# A unit of the same name would give its folder to the group cleave, or listen in its place.
inside sh -c "printf 'DISK=/var/lib/images/a.img\n' >/etc/cleave/d2.conf"
of_d2() { inside stat --format '%n %u %g %a %i' /run/cleave/d2 /run/cleave/d2/disk.sock; }
was=$(of_d2)
for unit in cleave@d2 cleave@d2.socket; do
    ! inside systemctl start $unit 2>/dev/null || fail "$unit started beside a disk of the node"
    [ "$(of_d2)" = "$was" ] || fail "$unit has changed a disk of the node: $was; now $(of_d2)"
done
inside rm /etc/cleave/d2.conf
# The driver has left, which the node may still have to notice.
until_true inside cleave disk remove d2
! inside cleave disk add d3 --disk /etc/passwd 2>/dev/null || fail "the node serves a file outside of its folders of images"
inside systemctl restart cleave
inside cleave disk list | grep -q d1 || fail "the node forgot its disk: $(inside cleave disk list)"
serves /run/cleave/d1/disk.sock
for disk in d4 d5; do
    inside truncate -s 16M /var/lib/images/$disk.img
    inside cleave disk add $disk --disk /var/lib/images/$disk.img --queues 2 --stop-deadline 60 >/dev/null
done
three="--socket /run/cleave/d1/disk.sock --socket /run/cleave/d4/disk.sock --socket /run/cleave/d5/disk.sock"
begin_drive $three --inflight --queues 2
restart cleave
kill_it cleave 3
end_drive cleave 15 3
begin_drive $three --inflight --queues 2
reload cleave
kill_it cleave 3
end_drive cleave 15 3
begin_drive $three --inflight --queues 2
stops cleave
inside systemctl start cleave
serves /run/cleave/d1/disk.sock

# A guest with a disk of each unit, whose QEMU cannot connect again.
begin_guest "$@"
restart cleave@a
restart cleave
goes_on "after 10 restarts"
reload cleave
goes_on "after 5 reloads"
kill_it cleave@a
kill_it cleave
goes_on "after 2 kills"
was=$(pid cleave@a) was_node=$(pid cleave)
inside dpkg -i /cleave.deb >"$work.log" 2>&1 || fail "$(cat "$work.log")"
# systemd may hear of the new process after the end of a reload.
until_true is_another cleave@a "$was"
until_true is_another cleave "$was_node"
goes_on "after an upgrade"
end_guest

# An upgrade restarts what runs.
begin_drive --socket /run/cleave/a/disk.sock
was=$(pid cleave@a)
inside dpkg -i /cleave.deb >"$work.log" 2>&1 || fail "$(cat "$work.log")"
until_true is_another cleave@a "$was"
end_drive cleave@a 1
begin_drive $three
was=$(pid cleave)
inside dpkg -i /cleave.deb >"$work.log" 2>&1 || fail "$(cat "$work.log")"
until_true is_another cleave "$was"
end_drive cleave 3
# Settings that the new program refuses cost nobody a disk: the old one goes on, and takes them in when they are mended.
begin_drive $three
was=$(pid cleave)
inside mkdir -p /run/systemd/system/cleave.service.d
inside sh -c "printf '[Service]\nEnvironment=OPTIONS=--no-such-option\n' >/run/systemd/system/cleave.service.d/wrong.conf"
inside cp /usr/lib/systemd/system/cleave@.service /etc/systemd/system/
inside dpkg -i /cleave.deb >"$work.log" 2>&1 || fail "$(cat "$work.log")"
inside rm /etc/systemd/system/cleave@.service
grep -q '/etc/systemd/system/cleave@.service hides the unit' "$work.log" || fail "the package says nothing of a copied unit: $(cat "$work.log")"
grep -q 'cleave: cleave.service does not run the new program' "$work.log" || fail "the package says nothing of a refused reload: $(cat "$work.log")"
! inside cleave upgrade --control /run/cleave/control.sock >"$work.log" || fail "a refused reload was no fault: $(cat "$work.log")"
grep -q -e --no-such-option "$work.log" || fail "cleave upgrade does not say why: $(cat "$work.log")"
[ "$(pid cleave)" = "$was" ] || fail "a node whose reload was refused was restarted"
inside rm /run/systemd/system/cleave.service.d/wrong.conf
inside systemctl daemon-reload
inside cleave upgrade --control /run/cleave/control.sock >"$work.log" || fail "cleave upgrade: $(cat "$work.log")"
until_true is_another cleave "$was"
end_drive cleave 3
inside mkdir -p /run/systemd/system/cleave.service.d
inside sh -c "printf '[Service]\nWatchdogSec=6s\n' >/run/systemd/system/cleave.service.d/watchdog.conf"
inside systemctl daemon-reload
inside systemctl restart cleave
# The next process gives signs of life too.
reload cleave 1
was=$(pid cleave)
inside /drive --socket /run/cleave/d1/disk.sock --seconds 7 >/dev/null
[ "$(pid cleave)" = "$was" ] || fail "systemd has killed a node that was taken over: $(inside journalctl --no-pager -n 30 -u cleave)"
inside kill -STOP "$was"
until_true is_another cleave "$was"
serves /run/cleave/d1/disk.sock
# As above.
until_true inside cleave disk remove d1

inside apt-get purge --yes cleave >"$work.log" 2>&1 || fail "$(cat "$work.log")"
! inside systemctl is-active --quiet cleave cleave@a cleave@a.socket || fail "a unit runs after the package was removed"
# cleave@nope and others had failed.
! inside systemctl list-units --state=failed --plain --no-legend 'cleave*' | grep . >&2 || fail "systemd lists units of a package that is gone"
for left in /etc/cleave /var/lib/cleave /run/cleave; do
    ! inside test -e $left || fail "$left is left after a purge"
done
! inside grep -q '^cleave' /etc/group || fail "a group is left after a purge"
inside test -e /var/lib/images/a.img || fail "a purge took an image"
echo "booted with $(inside systemctl --version | head -n 1): units served, were restarted, killed and upgraded below a guest, hung, and were removed; $pasted blocks of the pages pasted, $skipped not"
