//! A Ceph cluster of one monitor and one OSD, whose disk is a file in memory. The programs of Ceph make and run it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, OnceLock};

use crate::{Requirement, Scratch};

/// The programs are there.
pub const CEPH: Requirement = Requirement::Program("/usr/bin/ceph-osd");

/// How long the cluster takes to find out that a client is dead, in seconds. The client has to show that it lives more often.
const DEAD_SECONDS: u32 = 4;

/// A command to the cluster that takes longer, in seconds, has failed.
const COMMAND_SECONDS: &str = "60";

/// A running cluster with a pool `rbd`.
#[derive(Debug)]
pub struct Cluster {
    folder: PathBuf,
    starter: Starter,
    mon: Mutex<Option<Child>>,
    osd: Mutex<Option<Child>>,
}

/// Starts the programs of a cluster on a thread that lives as long as this process. The kernel ends each program with the
/// thread that started it, so nothing is left if this process is killed.
#[derive(Debug)]
struct Starter {
    commands: SyncSender<Command>,
    children: Mutex<Receiver<Child>>,
}

impl Starter {
    fn new() -> Starter {
        let (commands, ordered) = sync_channel::<Command>(0);
        let (started, children) = sync_channel(0);
        std::thread::spawn(move || {
            for mut command in ordered {
                started.send(command.spawn().unwrap()).unwrap();
            }
        });
        Starter {
            commands,
            children: Mutex::new(children),
        }
    }

    fn start(&self, command: Command) -> Child {
        let children = self.children.lock().unwrap();
        self.commands.send(command).unwrap();
        children.recv().unwrap()
    }
}

static CLUSTER: OnceLock<Cluster> = OnceLock::new();

/// The cluster of this test program, started at the first call.
pub fn cluster() -> &'static Cluster {
    CLUSTER.get_or_init(|| Cluster::start(Scratch::in_memory().keep()))
}

/// Ends the cluster of this test program, if it was started.
pub fn stop() {
    if let Some(cluster) = CLUSTER.get() {
        for child in [&cluster.osd, &cluster.mon] {
            if let Some(mut child) = child.lock().unwrap().take() {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
        let _ = std::fs::remove_dir_all(&cluster.folder);
    }
}

impl Cluster {
    /// Starts one in an empty folder.
    pub fn start(folder: PathBuf) -> Cluster {
        let fsid = uuid();
        let port = {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().port()
        };
        let (mon, osd) = (folder.join("mon"), folder.join("osd"));
        std::fs::create_dir(&mon).unwrap();
        std::fs::create_dir(&osd).unwrap();
        let at = format!("v2:127.0.0.1:{port}");
        let (mon, osd) = (mon.display(), osd.display());
        let run_dir = folder.display();
        let conf = format!(
            "[global]\nfsid = {fsid}\nmon_host = {at}\nauth_cluster_required = none\nauth_service_required = none\n\
             auth_client_required = none\nosd_pool_default_size = 1\nosd_pool_default_min_size = 1\n\
             mon_allow_pool_size_one = true\nosd_crush_chooseleaf_type = 0\nmon_data_avail_crit = 1\nrun_dir = {run_dir}\n\
             log_file = {run_dir}/$name.log\nadmin_socket =\nmon_data = {mon}\nosd_data = {osd}\n\
             osd_objectstore = bluestore\nbluestore_block_size = 4294967296\n\
             osd_client_watch_timeout = {DEAD_SECONDS}\nobjecter_tick_interval = 1\n"
        );
        std::fs::write(folder.join("conf"), conf).unwrap();
        let map = folder.join("map");
        let map = map.to_str().unwrap();
        run_in(
            &folder,
            "monmaptool",
            &["--create", "--fsid", &fsid, "--addv", "a", &at, map],
        );
        run_in(&folder, "ceph-mon", &["--mkfs", "-i", "a", "--monmap", map]);
        let starter = Starter::new();
        let mon = starter.start(program(&folder, "ceph-mon", "a"));
        let cluster = Cluster {
            mon: Mutex::new(Some(mon)),
            osd: Mutex::new(None),
            folder,
            starter,
        };
        let uuid = uuid();
        cluster.ceph(&["osd", "new", &uuid]);
        let mkfs = ["-i", "0", "--mkfs", "--osd-uuid", &uuid];
        run_in(&cluster.folder, "ceph-osd", &mkfs);
        cluster.start_osd();
        cluster.ceph(&["osd", "pool", "create", "rbd", "8"]);
        cluster.rbd(&["pool", "init", "rbd"]);
        cluster
    }

    /// Its configuration.
    pub fn conf(&self) -> PathBuf {
        self.folder.join("conf")
    }

    /// Runs `ceph`; its output.
    pub fn ceph(&self, args: &[&str]) -> String {
        run_in(&self.folder, "ceph", args)
    }

    /// Runs `rbd`; its output.
    pub fn rbd(&self, args: &[&str]) -> String {
        run_in(&self.folder, "rbd", args)
    }

    /// Makes an image; its word for `--disk`.
    pub fn image(&self, name: &str, megabytes: u32) -> String {
        let place = format!("rbd/{name}");
        self.rbd(&["create", &place, "--size", &format!("{megabytes}M")]);
        self.disk(&place)
    }

    /// The word for `--disk` of an image or a snapshot.
    pub fn disk(&self, place: &str) -> String {
        format!("rbd:{place},conf={}", self.conf().display())
    }

    /// Address of the client that has the exclusive lock of an image, as the cluster knows it.
    pub fn owner(&self, name: &str) -> Option<String> {
        let locks = self.rbd(&["lock", "ls", &format!("rbd/{name}")]);
        let last = locks.lines().last()?.split_whitespace().last();
        last.map(str::to_owned)
    }

    /// Returns true if the cluster refuses a client.
    pub fn has_blocklisted(&self, address: &str) -> bool {
        self.blocklisted_until(address).is_some()
    }

    /// Returns the local time until which the cluster refuses a client, such as `2026-11-25T16:02:41.128+0000`.
    pub fn blocklisted_until(&self, address: &str) -> Option<String> {
        let list = self.ceph(&["osd", "blocklist", "ls"]);
        let entry = list.lines().find(|line| line.contains(address))?;
        entry.split_whitespace().last().map(str::to_owned)
    }

    /// Kills the OSD.
    pub fn stop_osd(&self) {
        let mut osd = self.osd.lock().unwrap();
        if let Some(mut child) = osd.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Starts the OSD.
    pub fn start_osd(&self) {
        let osd = program(&self.folder, "ceph-osd", "0");
        *self.osd.lock().unwrap() = Some(self.starter.start(osd));
    }
}

/// A program of a cluster, ended by the kernel with the thread that starts it.
fn program(folder: &Path, program: &str, id: &str) -> Command {
    let output = File::create(folder.join(format!("{program}.out"))).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", program, "-f", "-i", id]);
    command.env("CEPH_CONF", folder.join("conf"));
    command.stdin(Stdio::null());
    command.stdout(output.try_clone().unwrap()).stderr(output);
    command
}

fn run_in(folder: &Path, program: &str, args: &[&str]) -> String {
    let mut command = Command::new("timeout");
    command.args([COMMAND_SECONDS, program]);
    command.args(args).env("CEPH_CONF", folder.join("conf"));
    let output = command.stdin(Stdio::null()).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {error}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// A new UUID.
fn uuid() -> String {
    let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap();
    uuid.trim().to_owned()
}
