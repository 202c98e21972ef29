//! Workers come to a pool and leave it beside others, without a trace. A test of its own process, because it counts
//! descriptors.
#![allow(clippy::unwrap_used)] // shared test code lies outside of #[test] functions

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use cleave_disk::{Disk, DiskSpec, OpenOptions};
use cleave_guest::Memory;
use cleave_worker::{Device, Handle, Pool, Split, Tuning, WorkerConfig};
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::sched_getcpu;

fn device(disk: &Arc<Disk>, pool: &Arc<Pool>) -> Arc<Device> {
    let config = WorkerConfig {
        cpus: Vec::new(),
        ops: 256,
    };
    let tuning = Tuning::new(Split::Off);
    let device = Device::new(disk.clone(), [0; 20], true, config, tuning);
    Arc::new(device.in_pool(Some(pool.clone())))
}

fn start(device: Arc<Device>) -> Handle {
    let alarm = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let memory = Memory::new(Vec::new()).unwrap();
    Handle::spawn(0, None, device, memory, Arc::new(alarm)).unwrap()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn a_thousand_workers_come_and_go_beside_one_that_is_busy() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let spec = DiskSpec::Path(file.path().to_owned());
    let file = Arc::new(Disk::open(&spec, &OpenOptions::default()).unwrap());
    let ram = Arc::new(Disk::open(&DiskSpec::Ram(1 << 20), &OpenOptions::default()).unwrap());
    let pool = Pool::new("many", &[sched_getcpu()], || ()).unwrap();
    let busy = start(device(&ram, &pool));
    drop(start(device(&file, &pool)));
    let before = descriptors();
    let (done, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let (is_done, answers) = (&done, &answers);
        let asking = scope.spawn(move || {
            while !is_done.load(Ordering::Relaxed) {
                busy.pass().wait().unwrap();
                answers.fetch_add(1, Ordering::Relaxed);
            }
            busy
        });
        for round in 0..1000 {
            // However late its thread is, it is busy meanwhile.
            while answers.load(Ordering::Relaxed) < round && !asking.is_finished() {
                std::thread::yield_now();
            }
            let round = round as usize;
            let disk = [&file, &ram][round % 2];
            let handle = start(device(disk, &pool));
            handle.pass().wait().unwrap();
        }
        done.store(true, Ordering::Relaxed);
        let _busy = asking.join().unwrap();
        assert_eq!((descriptors(), pool.workers()), (before, vec![1]));
    });
}
