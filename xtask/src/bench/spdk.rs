//! SPDK's vhost target, if the operator has built it.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::subject::Store;
use crate::step::At;

/// The socket, in the run's folder.
const SOCKET: &str = "disk.sock";
const RPC_SOCKET: &str = "spdk-rpc.sock";
const RPC_LOCK: &str = "spdk-rpc.sock.lock";

/// A built SPDK.
pub(super) struct Spdk {
    folder: PathBuf,
    pub(super) version: String,
}

impl Spdk {
    /// In the folder that `--spdk` names.
    pub(super) fn find(folder: &Path) -> Result<Spdk, String> {
        let folder = std::fs::canonicalize(folder).at(folder)?;
        let program = folder.join("build/bin/vhost");
        if !program.is_file() {
            let program = program.display();
            return Err(format!(
                "--spdk: there is no {program}; build SPDK there first"
            ));
        }
        let version = std::fs::read_to_string(folder.join("VERSION"));
        let version = version.map_or("unknown".to_owned(), |text| text.trim().to_owned());
        Ok(Spdk { folder, version })
    }

    /// Removes what it left when it was killed, which it would not replace itself.
    pub(super) fn clean(run: &Path) {
        for left in [SOCKET, RPC_SOCKET, RPC_LOCK] {
            let _ = std::fs::remove_file(run.join(left));
        }
    }

    /// Writes its configuration, and returns the command line that reads it.
    pub(super) fn command(
        &self,
        run: &Path,
        cpu: &str,
        store: &Store,
    ) -> Result<Vec<String>, String> {
        Spdk::clean(run);
        let config = run.join("spdk.json");
        std::fs::write(&config, configuration(store)).at(&config)?;
        let shown = |path: PathBuf| path.display().to_string();
        let libraries = format!("LD_LIBRARY_PATH={}", shown(self.folder.join("build/lib")));
        let cpus = format!("[{cpu}]");
        let [program, sockets, rpc, config] = [
            self.folder.join("build/bin/vhost"),
            run.to_owned(),
            run.join(RPC_SOCKET),
            config,
        ]
        .map(shown);
        // Without huge pages it serves as well: the driver's memory is not its own.
        let words = [
            "env",
            &libraries,
            &program,
            "-m",
            &cpus,
            "--no-huge",
            "-s",
            "512",
            "--no-pci",
            "-S",
            &sockets,
            "-r",
            &rpc,
            "-c",
            &config,
        ];
        Ok(words.map(str::to_owned).to_vec())
    }
}

/// A disk and its controller.
fn configuration(store: &Store) -> String {
    let (method, disk) = match store {
        Store::Null => (
            "bdev_null_create",
            json!({ "name": "disk", "num_blocks": 1u32 << 18, "block_size": 4096 }),
        ),
        // Of its two drivers for files the faster one at depth 32.
        Store::Disk(path) => (
            "bdev_aio_create",
            json!({ "name": "disk", "filename": path, "block_size": 512 }),
        ),
    };
    let controller = json!({ "ctrlr": SOCKET, "dev_name": "disk" });
    let subsystem = |name: &str, method: &str, params| json!({ "subsystem": name, "config": [{ "method": method, "params": params }] });
    json!({ "subsystems": [
        subsystem("bdev", method, disk),
        subsystem("vhost_blk", "vhost_create_blk_controller", controller),
    ] })
    .to_string()
}
