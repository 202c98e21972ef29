//! Boots of Linux with functions of a script, and the work of the host meanwhile.

use std::os::unix::fs::MetadataExt;

use cleave_rig::daemon::DaemonProcess;
use cleave_rig::{At, Result, quietly};

use super::backend::{self, DaemonMode};
use super::bench::{BOOT_LIMIT, Bench, DISK_BYTES, GROWN_BYTES, resize};

/// Script of most boots.
pub(super) const DISK: &str = include_str!("scripts/disk.sh");

/// Boots Linux with functions of a script, one after the other, and acts on their requests meanwhile; as many vrings
/// as CPUs. A daemon serves on while the next boot wants it as it is.
pub(super) fn boot(bench: &mut Bench<'_>, script: &str, boots: &str) -> Result {
    bench.empty_image()?;
    let _server = match mode(boots) {
        DaemonMode::Nbd => Some(backend::nbd_server(&bench.folder, DISK_BYTES)?),
        DaemonMode::Rbd => Some(backend::cluster(bench.kit, &bench.folder, DISK_BYTES)?),
        _ => None,
    };
    let mut daemon: Option<DaemonProcess> = None;
    let mut served = None;
    for boot in boots.split(' ') {
        let mode = mode(boot);
        if served != Some(mode) {
            daemon.take().map_or(Ok(()), DaemonProcess::stop)?;
            daemon = Some(backend::start(bench, &bench.folder, mode)?);
            served = Some(mode);
        }
        let initramfs = bench.folder.join(format!("{boot}.initramfs"));
        bench.write_initramfs(&initramfs, script, boot)?;
        let linux = bench.linux(&initramfs, "");
        let mut machine = bench.machine(boot, &[bench.disk(), linux], BOOT_LIMIT)?;
        let checks = loop {
            match machine.mark()? {
                None => break machine.off()?,
                Some((mark, _)) if mark == "crash" => break machine.kill()?,
                Some(mark) => {
                    let answer = act(bench, &mut daemon, mode, &mark)?;
                    machine.say(&format!("{}\n", answer.trim()))?;
                }
            }
        };
        bench.checks.extend(checks);
    }
    daemon.map_or(Ok(()), DaemonProcess::stop)
}

/// Carries out a request of the guest, a mark and the words after it. Returns the answer.
fn act(
    bench: &Bench<'_>,
    daemon: &mut Option<DaemonProcess>,
    mode: DaemonMode,
    mark: &(String, String),
) -> Result<String> {
    let image = bench.image();
    let mut answer = String::new();
    match (&*mark.0, daemon.as_ref()) {
        ("allocated", _) => answer = (image.metadata().at(&image)?.blocks() * 512).to_string(),
        ("sum", _) => answer = quietly(&bench.folder, "sha256sum disk.img", &[])?,
        ("note", _) => println!("{}: {}", bench.name, mark.1),
        ("workers", Some(daemon)) => {
            let threads = daemon.threads().into_iter();
            let workers = threads.filter(|name| name.starts_with("cleave-w"));
            answer = workers.count().to_string();
        }
        ("grow", Some(daemon)) => {
            resize(&image, GROWN_BYTES)?;
            daemon.signal("HUP")?;
        }
        ("stop", Some(_)) => daemon.take().map_or(Ok(()), DaemonProcess::stop)?,
        ("start", None) => *daemon = Some(backend::start(bench, &bench.folder, mode)?),
        ("kill", Some(killed)) => {
            answer = u8::from(killed.said().contains("done again")).to_string();
            // Dropped is killed.
            drop(daemon.take());
            *daemon = Some(backend::start(bench, &bench.folder, mode)?);
        }
        _ => return Err(format!("the guest asks for `{}`", mark.0)),
    }
    Ok(answer)
}

/// Returns how the daemon serves a boot.
fn mode(boot: &str) -> DaemonMode {
    match boot {
        "read_only" => DaemonMode::ReadOnly,
        "verify_polled" => DaemonMode::Poll,
        "verify_nbd" => DaemonMode::Nbd,
        "verify_rbd" => DaemonMode::Rbd,
        _ => DaemonMode::Plain,
    }
}
