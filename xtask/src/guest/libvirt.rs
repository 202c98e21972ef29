//! A guest that libvirt starts, with the disk as docs/qemu.md describes it and QEMU as a user of its own.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use super::backend::{self, Mode};
use super::cases::{BOOT_LIMIT, Bench, DISK};
use super::machine::Machine;
use crate::step::{At, Result, quietly};

/// User and group of QEMU: Debian's numbers. Only files in the namespace name them.
const QEMU_ID: u32 = 64055;

/// Namespaces in which libvirtd finds its folders, and which end with all that runs in them.
const UNSHARE: &str = "unshare --mount --pid --fork --kill-child --mount-proc";

const DOCUMENT: &str = include_str!("../../../docs/qemu.md");

const QEMU_CONF: &str = r#"user = "libvirt-qemu"
group = "libvirt-qemu"
security_driver = "none"
cgroup_controllers = []
namespaces = []
remember_owner = 0
stdio_handler = "file"
"#;

const LIBVIRTD_CONF: &str = r#"auth_unix_rw = "none"
auth_unix_ro = "none"
unix_sock_dir = "/run/libvirt"
"#;

pub(super) fn run(bench: &mut Bench<'_>) -> Result {
    let folder = &bench.folder;
    if let Err(why) = quietly(folder, &["sh", "-c", &format!("{UNSHARE} true")], &[]) {
        let why = why.trim();
        let why = format!("libvirt's QEMU driver needs root and namespaces of its own: {why}");
        bench.ignored = Some(why);
        return Ok(());
    }
    let home = folder.join("var/lib/libvirt");
    fs::create_dir_all(&home).at(&home)?;
    write_files(folder, bench.shape.cpus)?;
    bench.write_initramfs(&home.join("initramfs"), DISK, "attached")?;
    fs::copy(&bench.lab.kernel.image, home.join("kernel")).at(&home)?;

    let image = bench.empty_image()?;
    let daemon = backend::start(bench.lab, &home, &image, bench.shape, Mode::Group(QEMU_ID))?;
    let mut command = Command::new("unshare");
    let host = include_str!("scripts/libvirt-host.sh");
    command
        .args(UNSHARE.split(' ').skip(1))
        .args(["sh", "-c", host, "sh"])
        .arg(folder);
    let machine = Machine::run(command, &folder.join("console.log"), BOOT_LIMIT)?;
    bench.checks = machine.finish()?;
    daemon.stop()
}

/// Files that the namespace shows in place of the machine's own.
fn write_files(folder: &Path, cpus: u32) -> Result {
    fs::create_dir_all(folder.join("etc/libvirt")).at(folder)?;
    let read = |path: &str| fs::read_to_string(path).at(path);
    let user = format!("libvirt-qemu:x:{QEMU_ID}:{QEMU_ID}::/var/lib/libvirt:/usr/sbin/nologin\n");
    // The group by which libvirt is built to run QEMU on Ubuntu must be there, whatever its settings say.
    let groups = format!("libvirt-qemu:x:{QEMU_ID}:\nkvm:x:{}:\n", QEMU_ID + 1);
    let files = [
        ("etc/libvirt/qemu.conf", QEMU_CONF.to_owned()),
        ("etc/libvirt/libvirtd.conf", LIBVIRTD_CONF.to_owned()),
        // The first line of a name counts.
        ("etc/passwd", user + &read("/etc/passwd")?),
        ("etc/group", groups + &read("/etc/group")?),
        ("no-kvm", String::new()),
        ("var/lib/libvirt/domain.xml", domain(DOCUMENT, cpus)?),
    ];
    for (name, text) in files {
        fs::write(folder.join(name), text).at(folder)?;
    }
    let no_kvm = folder.join("no-kvm");
    fs::set_permissions(&no_kvm, Permissions::from_mode(0o000)).at(&no_kvm)
}

/// The domain that the document shows, with what it leaves to the reader: a name, a kernel, a console.
fn domain(document: &str, cpus: u32) -> Result<String> {
    let lacking = |what: &str| format!("docs/qemu.md has no {what} any more");
    let block = document
        .split_once("```xml\n")
        .and_then(|(_, rest)| rest.split_once("```"));
    let mut xml = block.ok_or(lacking("domain"))?.0.to_owned();
    let machine = format!(
        "<domain type='qemu'><name>cleave-test</name><memory unit='MiB'>512</memory><vcpu>{cpus}</vcpu>\
         <features><acpi/></features><os><type arch='x86_64' machine='q35'>hvm</type>\
         <kernel>/var/lib/libvirt/kernel</kernel><initrd>/var/lib/libvirt/initramfs</initrd>\
         <cmdline>console=ttyS0 quiet loglevel=1 panic=-1</cmdline></os>"
    );
    let console = "<devices><serial type='file'><source path='/var/lib/libvirt/console'/></serial>";
    for (shown, ours) in [
        ("<domain type='kvm'>", machine.as_str()),
        ("<devices>", console),
        ("/run/cleave/a/disk.sock", "/var/lib/libvirt/disk.sock"),
    ] {
        if !xml.contains(shown) {
            return Err(lacking(shown));
        }
        xml = xml.replace(shown, ours);
    }
    Ok(xml)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documents_domain_is_completed_and_its_disk_left_as_it_is() {
        let xml = domain(DOCUMENT, 4).unwrap();
        for part in [
            "<disk type='vhostuser'",
            "<reconnect enabled='yes'",
            "<access mode='shared'/>",
        ] {
            assert!(xml.contains(part), "{part} is not in {xml}");
        }
        assert!(domain("```xml\n<domain type='kvm'></domain>\n```", 4).is_err());
    }
}
