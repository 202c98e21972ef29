//! The cases: the disk that is served, the guest that boots, and the work of the host meanwhile.

use std::time::Instant;

use cleave_rig::guest::{self, Accelerator};
use cleave_rig::{At, Result};

use super::backend::{self, DaemonMode};
use super::bench::{BOOT_LIMIT, Bench};
use super::boots::{self, DISK};
use super::kit::Kit;
use super::{iopoll, libvirt, migration};

/// The case with a Ceph cluster. It runs only when it is asked for.
pub(crate) const RBD: &str = "fio-verify-rbd";
/// The cases in which a guest moves. They run only when they are asked for, with a QEMU from version 10 on: Debian 12's loses memory of
/// emulated guests that move, with its own storage daemon too, and cannot be replaced under a guest.
const MIGRATION: &str = "migration";
const UPGRADE: &str = "qemu-upgrade";

/// A case by its name; a guest has as many CPUs as vrings, and both sizes of blocks are told to some.
pub(super) struct GuestCase {
    pub(super) name: &'static str,
    pub(super) cpus: u32,
    pub(super) block_bytes: u32,
    how: How,
}

/// Boots of Linux, one after the other, each a function of a script; or a function of the host.
enum How {
    Disk(&'static str),
    Fio(&'static str),
    Own(fn(&mut Bench<'_>) -> Result),
}

const fn case(name: &'static str, cpus: u32, block_bytes: u32, how: How) -> GuestCase {
    GuestCase {
        name,
        cpus,
        block_bytes,
        how,
    }
}

/// The longest first, for a case that starts late should be short.
pub(super) const ALL: &[GuestCase] = &[
    case("iopoll", 2, 512, How::Own(iopoll::run)),
    case("four-cpus", 4, 4096, How::Disk("life")),
    case("one-cpu", 1, 512, How::Disk("life crash recover read_only")),
    case("killed", 4, 4096, How::Fio("killed")),
    case("fio-verify", 4, 4096, How::Fio("verify")),
    case("fio-verify-poll", 1, 512, How::Fio("verify_polled")),
    case("fio-verify-nbd", 4, 512, How::Fio("verify_nbd")),
    case(RBD, 4, 512, How::Fio("verify_rbd")),
    case(MIGRATION, 2, 512, How::Own(migration::run)),
    case(UPGRADE, 2, 512, How::Own(migration::upgrade)),
    case("libvirt", 4, 4096, How::Own(libvirt::run)),
    case("reconnect", 1, 512, How::Disk("reconnect")),
    // Firmware sets up one vring of the four, and boots from blocks of 512 bytes only.
    case("firmware-boot", 4, 512, How::Own(firmware_boot)),
];

impl GuestCase {
    /// Returns true if it runs with the others.
    pub(super) fn is_usual(&self) -> bool {
        ![RBD, MIGRATION, UPGRADE].contains(&self.name)
    }
}

/// Runs a case and prints its line; the number of its checks, unless it cannot run here.
pub(super) fn run(kit: &Kit, case: &GuestCase) -> Result<Option<usize>, ()> {
    let (start, name) = (Instant::now(), case.name);
    let mut ran = attempt(kit, case);
    if let Err(why) = &ran
        && why.starts_with(guest::CRASHED)
        && kit.accelerator == Accelerator::Tcg
    {
        // Rarely, QEMU's translator crashes by itself.
        println!("{name:<16} again: {why}");
        ran = note_crash(kit, name, why).and_then(|()| attempt(kit, case));
    }
    let seconds = start.elapsed().as_secs_f64();
    match &ran {
        Ok(CaseEnd::Ignored(why)) => println!("ignored: guest case {name}: {why}"),
        Ok(CaseEnd::Passed(count)) => println!("{name:<16} ok   {seconds:6.1} s  {count} checks"),
        Err(why) => println!("{name:<16} FAIL {seconds:6.1} s  {why}"),
    }
    match ran {
        Ok(CaseEnd::Passed(count)) => Ok(Some(count)),
        Ok(CaseEnd::Ignored(_)) => Ok(None),
        Err(_) => Err(()),
    }
}

/// How a case ended that did not fail.
enum CaseEnd {
    /// After so many checks.
    Passed(usize),
    /// Not run here, for this reason.
    Ignored(String),
}

/// Counts a crash with the attempts that are repeated for another reason, so that it is not overlooked.
fn note_crash(kit: &Kit, name: &str, why: &str) -> Result {
    std::fs::create_dir_all(&kit.late).at(&kit.late)?;
    let file = kit.late.join(format!("guest-{name}"));
    std::fs::write(&file, why).at(&file)
}

fn attempt(kit: &Kit, case: &GuestCase) -> Result<CaseEnd> {
    let mut bench = Bench {
        kit,
        folder: kit.folder.join(case.name),
        name: case.name,
        cpus: case.cpus,
        block_bytes: case.block_bytes,
        checks: Vec::new(),
        ignored: None,
    };
    std::fs::create_dir_all(&bench.folder).at(&bench.folder)?;
    match case.how {
        How::Disk(boots) => boots::boot(&mut bench, DISK, boots),
        How::Fio(boots) => boots::boot(&mut bench, include_str!("scripts/fio.sh"), boots),
        How::Own(run) => run(&mut bench),
    }?;
    if let Some(why) = bench.ignored {
        return Ok(CaseEnd::Ignored(why));
    }
    let (failed, count) = (guest::failed(&bench.checks), bench.checks.len());
    match count == 0 || !failed.is_empty() {
        true => Err(format!("of {count} checks failed:{failed}")),
        false => Ok(CaseEnd::Passed(count)),
    }
}

/// The firmware reads from the disk: SeaBIOS sets up vring 0 only, and polls without interrupts.
fn firmware_boot(bench: &mut Bench<'_>) -> Result {
    const MARK: &[u8] = b"CLEAVE-MARK second-sector\r\n";
    /// 16-bit code: read sector 2 with INT 13h, print it on the serial port, halt.
    #[rustfmt::skip]
    const CODE: &[u8] = &[
        0x31, 0xC0, 0x8E, 0xD8, 0x8E, 0xC0, 0x8E, 0xD0, // xor ax, ax; mov ds, ax; mov es, ax; mov ss, ax
        0xBC, 0x00, 0x7C, // mov sp, 0x7C00
        0xB8, 0x01, 0x02, // mov ax, 0x0201: read one sector
        0xB9, 0x02, 0x00, 0xB6, 0x00, // mov cx, 2; mov dh, 0: cylinder 0, sector 2, head 0, drive as given in dl
        0xBB, 0x00, 0x7E, // mov bx, 0x7E00: to there
        0xCD, 0x13, 0x72, 0x0E, // int 0x13; jc halt
        0xBE, 0x00, 0x7E, 0xBA, 0xF8, 0x03, // mov si, 0x7E00; mov dx, 0x3F8
        0xAC, 0x84, 0xC0, 0x74, 0x03, // print: lodsb; test al, al; jz halt
        0xEE, 0xEB, 0xF8, // out dx, al; jmp print
        0xF4, 0xEB, 0xFD, // halt: hlt; jmp halt
    ];
    let mut image = vec![0; 4 << 20];
    image[..CODE.len()].copy_from_slice(CODE);
    image[510..512].copy_from_slice(&[0x55, 0xAA]);
    image[512..512 + MARK.len()].copy_from_slice(MARK);
    std::fs::write(bench.image(), image).at(bench.image())?;
    let daemon = backend::start(bench, &bench.folder, DaemonMode::Plain)?;
    let mut machine = bench.machine("firmware", &[bench.disk()], BOOT_LIMIT)?;
    machine.expect("second-sector")?;
    machine.kill()?;
    bench.checks.push(("second-sector".to_owned(), Ok(())));
    daemon.stop()
}
