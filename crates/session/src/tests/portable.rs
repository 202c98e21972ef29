//! The state of the device, which moves to another host with its guest.

use std::io::{PipeReader, PipeWriter, pipe};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use cleave_tests::Scratch;

use super::*;
use crate::portable::PortableState;

const SAVE: u32 = 0;
const LOAD: u32 = 1;
/// "No descriptor comes back", with success and with an error.
const BEGUN: u64 = 0x100;
const NOT_BEGUN: u64 = 0x101;

impl Frontend {
    /// Begins a transfer through this descriptor.
    fn transfer(&mut self, direction: u32, fd: impl AsFd) -> u64 {
        let payload = words(&[direction, 0]);
        self.send(Req::SET_DEVICE_STATE_FD, &payload, &[fd.as_fd()]);
        let (replied, payload) = self.reply().unwrap();
        assert_eq!(replied, u32::from(Req::SET_DEVICE_STATE_FD));
        message::long(&payload, 0)
    }

    fn check_state(&mut self) -> u64 {
        self.ask_number(Req::CHECK_DEVICE_STATE)
    }

    fn save(&mut self) -> Vec<u8> {
        let (mut reader, writer): (PipeReader, PipeWriter) = pipe().unwrap();
        assert_eq!(self.transfer(SAVE, &writer), BEGUN);
        drop(writer);
        let mut state = Vec::new();
        reader.read_to_end(&mut state).unwrap();
        assert_eq!(self.check_state(), 0);
        state
    }

    /// Returns the answer to CHECK_DEVICE_STATE after these bytes.
    fn load(&mut self, state: &[u8]) -> u64 {
        let (reader, mut writer): (PipeReader, PipeWriter) = pipe().unwrap();
        assert_eq!(self.transfer(LOAD, &reader), BEGUN);
        writer.write_all(state).unwrap();
        drop((reader, writer));
        self.check_state()
    }

    fn is_writeback(&self) -> bool {
        self.device.writeback.load(Ordering::Relaxed)
    }
}

/// The order of Cloud Hypervisor: the vrings are disabled, then stopped, then the state is saved. The other daemon gets the state
/// before its vrings, and continues at their positions.
#[test]
fn a_guest_moves_with_its_vrings_and_its_cache_mode() {
    let mut source = Frontend::with_memory();
    let mut drivers: Vec<_> = (0..2).map(|index| source.drive(index)).collect();
    for driver in &mut drivers {
        (0..3).for_each(|_| driver.request());
    }
    let mode = [&words(&[32, 1, 0])[..], &[0]].concat();
    assert_eq!(source.request(Req::SET_CONFIG, &mode), Ack);
    for index in 0..2 {
        assert_eq!(
            source.request(Req::SET_VRING_ENABLE, &words(&[index, 0])),
            Ack
        );
    }
    let bases: Vec<_> = (0..2).map(|index| source.base(index).unwrap()).collect();
    assert_eq!(bases, [(0, 3), (1, 3)]);
    let state = source.save();
    assert_eq!(source.save(), state, "it can be saved again");
    let memory = source.memory.try_clone().unwrap();
    source.end();

    let mut target = Frontend::negotiated();
    target.memory = memory;
    assert_eq!(target.add_memory(0, MEM_BYTES, USER), Ack);
    assert!(target.is_writeback());
    assert_eq!(target.load(&state), 0);
    for (driver, (_, base)) in drivers.iter_mut().zip(bases) {
        target.configure_at(driver, base);
        let enabled = target.request(Req::SET_VRING_ENABLE, &words(&[driver.index, 1]));
        assert_eq!(enabled, Ack);
        (0..2).for_each(|_| driver.request());
    }
    assert!(!target.is_writeback(), "the mode of the guest");
    target.end();
}

#[test]
fn a_target_that_is_write_through_stays_so() {
    let mut source = Frontend::negotiated();
    let state = source.save();
    source.end();
    let target = Frontend::connect_to(write_through(), Arc::default());
    let mut target = target.negotiate().share_memory();
    assert_eq!(target.load(&state), 0);
    assert_eq!(target.start(0), Ack);
    assert!(!target.is_writeback());
    target.end();
}

#[test]
fn a_state_of_another_disk_or_no_state_is_refused_and_changes_nothing() {
    let mut frontend = Frontend::negotiated();
    let state = frontend.save();
    let other = PortableState {
        capacity_bytes: CAPACITY + 512,
        writeback: false,
        ..PortableState::parse(&state).unwrap()
    };
    let long = [&state[..], &[0; 100_000]].concat();
    for (what, bytes) in [
        ("another size", &other.to_bytes()[..]),
        ("nothing", &[]),
        ("the beginning", &state[..20]),
        ("more than a state", &long[..60_000]),
    ] {
        assert_eq!(frontend.load(bytes), 1, "{what}");
        assert!(frontend.is_writeback(), "{what}");
    }
    assert_eq!(frontend.load(&state), 0, "the connection goes on");
    assert_eq!(frontend.check_state(), 1, "nothing was transferred since");
    assert!(matches!(frontend.end(), Ending::HungUp));
}

#[test]
fn no_state_is_transferred_while_a_vring_runs_nor_in_an_unknown_way() {
    let mut frontend = Frontend::with_memory();
    let (reader, _writer): (PipeReader, PipeWriter) = pipe().unwrap();
    assert_eq!(frontend.transfer(2, &reader), NOT_BEGUN);
    assert_eq!(frontend.start(0), Ack);
    for direction in [SAVE, LOAD] {
        assert_eq!(frontend.transfer(direction, &reader), NOT_BEGUN);
    }
    assert_eq!(frontend.check_state(), 1);
    frontend.base(0).unwrap();
    frontend.save();
    // Messages of another form end the connection.
    frontend.send(Req::SET_DEVICE_STATE_FD, &words(&[SAVE, 0]), &[]);
    assert!(!frontend.is_alive());
}

#[test]
fn a_descriptor_of_another_kind_fails_the_transfer_alone() {
    let mut frontend = Frontend::negotiated();
    let (reader, writer): (PipeReader, PipeWriter) = pipe().unwrap();
    drop(reader);
    let folder = File::open("/").unwrap();
    let empty = File::open("/dev/null").unwrap();
    for (direction, fd) in [
        (SAVE, writer.as_fd()),
        (SAVE, folder.as_fd()),
        (LOAD, folder.as_fd()),
        (LOAD, empty.as_fd()),
    ] {
        assert_eq!(frontend.transfer(direction, fd), BEGUN);
        assert_eq!(frontend.check_state(), 1);
    }
    assert_eq!(frontend.save().len(), PortableState::BYTES);
    frontend.end();
}

#[test]
fn a_state_that_never_comes_is_given_up() {
    let mut frontend = Frontend::negotiated();
    let (reader, _writer): (PipeReader, PipeWriter) = pipe().unwrap();
    assert_eq!(frontend.transfer(LOAD, &reader), BEGUN);
    assert_eq!(frontend.check_state(), 1);
    assert_eq!(frontend.save().len(), PortableState::BYTES);
    frontend.end();
}

#[test]
fn a_transfer_that_is_never_checked_ends_when_the_guest_runs() {
    let mut frontend = Frontend::with_memory();
    let (reader, _writer): (PipeReader, PipeWriter) = pipe().unwrap();
    assert_eq!(frontend.transfer(LOAD, &reader), BEGUN);
    assert!(frontend.remote.view().obstacle.is_some());
    let _driver = frontend.drive(0);
    assert_eq!(frontend.remote.view().obstacle, None);
    assert_eq!(frontend.check_state(), 1);
}

/// Otherwise a frontend could keep all threads of the disk that the other frontend needs too.
#[test]
fn a_transfer_that_is_replaced_frees_its_thread() {
    let mut frontend = Frontend::negotiated();
    let pipes: Vec<_> = (0..20).map(|_| pipe().unwrap()).collect();
    for (reader, _writer) in &pipes {
        assert_eq!(frontend.transfer(LOAD, reader), BEGUN);
    }
}

/// The possession of a disk that another host has, and may have enlarged.
#[derive(Debug)]
struct Elsewhere {
    disk: Arc<Disk>,
    /// Storage that does not answer: looks at the size that do not end.
    stuck: Option<Mutex<Vec<SyncSender<()>>>>,
}

impl Possession for Elsewhere {
    fn is_here(&self) -> bool {
        false
    }

    fn hand_over(&self) {
        panic!("it is not here");
    }

    fn hand_over_failed(&self) {
        panic!("it is not here");
    }

    fn take(&self) -> Result<bool, String> {
        Ok(false)
    }

    fn look(&self) -> Option<Receiver<()>> {
        let (looks, look) = sync_channel(0);
        match &self.stuck {
            Some(stuck) => stuck.lock().unwrap().push(looks),
            None => {
                let disk = self.disk.clone();
                std::thread::spawn(move || {
                    // Longer than the session waits between two looks if it has to end.
                    std::thread::sleep(Duration::from_millis(100));
                    disk.refresh().unwrap();
                    drop(looks);
                });
            }
        }
        Some(look)
    }
}

/// Connects the frontend of a disk that another host has. Returns it with the file of the disk.
fn elsewhere(scratch: &Scratch, stuck: Option<Mutex<Vec<SyncSender<()>>>>) -> (Frontend, File) {
    let path = scratch.image("disk", CAPACITY);
    let device = device_of(&DiskSpec::Path(path.clone()));
    let owners = Owners::of(Arc::new(Elsewhere {
        disk: device.disk.clone(),
        stuck,
    }));
    let frontend = Frontend::connect_to(device, Arc::new(owners)).negotiate();
    (frontend, File::options().write(true).open(path).unwrap())
}

#[test]
fn a_state_fits_a_disk_that_has_grown_at_the_other_host() {
    let scratch = Scratch::new();
    let (mut frontend, file) = elsewhere(&scratch, None);
    let grown = PortableState {
        capacity_bytes: 2 * CAPACITY,
        ..PortableState::parse(&frontend.save()).unwrap()
    };
    assert_eq!(frontend.load(&grown.to_bytes()), 1);
    file.set_len(2 * CAPACITY).unwrap();
    assert_eq!(frontend.load(&grown.to_bytes()), 0);
    assert_eq!(
        message::long(&frontend.config(0, 8).unwrap(), 12),
        2 * CAPACITY / 512
    );
}

#[test]
fn storage_that_does_not_answer_holds_no_state_up() {
    let scratch = Scratch::new();
    let (mut frontend, _file) = elsewhere(&scratch, Some(Mutex::default()));
    let state = frontend.save();
    assert_eq!(frontend.load(&state), 0, "the size that was known");
    assert!(matches!(frontend.end(), Ending::HungUp));
}
