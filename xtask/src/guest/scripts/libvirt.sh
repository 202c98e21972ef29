# Done on the host, in the folder of the case. The first word is the function.

# files QEMU_ID CLEAVE_ID CPUS DOCUMENT: what the namespace below shows in place of the machine's own, and the domain that the
# document shows, with what it leaves to the reader: a name, a kernel, a console.
files() {
    mkdir -p etc/libvirt var/lib/libvirt
    printf '%s = "libvirt-qemu"\n' user group >etc/libvirt/qemu.conf
    cat >>etc/libvirt/qemu.conf <<'END'
security_driver = "none"
cgroup_controllers = []
namespaces = []
remember_owner = 0
stdio_handler = "file"
END
    printf '%s\n' 'auth_unix_rw = "none"' 'auth_unix_ro = "none"' 'unix_sock_dir = "/run/libvirt"' >etc/libvirt/libvirtd.conf
    # The first line of a name counts.
    echo "libvirt-qemu:x:$1:$1::/var/lib/libvirt:/usr/sbin/nologin" | cat - /etc/passwd >etc/passwd
    # The group by which libvirt is built to run QEMU on Ubuntu must be there, whatever its settings say.
    printf '%s\n' "libvirt-qemu:x:$1:" "kvm:x:$(($1 + 1)):" "cleave:x:$2:libvirt-qemu" | cat - /etc/group >etc/group
    install -m 000 /dev/null no-kvm

    sed '1,/^```xml/d; /^```/,$d' "$4" >shown.xml
    for part in "<domain type='kvm'>" "<devices>" /run/cleave/a/disk.sock; do
        grep -q "$part" shown.xml || { echo "docs/qemu.md has no $part any more" >&2 && exit 1; }
    done
    domain="<domain type='qemu'><name>cleave-test</name><memory unit='MiB'>512</memory><vcpu>$3</vcpu>"
    domain="$domain<features><acpi/></features><os><type arch='x86_64' machine='q35'>hvm</type>"
    domain="$domain<kernel>/var/lib/libvirt/kernel</kernel><initrd>/var/lib/libvirt/initramfs</initrd>"
    domain="$domain<cmdline>console=ttyS0 quiet loglevel=1 panic=-1 cryptomgr.notests</cmdline></os>"
    console="<serial type='file'><source path='/var/lib/libvirt/console'/></serial>"
    sed "s|<domain type='kvm'>|$domain|; s|<devices>|&$console|; s|/run/cleave/a|/var/lib/libvirt|" shown.xml \
        >var/lib/libvirt/domain.xml
}

# In mount and PID namespaces of its own: a libvirtd that reads and writes nothing of the machine's libvirt, and the guest
# that it starts. Standard output is the guest's console.
libvirt() {
    for folder in etc/libvirt var/lib/libvirt var/cache/libvirt var/log/libvirt run/libvirt; do
        mkdir -p "/$folder" "$PWD/$folder"
        mount --bind "$PWD/$folder" "/$folder"
    done
    for file in passwd group; do
        mount --bind "$PWD/etc/$file" "/etc/$file"
    done
    # Without rights to /dev/kvm libvirt does not probe it, and probing one that runs no guest takes it half a minute.
    [ ! -e /dev/kvm ] || mount --bind "$PWD/no-kvm" /dev/kvm

    libvirtd >libvirtd.log 2>&1 &
    libvirtd=$!
    until [ -S /run/libvirt/libvirt-sock ]; do
        kill -0 $libvirtd || { cat libvirtd.log >&2 && exit 1; }
        sleep 0.1
    done
    virsh --connect qemu:///system create /var/lib/libvirt/domain.xml >&2
    qemu=$(cat /run/libvirt/qemu/cleave-test.pid)
    user=$(stat -c %U "/proc/$qemu")
    [ "$user" = libvirt-qemu ] && echo "CLEAVE-TEST user ok" || echo "CLEAVE-TEST user FAIL $user"
    tail --lines=+1 --sleep-interval=0.1 --pid="$qemu" --follow /var/lib/libvirt/console
}

"$@"
