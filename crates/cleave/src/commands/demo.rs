//! `cleave demo`: the whole thing on this machine, with nothing to prepare. It makes an image, has it
//! served by a `cleave serve` of its own, drives that with the built-in client, and says what came out.

mod folder;
mod measure;
mod progress;
mod serving;
mod table;

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cleave_client::{Client, DeviceOptions, Error};
use cleave_host::{Failure, runtime};
use tokio::signal::unix::{SignalKind, signal};

use crate::output::print;
use crate::signals::QuitSignals;
use folder::Folder;
use measure::{DemoStep, StepResult};
use serving::Serving;

/// Options of the demonstration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Demo {
    /// End after the table.
    pub(crate) exit: bool,
    /// Size of the image; a multiple of a mebibyte.
    pub(crate) size_bytes: u64,
    /// Length of each measurement.
    pub(crate) time: Duration,
    /// Parent of the temporary folder.
    pub(crate) parent: PathBuf,
}

/// Runs it. Before this returns, with or without an error, the folder is removed and the daemon ended.
pub(crate) fn run(demo: &Demo) -> Result<(), Failure> {
    runtime()?.block_on(async {
        let mut stop = QuitSignals::catch()?;
        let folder = Folder::new(&demo.parent, demo.size_bytes)?;
        let mut serving = serve_image(demo, &folder)?;
        let rows = measure_all(demo, &mut serving, &mut stop).await?;
        print(&table::render(&rows))?;
        if !demo.exit {
            print(&invitation(serving.socket(), reconnect()))?;
            serve_on(&mut serving, &mut stop).await?;
        }
        Ok(())
    })
}

fn serve_image(demo: &Demo, folder: &Folder) -> Result<Serving, Failure> {
    let image = folder.path().join("disk.img");
    File::create_new(&image)
        .and_then(|file| file.set_len(demo.size_bytes))
        .map_err(|error| Failure::run(format!("cannot make {}: {error}", image.display())))?;
    crate::progress::note(&format!(
        "a {} MiB image, served over a socket beside it in {}",
        demo.size_bytes >> 20,
        folder.path().display(),
    ));
    Serving::start(&image, &folder.path().join("cleave.sock"))
}

/// All steps on one connection, in order.
async fn measure_all(
    demo: &Demo,
    serving: &mut Serving,
    stop: &mut QuitSignals,
) -> Result<Vec<StepResult>, Failure> {
    let mut client = connect(serving).await?;
    let mut rows = Vec::new();
    for step in measure::steps(demo.size_bytes, demo.time) {
        let (back, row) = take(&step, client, serving, stop).await?;
        client = back;
        progress::done(&step, &row);
        rows.push(row);
    }
    Ok(rows)
}

/// One step, on a thread of its own, with its progress shown from here.
async fn take(
    step: &DemoStep,
    client: Client,
    serving: &mut Serving,
    stop: &mut QuitSignals,
) -> Result<(Client, StepResult), Failure> {
    let mut running = measure::Running::start(step, client, serving.id())?;
    let mut shown = tokio::time::interval(progress::PAUSE);
    loop {
        tokio::select! {
            biased;
            () = stop.received() => {
                running.abort();
                crate::progress::clear();
                return Err(Failure::run("interrupted; the image is removed"));
            }
            ended = running.ended() => {
                crate::progress::clear();
                return ended.map_err(|why| serving.blame(step.name, &why));
            }
            _ = shown.tick() => progress::show(step, &running.so_far()),
        }
    }
}

/// The daemon needs some milliseconds to make its socket.
async fn connect(serving: &mut Serving) -> Result<Client, Failure> {
    let options = DeviceOptions {
        queues: 1,
        queue_size: 256,
        data_bytes: measure::DATA_BYTES,
        ..DeviceOptions::default()
    };
    let mut tries = 500;
    loop {
        match Client::open(serving.socket(), &options) {
            Ok(client) => return Ok(client),
            Err(error) if tries == 0 || serving.has_ended() => {
                return Err(serving.blame("connecting", &error.to_string()));
            }
            // It makes its socket, and listens a moment later.
            Err(Error::Io { source, .. })
                if matches!(
                    source.kind(),
                    ErrorKind::NotFound | ErrorKind::ConnectionRefused
                ) =>
            {
                tries -= 1
            }
            Err(error) => return Err(serving.blame("connecting", &error.to_string())),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Returns the option by which the QEMU of this machine connects again; a QEMU that is not here is taken for a new one.
fn reconnect() -> &'static str {
    let asked = std::process::Command::new("qemu-system-x86_64")
        .arg("--help")
        .output();
    let help = asked.map(|asked| asked.stdout).unwrap_or_default();
    reconnect_of(&String::from_utf8_lossy(&help))
}

/// QEMU before 9.2 knows seconds alone, and from 10.2 on milliseconds alone. Between the two it lists milliseconds.
fn reconnect_of(help: &str) -> &'static str {
    match help.contains("[,reconnect=seconds]") {
        true => "reconnect=1",
        false => "reconnect-ms=10",
    }
}

/// How to attach a guest. Without `reconnect` the guest's disk would hang after a restart of the daemon.
fn invitation(socket: &Path, reconnect: &str) -> String {
    format!(
        concat!(
            "\nAttach a guest to it (put your own boot disk in the place of BOOT.qcow2):\n\n",
            "  qemu-system-x86_64 -accel kvm -smp 4 -m 2G \\\n",
            "    -object memory-backend-memfd,id=ram,size=2G,share=on \\\n",
            "    -machine q35,memory-backend=ram \\\n",
            "    -drive file=BOOT.qcow2,if=none,id=boot \\\n",
            "    -device virtio-blk-pci,drive=boot,bootindex=1 \\\n",
            "    -chardev socket,id=cleave,path={},{} \\\n",
            "    -device vhost-user-blk-pci,chardev=cleave,num-queues=4\n\n",
            "Serving until Ctrl-C, which removes the image.\n",
        ),
        socket.display(),
        reconnect,
    )
}

async fn serve_on(serving: &mut Serving, stop: &mut QuitSignals) -> Result<(), Failure> {
    let mut child_ended = signal(SignalKind::child())
        .map_err(|error| Failure::run(format!("cannot catch signals: {error}")))?;
    loop {
        // Looked at after the handler stands, so that no end is missed.
        if serving.has_ended() {
            return Err(serving.blame("serving", "it ended by itself"));
        }
        tokio::select! {
            () = stop.received() => return Ok(()),
            _ = child_ended.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_of_the_invitation_reconnects() {
        for (help, option) in [
            ("path[,websocket=on|off][,reconnect=seconds]", "reconnect=1"),
            ("path[,reconnect-ms=milliseconds]", "reconnect-ms=10"),
            ("", "reconnect-ms=10"),
        ] {
            let text = invitation(Path::new("/run/a.sock"), reconnect_of(help));
            let chardev = format!("-chardev socket,id=cleave,path=/run/a.sock,{option} ");
            assert!(text.contains(&chardev), "{help}: {text}");
        }
    }
}
