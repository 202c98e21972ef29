//! The file of a disk in the state folder, and one that cannot be written for a while.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use cleave_tests::{Node, wait_until};
use rustix::fs::OFlags;

/// Has the next write of the file of disk `id` wait until the guard is dropped, and fail then: it is a full pipe.
pub(crate) struct SlowFile {
    path: PathBuf,
    /// Where the node's open files are listed.
    open: String,
    _reader: std::fs::File,
}

impl SlowFile {
    pub(crate) fn of(node: &Node, id: &str) -> SlowFile {
        let path = node
            .daemon
            .scratch()
            .join(&format!("state/disks/.{id}.new"));
        cleave_tests::run("mkfifo", &[path.to_str().unwrap()]).unwrap();
        let mut pipe = std::fs::File::options();
        let pipe = pipe.read(true).write(true);
        let pipe = pipe
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(&path);
        let mut reader = pipe.unwrap();
        while reader.write(&[0; 4096]).is_ok() {}
        SlowFile {
            path,
            open: format!("/proc/{}/fd", node.daemon.pid()),
            _reader: reader,
        }
    }

    /// Waits until the node has opened it to write.
    pub(crate) fn is_reached(&self) -> bool {
        wait_until(|| {
            let open = std::fs::read_dir(&self.open).unwrap().flatten();
            let mut names = open.filter_map(|entry| entry.path().read_link().ok());
            names.any(|name| name == self.path)
        })
    }
}

impl Drop for SlowFile {
    fn drop(&mut self) {
        self.is_reached();
        // While the pipe has its reader: without one, the node would wait for it in open.
        let _ = std::fs::remove_file(&self.path);
    }
}

pub(crate) fn is_kept(node: &Node, id: &str) -> bool {
    let file = format!("state/disks/{id}.toml");
    node.daemon.scratch().join(&file).exists()
}
