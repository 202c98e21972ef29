//! An initramfs as the kernel unpacks it: a cpio archive in the "newc" format (Linux
//! `Documentation/driver-api/early-userspace/buffer-format.rst`). Archives may stand behind each other.

/// Grows entry by entry; `finish` gives the bytes.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;

impl Archive {
    pub(crate) fn folder(&mut self, path: &str) {
        self.entry(path, FOLDER, &[]);
    }

    /// A file; executable, for that harms none of them.
    pub(crate) fn file(&mut self, path: &str, content: &[u8]) {
        self.entry(path, PROGRAM, content);
    }

    pub(crate) fn link(&mut self, path: &str, target: &str) {
        self.entry(path, LINK, target.as_bytes());
    }

    /// The archive with its trailer, padded so that another may follow.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        // Each its own inode: entries that share one would be hard links of each other.
        self.entries += 1;
        let size = content.len();
        let name_size = path.len() + 1;
        let fields = [
            self.entries as usize,
            mode as usize,
            0,
            0,
            1,
            0,
            size,
            0,
            0,
            0,
            0,
            name_size,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_a_header_a_name_and_its_content_each_padded_to_four() {
        let mut archive = Archive::default();
        archive.file("init", b"#!/bin/sh");
        let bytes = archive.finish();
        assert_eq!(&bytes[..14], b"07070100000001");
        assert_eq!(&bytes[14..22], b"000081ed", "mode");
        assert_eq!(&bytes[54..62], b"00000009", "size");
        assert_eq!(&bytes[94..102], b"00000005", "name with its zero");
        // 110 bytes of header and 5 of name make 115; the content begins at 116.
        assert_eq!(&bytes[110..116], b"init\0\0");
        assert_eq!(&bytes[116..128], b"#!/bin/sh\0\0\0");
        assert_eq!(&bytes[128..134], b"070701");
        assert_eq!(bytes.len() % 4, 0);
    }

    #[test]
    fn another_cpio_reads_it() {
        use std::io::Write;
        let mut archive = Archive::default();
        archive.folder("bin");
        archive.file("bin/sh", b"x");
        archive.link("bin/ash", "sh");
        let mut child = std::process::Command::new("busybox")
            .args(["cpio", "-t"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::null())
            .spawn()
            .expect("busybox, which `cargo xtask test` installs");
        let mut input = child.stdin.take().unwrap();
        input.write_all(&archive.finish()).unwrap();
        drop(input);
        let listing = child.wait_with_output().unwrap().stdout;
        assert_eq!(listing, b"bin\nbin/sh\nbin/ash\n");
    }
}
