//! A daemon on an image of the cluster, which the tests share.

use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

use cleave_tests::ceph::{Cluster, cluster};
use cleave_tests::http::get;
use cleave_tests::{Daemon, Scratch, run_to_exit};
use serde_json::Value;

/// Shared by the tests that need the cluster, and held alone by the one that takes its OSD away.
pub(crate) static UP: RwLock<()> = RwLock::new(());

/// Runs a test while the cluster is whole.
pub(crate) fn with_cluster(test: impl FnOnce(&Cluster)) {
    let _up = UP.read().unwrap_or_else(PoisonError::into_inner);
    test(cluster());
}

/// A daemon with a control socket, and the path of that socket.
pub(crate) fn serve(disk: &str, more: &[&str]) -> (Daemon, PathBuf) {
    let args = ["--disk", disk, "--serial", "disk"];
    Daemon::serve_with_control_in(Scratch::in_memory(), &[&args, more].concat())
}

pub(crate) fn report(control: &Path) -> Value {
    get(control, "/v1/disks/disk")
}

/// Makes images and a stripe of them with chunks of 64 KiB; the arguments that serve it, but for the first `--disk`, and the
/// word for that.
pub(crate) fn stripe(
    ceph: &Cluster,
    name: &str,
    legs: usize,
    megabytes: u32,
) -> (String, Vec<String>) {
    let leg = |number| ceph.image(&format!("{name}-{number}"), megabytes);
    let images: Vec<String> = (0..legs).map(leg).collect();
    let mut create = vec!["stripe", "create", "--chunk", "64K"];
    create.extend(images.iter().map(String::as_str));
    let created = run_to_exit(&create);
    assert_eq!(created.code, Some(0), "{}", created.stderr);
    let mut more = vec!["--stripe".to_owned(), "64K".to_owned()];
    for image in &images[1..] {
        more.extend(["--disk".to_owned(), image.clone()]);
    }
    (images[0].clone(), more)
}

/// The refusal of a disk.
pub(crate) fn refusal(disk: &str, more: &[&str]) -> String {
    let scratch = Scratch::in_memory();
    let socket = scratch.join("socket");
    let mut args = vec!["serve", "--socket-path", socket.to_str().unwrap()];
    args.extend(["--disk", disk]);
    args.extend(more);
    let exited = run_to_exit(&args);
    assert_ne!(exited.code, Some(0));
    assert_eq!(exited.stderr.trim().lines().count(), 1, "{}", exited.stderr);
    exited.stderr
}

/// The image as a disk whose configuration has more settings, in a file in `folder`.
pub(crate) fn configured(
    ceph: &Cluster,
    folder: &Scratch,
    image: &str,
    settings: &[&str],
) -> String {
    let conf = folder.join("conf");
    let text = std::fs::read_to_string(ceph.conf()).unwrap();
    std::fs::write(&conf, text + &settings.join("\n") + "\n").unwrap();
    format!("rbd:rbd/{image},conf={}", conf.display())
}
