# In a mount namespace of its own, in the folder of the packages: installs the .deb over a copy of a system and checks it.
# $1 is an empty folder, $2 the root of the system, $3 the version.
set -eu
work=$1 system=$2 version=$3
deb=$(echo cleave_"$version"-*.deb) lab=$(echo cleave-lab_"$version"-*.deb)
mount -t tmpfs tmpfs "$work"
root=$work/root
mkdir "$work/upper" "$work/work" "$root"
mount -t overlay overlay -o "lowerdir=$system,upperdir=$work/upper,workdir=$work/work" "$root"
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
cp "$deb" "$root/tmp/cleave.deb"
cp "$lab" "$root/tmp/lab.deb"
in_root() { chroot "$root" env PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 "$@"; }
# A group that the system has already would hide that the package makes none.
sed -i '/^cleave:/d' "$root/etc/group"
# The pages are read below; an index of all that there are takes longer.
rm -f "$root/var/lib/man-db/auto-update"
fail() { echo "$*" >&2; exit 1; }

# It takes as long as all the rest.
lintian --allow-root --fail-on error,warning "$deb" "$lab" >"$work/lintian.log" 2>&1 &
lintian=$!

# Small systems leave out pages and documents.
in_root dpkg --path-include='/usr/share/*' -i /tmp/cleave.deb >"$work/dpkg.log" 2>&1 || fail "$(cat "$work/dpkg.log")"
[ "$(in_root cleave --version)" = "cleave $version" ] || fail "cleave --version says $(in_root cleave --version)"
in_root getent group cleave >/dev/null || fail "there is no group cleave"
[ "$(in_root stat -c '%a %G' /run/cleave)" = "2755 cleave" ] || fail "/run/cleave: $(in_root stat -c '%a %G' /run/cleave)"
in_root cleave doctor --user root | grep -q '^OK  *group' || fail "$(in_root cleave doctor --user root)"

in_root dpkg --path-include='/usr/share/*' -i /tmp/lab.deb >"$work/dpkg.log" 2>&1 || fail "$(cat "$work/dpkg.log")"

pages=0
for page in "$root"/usr/share/man/man1/cleave*.1.gz; do
    said=$(in_root man --warnings=all -E UTF-8 -l "${page#"$root"}" 2>&1 >"$work/page")
    [ -z "$said" ] || fail "$page: $said"
    grep -q '^NAME' "$work/page" || fail "$page is empty"
    for named in $(grep -o 'docs/[a-z-]*\.md' "$work/page"); do
        [ -e "$root/usr/share/doc/cleave/${named#docs/}" ] || fail "$page: there is no $named"
    done
    for named in $(grep -o '/usr/share/doc/cleave/[A-Za-z/.-]*' "$work/page"); do
        # The packages of the tests have no HTML.
        case $named in */html/*) [ -d "$root/usr/share/doc/cleave/html" ] || continue ;; esac
        [ -e "$root$named" ] || fail "$page: there is no $named"
    done
    pages=$((pages + 1))
done
[ "$pages" -gt 8 ] || fail "only $pages man pages"
in_root bash -n /usr/share/bash-completion/completions/cleave

said=$(in_root systemd-analyze verify --man=no cleave.service cleave@a.service cleave@a.socket 2>&1 | grep -i cleave || true)
[ -z "$said" ] || fail "systemd-analyze verify: $said"
# Tenths of the exposure.
for unit in cleave.service cleave@.service; do
    score=$(in_root systemd-analyze security --offline=yes --threshold=20 --no-pager $unit) || fail "$score"
done

mount -t sysfs sysfs "$root/sys"
said=$(in_root cleave-lab check)
echo "$said" | grep -q "^good  *cleave  *cleave $version" || fail "cleave-lab check: $said"
# An empty disk may be written to, one that holds something or is mounted may not.
truncate -s 8M "$work/disk"
loop=$(losetup --find --show "$work/disk")
trap 'losetup --detach "$loop"' EXIT
writes() { in_root cleave-lab check --disk "$loop" "$@" | sed -n 's/^\([a-z]*\)  *writes  */\1: /p'; }
expect() { case $1 in $2) ;; *) fail "cleave-lab check: $1, and not $2" ;; esac; }
expect "$(writes)" "poor: not allowed*"
expect "$(writes --destructive)" "good: *"
mkfs.ext4 -q "$loop"
expect "$(writes --destructive)" "missing: *it holds ext4*"
expect "$(writes --overwrite "$loop")" "good: *"
mkdir "$work/mounted" "$root/tmp/mounted"
# What is mounted outside of the root is not in the list that the program reads.
for place in "$work/mounted" "$root/tmp/mounted"; do
    mount "$loop" "$place"
    case $place in "$root"/*) said="mounted on" ;; *) said="the kernel says that it is in use" ;; esac
    expect "$(writes --overwrite "$loop")" "missing: *$said*"
    umount "$place"
done
in_root cleave-lab run --smoke --out /tmp/out polling >"$work/lab.log" 2>&1 || fail "$(cat "$work/lab.log")"
tar -tzf "$root"/tmp/out/run/cleave-lab-*.tar.gz | grep -q /bench/report.html || fail "cleave-lab packed no report"

wait $lintian || fail "$(cat "$work/lintian.log")"

in_root dpkg --purge cleave-lab cleave >"$work/dpkg.log" 2>&1 || fail "$(cat "$work/dpkg.log")"
[ ! -e "$root/usr/bin/cleave" ] || fail "it is still there after dpkg --purge"
echo "$pages man pages"
echo "$score" | sed -n 's/.*Overall/overall/p'
