//! A guest moves between two daemons that have one image, as between two hosts with shared storage. Each of them, and the VMM
//! on either side, may die at any moment: each request is answered once, each sector holds the last write, and no two daemons
//! serve the image at a time.
//!
//! `CLEAVE_MOVES` sets the number of moves (default 40), `CLEAVE_TEST_SEED` the seed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cleave_client::{Base, Client, WriteLog};
use cleave_tests::{
    Case, Daemon, Killed, Random, SURVIVOR_DISK_BYTES, Scratch, Survivor, connect, leave, moving,
    prepared, program_path, seeded, wait_until,
};

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        no_request_is_lost_or_repeated_by_moves,
        a_source_that_goes_on_waits_for_its_target,
    ]
}

/// Longest time between two steps of a move.
const STEP_MAX_US: u64 = 10_000;
/// Moves after which the whole disk is read.
const WHOLE_EVERY: u64 = 20;

/// How a move ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Arrives,
    /// The guest was not stopped yet.
    Cancelled,
    /// The target failed when the guest was stopped.
    RolledBack,
    /// As before, and the source's daemon was killed while the guest was stopped.
    RolledBackAnew,
    /// The source's daemon is killed while memory is copied.
    SourceDies,
    /// The target's daemon is killed as soon as the guest runs there.
    TargetDies,
    /// The source's daemon is killed when the guest has left it.
    LeftDies,
}

const FATES: [Fate; 7] = [
    Fate::Arrives,
    Fate::Cancelled,
    Fate::RolledBack,
    Fate::RolledBackAnew,
    Fate::SourceDies,
    Fate::TargetDies,
    Fate::LeftDies,
];

/// A daemon with its socket.
struct Host {
    socket: PathBuf,
    image: PathBuf,
    daemon: Killed,
}

impl Host {
    fn start(scratch: &Scratch, name: &str, image: &Path, random: &mut Random) -> Host {
        let socket = scratch.join(name);
        Host {
            daemon: Host::serve(&socket, image, random),
            socket,
            image: image.to_owned(),
        }
    }

    /// Some read and write through the page cache of the host.
    fn serve(socket: &Path, image: &Path, random: &mut Random) -> Killed {
        let direct = ["on", "off"][random.below(2) as usize];
        let mut command = Command::new(program_path());
        command
            .arg("serve")
            .arg("--socket-path")
            .arg(socket)
            .arg("--disk")
            .arg(image)
            .args(["--start", "inactive", "--queues", "4"])
            .args(["--direct", direct, "--log", "warn"]);
        Killed::start(&mut command)
    }

    fn succeed(&mut self, random: &mut Random) {
        self.daemon.kill();
        self.daemon = Host::serve(&self.socket, &self.image, random);
    }
}

fn step(guest: &mut Survivor, client: &mut Client, random: &mut Random) {
    let time = Duration::from_micros(random.below(STEP_MAX_US));
    guest.work(client, random, time);
}

fn no_request_is_lost_or_repeated_by_moves() {
    let moves = std::env::var("CLEAVE_MOVES").ok();
    let moves = moves.map_or(40, |text| text.parse().unwrap());
    let mut random = seeded("moves");
    let scratch = Scratch::new();
    let image = scratch.image("disk", SURVIVOR_DISK_BYTES);
    let mut hosts = ["here", "there"].map(|name| Host::start(&scratch, name, &image, &mut random));
    let options = moving(4);
    let mut client = connect(|| Client::open(&hosts[0].socket, &options));
    assert!(client.keeps_inflight(), "there is no in-flight region");
    let mut guest = Survivor::new(&mut client);
    let (mut counts, mut stops) = ([0; FATES.len()], Vec::new());
    for number in 0..moves {
        let at = random.below(FATES.len() as u64) as usize;
        let fate = FATES[at];
        counts[at] += 1;
        let [here, there] = &mut hosts;
        step(&mut guest, &mut client, &mut random);
        let mut target = prepared(&there.socket, &client, &options);
        let log = WriteLog::new(client.memory()).unwrap();
        client.start_log(&log).unwrap();
        step(&mut guest, &mut client, &mut random);
        match fate {
            Fate::Cancelled => {
                drop(target);
                client.end_log().unwrap();
            }
            Fate::SourceDies => {
                here.succeed(&mut random);
                connect(|| client.reconnect(&here.socket, &options, Base::Used));
            }
            Fate::RolledBack | Fate::RolledBackAnew => {
                let positions = client.stop().unwrap();
                drop(target);
                if fate == Fate::RolledBackAnew {
                    here.succeed(&mut random);
                    connect(|| client.reconnect(&here.socket, &options, Base::Used));
                } else {
                    client.roll_back(&positions).unwrap();
                }
            }
            Fate::Arrives | Fate::TargetDies | Fate::LeftDies => {
                let stopped = Instant::now();
                let positions = client.stop().unwrap();
                target.take_over(&mut client, &positions).unwrap();
                stops.push(stopped.elapsed());
                // A VMM keeps its connection until it is told that the guest has arrived.
                let left = std::mem::replace(&mut client, target);
                step(&mut guest, &mut client, &mut random);
                match fate {
                    Fate::LeftDies => here.succeed(&mut random),
                    Fate::TargetDies => {
                        there.succeed(&mut random);
                        connect(|| client.reconnect(&there.socket, &options, Base::Used));
                    }
                    _ => {}
                }
                drop(left);
                hosts.swap(0, 1);
            }
        }
        guest.await_all(&mut client, number % 2 == 0);
        guest.verify(&mut client, (number + 1) % WHOLE_EVERY == 0);
    }
    guest.verify(&mut client, true);
    stops.sort_unstable();
    println!(
        "{moves} moves, {:?}: {} requests, 0 lost, 0 twice, {} MiB read back, 0 wrong; from the first vring's stop to the last \
         one's start {:?} (median), {:?} (worst)",
        FATES.iter().zip(counts).collect::<Vec<_>>(),
        guest.answered,
        guest.read_bytes >> 20,
        stops.get(stops.len() / 2),
        stops.last(),
    );
    drop(client);
    hosts.iter_mut().for_each(|host| host.daemon.kill());
}

/// A VMM that wrongly takes its guest back while it runs elsewhere gets no answer, and writes nothing.
fn a_source_that_goes_on_waits_for_its_target() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", SURVIVOR_DISK_BYTES);
    let image = image.to_str().unwrap();
    let hosts = [(); 2].map(|()| Daemon::serve(&["--disk", image, "--start", "inactive"]));
    let options = moving(1);
    let mut source = hosts[0].open(&options);
    source.queue(0).write(0, &[1; 4096]).unwrap();
    let positions = leave(&source);
    // Another guest, so that both can run.
    let mut target = hosts[1].open(&options);
    assert_eq!(first_byte(&mut target), 1, "the source has flushed nothing");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| source.roll_back(&positions).map(|()| source));
        assert!(
            wait_until(|| hosts[0].log_has("waits")),
            "{}",
            hosts[0].log()
        );
        assert!(!waiting.is_finished(), "two daemons serve the disk");
        target.queue(0).write(0, &[2; 4096]).unwrap();
        leave(&target);
        let mut source = waiting.join().unwrap().unwrap();
        assert_eq!(first_byte(&mut source), 2, "the target has flushed nothing");
    });
    drop(target);
    hosts.into_iter().for_each(Daemon::finish);
}

fn first_byte(client: &mut Client) -> u8 {
    let mut found = [0; 4096];
    client.queue(0).read(0, &mut found).unwrap();
    found[0]
}
