//! Disks of other machines: NBD servers, which the suite starts, and an image of a Ceph cluster, which the operator names.

use cleave_rig::daemon::DaemonProcess;
use cleave_rig::{At, Result, words};
use itertools::iproduct;
use serde_json::json;

use super::desk::Desk;
use super::load::{Case, LoadWait, RandomLoad};
use super::subject::{ADAPTIVE, DiskSpelling, INTERRUPT, QSD, QSD_IO_THREAD, line};

/// T13: ours and QEMU's client of the same server. The driver, the daemon and the server share two CPUs, and nothing is
/// pinned to one of them.
pub(super) fn measure(desk: &mut Desk) -> Result {
    let pinned = desk.cpus.clone();
    desk.cpus = pinned.shared();
    let done = measure_unpinned(desk);
    desk.cpus = pinned;
    done
}

fn measure_unpinned(desk: &mut Desk) -> Result {
    let socket = desk.run.folder().join("nbd.sock");
    let port = free_port()?;
    let _servers = [
        start(desk, "unix", "--socket={}", &socket.display())?,
        start(desk, "tcp", "--bind=127.0.0.1 --port={}", &port)?,
    ];
    let socket = socket.display();
    let mut stores = vec![
        (
            "NBD, unix",
            DiskSpelling {
                ours: format!("nbd+unix:///?socket={socket}"),
                qemus: format!("driver=nbd,server.type=unix,server.path={socket}"),
            },
        ),
        (
            "NBD, TCP",
            DiskSpelling {
                ours: format!("nbd://127.0.0.1:{port}"),
                qemus: format!(
                    "driver=nbd,server.type=inet,server.host=127.0.0.1,server.port={port}"
                ),
            },
        ),
    ];
    if let Some(image) = &desk.options.rbd {
        stores.push(("RBD", image_words(image)?));
    }
    // KiB, and how many in flight.
    let all = [(4, 1), (4, 32), (4, 128), (1024, 1), (1024, 8)];
    let loads = desk.pace.pick(&all[..], &[(4, 1), (1024, 1)], &[(4, 1)]);
    let kinds = [("reads", 100), ("writes", 0)];
    let mut cases = Vec::new();
    for ((store, disk), (kib, depth), (kind, read_percent)) in iproduct!(&stores, loads, kinds) {
        let load = RandomLoad {
            block_bytes: kib << 10,
            read_percent,
            // A worker first tries spinning and splitting, which may take a second.
            warm_up: desk.pace.pick(1.5, 1.5, 0.0),
            ..RandomLoad::reads(*depth, LoadWait::Sleep, desk.seconds)
        };
        let subjects = [QSD, QSD_IO_THREAD, INTERRUPT, ADAPTIVE].into_iter();
        for subject in subjects.filter(|subject| desk.has(subject)) {
            let daemon = line(&desk.cleave, subject, disk, 1);
            let point = format!("{store}, {kib} KiB {kind}, depth {depth}");
            cases.push(Case {
                facts: json!({ "store": store, "load": format!("{kind}, depth {depth}") }),
                ..Case::new(point, subject.to_owned(), vec![daemon], load.clone())
            });
        }
    }
    desk.rounds_anew("network", &cases)
}

/// A server whose disk touches no data.
fn start(
    desk: &Desk,
    name: &str,
    address: &str,
    value: &dyn std::fmt::Display,
) -> Result<DaemonProcess> {
    let ready = desk.run.folder().join(format!("nbd-{name}.pid"));
    let _ = std::fs::remove_file(&ready);
    let options = "--persistent --shared=0 --pid-file={} --image-opts driver=null-co,size=1073741824,read-zeroes=off";
    let line = format!("taskset --cpu-list {{}} qemu-nbd {address} {options}");
    let line = words(&line, &[&desk.cpus.daemon, value, &ready.display()]);
    DaemonProcess::start_until(&line, ready.clone(), || ready.exists())
}

/// Returns a TCP port that nobody listens on.
fn free_port() -> Result<u16> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).at("a TCP port")?;
    Ok(listener.local_addr().at("a TCP port")?.port())
}

/// `rbd:POOL[/NAMESPACE]/IMAGE[,id=USER][,conf=PATH]`
fn image_words(image: &str) -> Result<DiskSpelling> {
    let unknown = || format!("--rbd {image}: not rbd:POOL[/NAMESPACE]/IMAGE[,id=USER][,conf=PATH]");
    let (path, options) = image.split_once(',').unwrap_or((image, ""));
    let path: Vec<&str> = path
        .strip_prefix("rbd:")
        .ok_or_else(unknown)?
        .split('/')
        .collect();
    let mut qemus = match path[..] {
        [pool, image] => format!("driver=rbd,pool={pool},image={image}"),
        [pool, space, image] => format!("driver=rbd,pool={pool},namespace={space},image={image}"),
        _ => return Err(unknown()),
    };
    for option in options.split(',').filter(|option| !option.is_empty()) {
        match option.split_once('=').ok_or_else(unknown)? {
            ("id", user) => qemus.push_str(&format!(",user={user}")),
            ("conf", path) => qemus.push_str(&format!(",conf={path}")),
            _ => return Err(unknown()),
        }
    }
    Ok(DiskSpelling {
        ours: image.to_owned(),
        qemus,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_named_to_each_side() {
        let said = |image| image_words(image).map(|words| words.qemus);
        assert_eq!(
            said("rbd:p/n/i,id=a,conf=/c").unwrap(),
            "driver=rbd,pool=p,namespace=n,image=i,user=a,conf=/c"
        );
        for wrong in ["p/i", "rbd:i", "rbd:a/b/c/d", "rbd:p/i,raw=on"] {
            assert!(said(wrong).is_err(), "{wrong}");
        }
    }
}
