//! Runs a Ceph cluster in a folder for the guest tests: `ceph-cluster FOLDER MEGABYTES`. It has an image `rbd/guest`. When that can be
//! used, a socket `FOLDER.sock` listens. The programs of the cluster end with this one.
#![allow(clippy::unwrap_used)] // a mistake in the test ends the test

use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use cleave_tests::ceph::Cluster;

fn main() {
    let mut args = std::env::args_os().skip(1);
    let folder = PathBuf::from(args.next().unwrap());
    let megabytes = args.next().unwrap().to_str().unwrap().parse().unwrap();
    std::fs::create_dir(&folder).unwrap();
    let cluster = Cluster::start(folder.clone());
    cluster.image("guest", megabytes);
    let _ready = UnixListener::bind(folder.with_extension("sock")).unwrap();
    loop {
        std::thread::park();
    }
}
