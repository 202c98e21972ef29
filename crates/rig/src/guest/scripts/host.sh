# Done on the host by other programs, in the current folder. The first word is the function.

# packages NAME...: the kernel's package and those of its modules, behind the first of the names that apt knows: it may stand
# for another, which stands for the image, which needs its modules. Neither firmware nor tools.
packages() {
    found "$@" && return
    refresh
    found "$@" || { echo "apt knows none of the kernel packages $*" >&2 && exit 1; }
}
found() {
    for name; do
        needed=$(apt-cache depends --important --recurse "$name" 2>/dev/null |
            sed -n 's/^ *Depends: \(linux-\(image\|modules\)-.*\)/\1/p' | sort -u)
        [ -z "$needed" ] || break
    done
    printf '%s ' $needed | grep linux
}
refresh() {
    [ "$(id -u)" = 0 ] || { echo "apt's package lists are missing or old; run: sudo apt-get update" >&2 && exit 1; }
    apt-get update >&2
}

# fetch PACKAGE...: unpacked here, and not installed. The lists may be older than the archive, which then lacks the version
# that they name.
fetch() {
    apt-get download $1 || { refresh && apt-get download $1; }
    for package in *.deb; do
        dpkg-deb -x "$package" .
        rm "$package"
    done
}

# Each passes on what it did not pack. A size stands behind a kernel, which they report once they have unpacked it.
unpack() { xz -dcf 2>/dev/null | zstd -dcf 2>/dev/null | gzip -dcf 2>/dev/null || true; }

# module_file NAME: where it lies, compressed or not; nothing where it is built into the kernel.
module_file() { find . -name "$(echo "$1" | tr _- '??').ko*" | head -n 1; }

# module TO NAME: copies a module behind those that it needs, and notes the order.
module() {
    local name="$(echo "$2" | tr - _).ko" file="$(module_file "$2")" need
    [ -n "$file" ] && [ ! -e "$1/$name" ] || return 0
    unpack <"$file" >"$1/$name"
    for need in $(tr '\0' '\n' <"$1/$name" | LC_ALL=C sed -n 's/^depends=//p' | tr , ' '); do
        module "$1" "$need"
    done
    echo "$name" >>"$1/order"
}

# has NAME: whether the kernel has a driver, as a module or compiled in, of which its build leaves a list.
has() {
    [ -n "$(module_file "$1")" ] || find . -name modules.builtin -exec cat {} + | tr - _ | grep -q "/$1\.ko"
}

# quick IMAGE TO: the kernel as QEMU can start it, by the ELF note of type 18 of "Xen", its PVH entry. Where it lies in the
# image: Linux Documentation/arch/x86/boot.rst.
quick() {
    number() { od -An -t "u$1" -N "$1" -j "$2" "$3"; }
    start=$((($(number 1 0x1F1 "$1") + 1) * 512 + $(number 4 0x248 "$1") + 1))
    tail -c "+$start" "$1" | head -c "$(number 4 0x24C "$1" | tr -d ' ')" | unpack >"$2"
    head -c 4 "$2" | grep -q ELF && LC_ALL=C grep -qaP '\x12\0\0\0Xen\0' "$2"
}

# pack NAME=PATH...: prints what is here as an archive, with programs and the libraries that ldd names, which fails for a
# static program. Everything is executable, which harms no file and lets the kernel run /init.
pack() {
    mkdir -p bin
    for program; do
        cp "${program#*=}" "bin/${program%%=*}"
        { ldd "${program#*=}" 2>/dev/null || true; } | { grep -o '/[^ ]*' || true; } |
            xargs -r cp --dereference --parents --target-directory .
    done
    chmod -R 755 .
    find . -mindepth 1 | busybox cpio -o -H newc
}

"$@"
