# On the host, in mount and PID namespaces of its own: a libvirtd that reads and writes nothing of the machine's
# libvirt, and the guest that it starts. Standard output is the guest's console. $1 is the case's folder.
set -e
for folder in etc/libvirt var/lib/libvirt var/cache/libvirt var/log/libvirt run/libvirt; do
    mkdir -p "/$folder" "$1/$folder"
    mount --bind "$1/$folder" "/$folder"
done
for file in passwd group; do
    mount --bind "$1/etc/$file" "/etc/$file"
done
# Without rights to /dev/kvm libvirt does not probe it, and probing one that runs no guest takes it half a minute.
[ ! -e /dev/kvm ] || mount --bind "$1/no-kvm" /dev/kvm

libvirtd >"$1/libvirtd.log" 2>&1 &
libvirtd=$!
until [ -S /run/libvirt/libvirt-sock ]; do
    kill -0 $libvirtd || { cat "$1/libvirtd.log" >&2 && exit 1; }
    sleep 0.1
done
virsh --connect qemu:///system create /var/lib/libvirt/domain.xml >&2
qemu=$(cat /run/libvirt/qemu/cleave-test.pid)
user=$(stat -c %U "/proc/$qemu")
[ "$user" = libvirt-qemu ] && echo "CLEAVE-TEST user ok" || echo "CLEAVE-TEST user FAIL $user"
tail --lines=+1 --sleep-interval=0.1 --pid="$qemu" --follow /var/lib/libvirt/console
