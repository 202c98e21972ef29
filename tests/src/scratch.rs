//! Files, file systems and devices that are removed when the test ends.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Pid;
use rustix::thread::{CpuSet, gettid, sched_setaffinity};
use tempfile::TempDir;

/// A folder on a real file system (so that O_DIRECT works), removed when dropped.
#[derive(Debug)]
pub struct Scratch {
    folder: TempDir,
}

impl Scratch {
    /// Makes the folder in `CLEAVE_TEST_DIR`, or in the default temporary folder.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Scratch {
        let place = std::env::var_os("CLEAVE_TEST_DIR").map(PathBuf::from);
        Scratch::within(&place.unwrap_or_else(std::env::temp_dir))
    }

    /// Makes the folder in memory, as `/run` is, where sockets and logs never wait for a disk.
    pub fn in_memory() -> Scratch {
        let memory = Path::new("/dev/shm");
        match memory.is_dir() {
            true => Scratch::within(memory),
            false => Scratch::new(),
        }
    }

    fn within(place: &Path) -> Scratch {
        let mut folder = tempfile::Builder::new();
        Scratch {
            folder: folder.prefix("cleave-").tempdir_in(place).unwrap(),
        }
    }

    /// The folder, which stays.
    pub fn keep(self) -> PathBuf {
        self.folder.keep()
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// A path inside the folder.
    pub fn join(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Makes a sparse file.
    pub fn image(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.join(name);
        File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }
}

/// Returns true if this process may mount file systems and attach loop devices.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Runs a program until it exits; its output, or its error output.
pub fn run(program: &str, args: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(args).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    Err(format!(
        "{program} {args:?}: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    ))
}

/// Has this thread run on these CPUs alone; a guest's CPU goes before all else there, which takes root.
pub fn run_on(cpus: &[usize], is_guest: bool) {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    sched_setaffinity(None, &set).unwrap();
    if is_guest {
        go_first(gettid());
    }
}

/// Has this thread run before all that has the usual priority, which takes root.
pub fn go_first(thread: Pid) {
    let thread = thread.as_raw_nonzero().to_string();
    run("chrt", &["--fifo", "--pid", "10", &thread]).unwrap();
}

/// A mounted file system, unmounted when dropped.
#[derive(Debug)]
pub struct Mount {
    at: PathBuf,
    _device: Option<LoopDevice>,
}

impl Mount {
    /// A tmpfs of so many bytes.
    pub fn tmpfs(scratch: &Scratch, bytes: u64) -> Result<Mount, String> {
        let at = scratch.join("tmpfs");
        std::fs::create_dir_all(&at).map_err(|error| error.to_string())?;
        let size = format!("size={bytes}");
        run(
            "mount",
            &["-t", "tmpfs", "-o", &size, "tmpfs", &at.to_string_lossy()],
        )?;
        Ok(Mount { at, _device: None })
    }

    /// An ext4 of so many bytes in a file.
    pub fn ext4(scratch: &Scratch, bytes: u64) -> Result<Mount, String> {
        Mount::file(scratch, bytes, &["mkfs.ext4", "-q", "-F", "-m", "0"])
    }

    /// An XFS of so many bytes in a file; its files can share blocks.
    pub fn xfs(scratch: &Scratch, bytes: u64) -> Result<Mount, String> {
        Mount::file(scratch, bytes, &["mkfs.xfs", "-q"])
    }

    fn file(scratch: &Scratch, bytes: u64, make: &[&str]) -> Result<Mount, String> {
        let image = scratch.image("mounted.img", bytes);
        let shown = image.to_string_lossy();
        let [program, options @ ..] = make else {
            return Err("no program".to_owned());
        };
        run(program, &[options, &[&*shown]].concat())?;
        let device = LoopDevice::attach(&image)?;
        let at = Mount::mount(scratch, &device)?;
        Ok(Mount {
            at,
            _device: Some(device),
        })
    }

    /// A new ext4 on a small device, to which the kernel writes nothing by itself.
    pub fn ext4_on(scratch: &Scratch, device: &LoopDevice) -> Result<Mount, String> {
        let shown = device.path.to_string_lossy();
        let mut options = vec!["-q", "-F", "-m", "0", "-O", "^has_journal"];
        options.extend(["-E", "nodiscard,lazy_itable_init=0", &*shown]);
        run("mkfs.ext4", &options)?;
        let at = Mount::mount(scratch, device)?;
        Ok(Mount { at, _device: None })
    }

    /// Mounts a device, and returns where.
    fn mount(scratch: &Scratch, device: &LoopDevice) -> Result<PathBuf, String> {
        let at = scratch.join("mounted");
        std::fs::create_dir_all(&at).map_err(|error| error.to_string())?;
        run(
            "mount",
            &[&device.path.to_string_lossy(), &at.to_string_lossy()],
        )?;
        Ok(at)
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.at
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let at = self.at.to_string_lossy();
        if run("umount", &[&at]).is_err() {
            let _ = run("umount", &["-l", &at]);
        }
    }
}

/// A loop device, detached when dropped.
#[derive(Debug)]
pub struct LoopDevice {
    /// `/dev/loopN`.
    pub path: PathBuf,
}

impl LoopDevice {
    /// Attaches a file.
    pub fn attach(image: &Path) -> Result<LoopDevice, String> {
        LoopDevice::attach_with(image, &[])
    }

    /// Attaches a file with additional `losetup` options.
    pub fn attach_with(image: &Path, options: &[&str]) -> Result<LoopDevice, String> {
        let image = image.to_string_lossy();
        let args: Vec<&str> = ["--find", "--show"]
            .iter()
            .chain(options)
            .copied()
            .collect();
        let args: Vec<&str> = args.into_iter().chain([image.as_ref()]).collect();
        Ok(LoopDevice {
            path: run("losetup", &args)?.into(),
        })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let path = self.path.to_string_lossy();
        // The read-only flag of a device survives a detach.
        let _ = run("blockdev", &["--setrw", &path]);
        let _ = run("losetup", &["-d", &path]);
    }
}
