//! Shared steps of the hostile tables.

use std::fmt::Display;
use std::time::{Duration, Instant};

use cleave_blk::spec::{feature, request_type as kind};
use cleave_client::{
    Client, Descriptor, DeviceOptions, DriverRing, Error, Frontend, Queue, ReapWait, Used, all_are,
    first_other,
};
use cleave_tests::{
    Daemon, Outcome, ensure, exercise_queue, header, small, time_limit, wait_until,
};

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// Filler of guest memory that the daemon must not write.
pub(crate) const UNTOUCHED: u8 = 0xa5;
/// Filler of the first MiB of the disk.
pub(crate) const ON_DISK: u8 = 0x3c;

/// Turns any error into the failure of a row.
pub(crate) fn context<T, E: Display>(result: Result<T, E>, doing: &str) -> Result<T, String> {
    result.map_err(|error| format!("{doing}: {error}"))
}

/// Opens a client with two vrings: vring 0 misbehaves, and vring 1 must not be affected.
pub(crate) fn open(daemon: &Daemon) -> Result<Client, String> {
    open_with(daemon, &small(2))
}

/// As `open`, with options.
pub(crate) fn open_with(daemon: &Daemon, options: &DeviceOptions) -> Result<Client, String> {
    context(daemon.try_open(options), "open")
}

/// Connects. The previous session may still be draining; the daemon refuses connections until it has ended.
pub(crate) fn frontend(daemon: &Daemon) -> Result<Frontend, Error> {
    let end = Instant::now() + time_limit();
    loop {
        let made = Frontend::connect(daemon.socket(), time_limit());
        let made = made.and_then(|frontend| frontend.features().map(|_| frontend));
        match made {
            Err(_) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(1));
            }
            other => return other,
        }
    }
}

/// A frontend that has negotiated features and has sent no memory yet.
pub(crate) fn negotiated(daemon: &Daemon) -> Result<Frontend, String> {
    let mut bare = context(frontend(daemon), "connect")?;
    let offered = context(bare.features(), "features")?;
    context(bare.set_owner(), "owner")?;
    let protocol = context(bare.protocol_features(), "protocol features")?;
    context(bare.set_protocol_features(protocol), "protocol features")?;
    // Without the marking of pages, since it has no log.
    context(bare.set_features(offered & !(1 << 26)), "features")?;
    Ok(bare)
}

/// Checks that the vring is retired, that its err descriptor is signalled, and that the other vring works.
pub(crate) fn expect_retired(client: &mut Client) -> Outcome {
    let signalled = client.queue(0).err_signalled(time_limit());
    ensure(signalled, || "the err descriptor was not signalled".into())?;
    check_other_vring(client)
}

/// Checks that the other vring works.
pub(crate) fn check_other_vring(client: &mut Client) -> Outcome {
    exercise_queue(client, 1).map_err(|what| format!("the other vring: {what}"))
}

/// As `check_other_vring`, but the daemon may also close the whole connection at any moment.
pub(crate) fn check_other_vring_or_closed(client: &mut Client) -> Outcome {
    let is_gone = |client: &mut Client| client.frontend().features().is_err();
    if is_gone(client) {
        return Ok(());
    }
    check_other_vring(client).or_else(|what| match is_gone(client) {
        true => Ok(()),
        false => Err(what),
    })
}

/// Checks that both vrings work.
pub(crate) fn check_both_vrings(client: &mut Client) -> Outcome {
    exercise_queue(client, 0).map_err(|what| format!("the vring: {what}"))?;
    check_other_vring(client)
}

/// Checks that the vring still completes requests or has been retired. Either is permitted; a hang is not.
pub(crate) fn check_served_or_retired(client: &mut Client) -> Outcome {
    let retired = client.queue(0).err_signalled(Duration::from_millis(20));
    if !retired {
        // The daemon may retire it during this wait, which then times out. The disk may be late as well.
        client.queue(0).set_timeout(Duration::from_secs(5));
        let served = exercise_queue(client, 0);
        let queue = client.queue(0);
        let ended = served.is_ok()
            || wait_until(|| queue.err_signalled(Duration::ZERO) || queue.ring().reap().is_some());
        ensure(ended, || format!("neither served nor retired: {served:?}"))?;
    }
    check_other_vring(client)
}

/// Addresses of the parts of a chain.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts {
    pub(crate) header: u64,
    pub(crate) status: u64,
    pub(crate) data: u64,
    /// Space for indirect tables, 512 KiB after the data.
    pub(crate) table: u64,
}

impl Parts {
    pub(crate) fn of(queue: &Queue) -> Parts {
        let (header, status) = queue.control();
        let (data, _) = queue.data_area();
        Parts {
            header,
            status,
            data,
            table: data + (512 << 10),
        }
    }

    /// Header, 512 bytes of data and status, as descriptors 0, 1, 2.
    pub(crate) fn usual(self) -> [Descriptor; 3] {
        [
            entry(self.header, 16, NEXT, 1),
            entry(self.data, 512, NEXT | WRITE, 2),
            entry(self.status, 1, WRITE, 0),
        ]
    }

    /// Header, buffers that the device is to write (address and length), and status.
    pub(crate) fn read_into(
        self,
        buffers: impl IntoIterator<Item = (u64, u32)>,
    ) -> Vec<Descriptor> {
        let [first, _, status] = self.usual();
        let mut table = vec![first];
        for (next, (addr, len)) in (2..).zip(buffers) {
            table.push(entry(addr, len, NEXT | WRITE, next));
        }
        table.push(status);
        table
    }
}

/// A descriptor with these fields, in their order in memory.
pub(crate) fn entry(addr: u64, len: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor {
        addr,
        len,
        flags,
        next,
    }
}

/// One hostile chain.
pub(crate) struct HostileChain {
    /// Request type in the header.
    pub(crate) kind: u32,
    /// The descriptor table from its start; the head is 0.
    pub(crate) table: Vec<Descriptor>,
    /// Contents at `Parts::table`.
    pub(crate) indirect: Vec<Descriptor>,
}

/// Result of a chain.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChainResult {
    pub(crate) used: Used,
    pub(crate) status: u8,
}

/// Writes a chain by hand, and waits for its used entry.
pub(crate) fn fire(queue: &mut Queue, shot: &HostileChain) -> Result<ChainResult, String> {
    let parts = Parts::of(queue);
    let memory = queue.memory();
    memory.fill(parts.data, 512 << 10, UNTOUCHED);
    memory.write(parts.header, &header(shot.kind, 0));
    memory.fill(parts.status, 1, 0xff);
    for (index, entry) in shot.indirect.iter().enumerate() {
        memory.write(parts.table + 16 * index as u64, &entry.to_bytes());
    }
    let ring = queue.ring();
    for (index, entry) in (0u16..).zip(&shot.table) {
        ring.write_descriptor(index, *entry);
    }
    ring.push(0);
    ring.publish();
    queue.ring_kick();
    let used = context(queue.wait_used(), "the chain did not complete")?;
    ensure(used.head == 0, || format!("head {} came back", used.head))?;
    queue.ring().free_all();
    Ok(ChainResult {
        used,
        status: memory.bytes(parts.status, 1)[0],
    })
}

/// Expected result of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expect {
    /// An error status with used length 1, or used length 0 if the status byte cannot be located.
    Refused,
    /// Used length 0: there is no status byte.
    NoStatus,
    /// Status OK with this used length.
    Served(u32),
    /// Any of these: the specification does not decide.
    Any,
}

/// Sends a chain on a fresh client. Checks its result, that nothing else was written, and that both vrings still
/// work.
pub(crate) fn shoot(
    daemon: &Daemon,
    expect: Expect,
    aim: impl Fn(Parts) -> HostileChain,
) -> Outcome {
    let mut client = open(daemon)?;
    fill_disk(&mut client)?;
    let parts = Parts::of(client.queue(0));
    let shot = aim(parts);
    let hit = fire(client.queue(0), &shot)?;
    judge(expect, hit)?;
    if matches!(expect, Expect::Refused | Expect::NoStatus) {
        let data = client.memory().bytes(parts.data, 512 << 10);
        let changed = first_other(&data, UNTOUCHED);
        // A refused chain may write only its status byte, which may lie inside the data area.
        let allowed = changed.is_none_or(|at| {
            let status = shot.status_in(parts);
            status == Some(at) && all_are(&data[at + 1..], UNTOUCHED)
        });
        ensure(allowed, || {
            format!("guest memory was written at {changed:?}")
        })?;
        check_disk(&mut client)?;
    }
    check_both_vrings(&mut client)
}

impl HostileChain {
    /// A read with this descriptor table.
    pub(crate) fn read(table: Vec<Descriptor>) -> HostileChain {
        HostileChain {
            kind: kind::IN,
            table,
            indirect: Vec::new(),
        }
    }

    /// A read through one descriptor, which is to lead to `indirect`.
    pub(crate) fn read_through(entry: Descriptor, indirect: Vec<Descriptor>) -> HostileChain {
        HostileChain {
            indirect,
            ..HostileChain::read(vec![entry])
        }
    }

    /// Offset of the chain's last writable byte in the data area, if it lies there.
    fn status_in(&self, parts: Parts) -> Option<usize> {
        let mut all = self.table.iter().chain(&self.indirect);
        let last = all.rfind(|entry| entry.flags & WRITE != 0 && entry.len > 0)?;
        let end = last.addr.checked_add(u64::from(last.len))? - 1;
        let at = end.checked_sub(parts.data)?;
        (at < (512 << 10)).then_some(at as usize)
    }
}

pub(crate) fn judge(expect: Expect, hit: ChainResult) -> Outcome {
    let fair = match expect {
        Expect::Refused => {
            hit.used.len == 0 && matches!(hit.status, 0xff | 1 | 2)
                || hit.used.len == 1 && matches!(hit.status, 1 | 2 | 0xff)
        }
        Expect::NoStatus => hit.used.len == 0,
        Expect::Served(len) => hit.used.len == len && hit.status == 0,
        Expect::Any => true,
    };
    ensure(fair, || format!("{hit:?} where {expect:?} is due"))
}

/// Fills the first MiB of the disk through vring 1.
pub(crate) fn fill_disk(client: &mut Client) -> Outcome {
    context(
        client.queue(1).write(0, &[ON_DISK; 64 << 10]),
        "fill the disk",
    )
}

/// Checks that this MiB has not changed.
pub(crate) fn check_disk(client: &mut Client) -> Outcome {
    let mut back = vec![0; 64 << 10];
    context(client.queue(1).read(0, &mut back), "read the disk")?;
    let changed = back.iter().position(|byte| *byte != ON_DISK);
    ensure(changed.is_none(), || {
        format!("the disk was changed at byte {changed:?}")
    })
}

/// Waits for so many completions; returns how many arrived.
pub(crate) fn settle(ring: &mut DriverRing, count: usize) -> usize {
    settle_within(ring, count, time_limit())
}

/// As `settle`, with a time limit.
pub(crate) fn settle_within(ring: &mut DriverRing, count: usize, time: Duration) -> usize {
    let end = Instant::now() + time;
    let mut seen = 0;
    while seen < count && Instant::now() < end {
        match ring.reap() {
            Some(_) => seen += 1,
            None => std::thread::sleep(Duration::from_micros(50)),
        }
    }
    seen
}

/// Options for a client that polls its first vring and never sleeps on it.
pub(crate) fn polling() -> DeviceOptions {
    DeviceOptions {
        wait: ReapWait::Poll,
        ..small(2)
    }
}

/// Restarts vring 0 from the beginning in its old memory.
pub(crate) fn restart(client: &mut Client) -> Outcome {
    let layout = client.queue(0).ring().layout();
    let memory = client.memory().clone();
    let event_idx = client.features() & feature::EVENT_IDX != 0;
    let fresh = DriverRing::new(&memory, layout, event_idx, 0);
    *client.queue(0).ring() = context(fresh, "lay the ring out")?;
    client.queue(0).err_signalled(Duration::ZERO);
    context(client.resume_queue(0, 0), "start again")
}
