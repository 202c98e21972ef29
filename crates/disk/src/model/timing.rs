//! Timing of a modelled drive: an event-driven simulation in virtual time.
//!
//! A command is cut into pages. Pages are spread over channels by address. A channel serves one page at a
//! time in order of arrival. A page that is read crosses the shared link afterwards; a page that is written
//! crosses it before. The controller keeps at most `window` pages of one command on the channels. A large
//! command alone therefore uses few channels, and the same bytes in several commands are faster.
//!
//! | event | consequence |
//! |---------|------|
//! | a command arrives | its overhead passes, then it begins; a map update ends there |
//! | a read begins, or a page of it was served | its next page goes to its channel, `window` at a time |
//! | a page was served | the next one waiting for that channel is served; the page crosses the link |
//! | the last page of a read is over the link | the read ends |
//! | a write begins | page by page over the link, then to the channels; ends with its last page there |
//! | a write begins that may be buffered | waits for room, crosses the link as a whole, ends; then it drains to the channels |
//! | a sync begins | ends as soon as the writes that began before it are on the channels |
//!
//! Nothing here reads a clock: the same commands at the same times always complete at the same times.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::Drive;

/// Upper limit of times, so that sums of an operator's values cannot overflow.
const LATEST_NS: u64 = u64::MAX / 4;

/// The kinds of commands that differ in timing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriveWork {
    /// Pages from the channels.
    Read,
    /// Pages to the channels. With `buffered` it completes once the pages are in the write buffer, if the
    /// drive has one that can hold the whole command.
    Write {
        /// Not write-through.
        buffered: bool,
    },
    /// Ends when all writes that began before it are on the channels.
    Sync,
    /// Discard and zero: a map update.
    Map,
}

/// The caller's identification of a command, returned with its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CommandId {
    pub(crate) owner: u16,
    pub(crate) token: u32,
}

/// A command in the drive.
#[derive(Debug)]
struct Command {
    id: CommandId,
    work: DriveWork,
    /// Its number in the order of beginning, by which writes and syncs are compared.
    sequence: u64,
    first_page: u64,
    pages: u64,
    /// Pages sent to the channels, and pages served there.
    issued: u64,
    done: u64,
    /// Lower bound of its end, from its pages on the channels and the link.
    floor_ns: u64,
    /// Reported to the owner already (a buffered write whose pages still drain).
    reported: bool,
}

impl Command {
    /// Pages that have not been sent to channels yet.
    fn unissued(&self) -> u64 {
        self.pages.saturating_sub(self.issued)
    }

    fn is_read(&self) -> bool {
        self.work == DriveWork::Read
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A command's overhead is over.
    Begin(u32),
    /// A page of a command has crossed the link to this channel.
    Arrived(u32, u32),
    /// A channel has served its page.
    Served(u32),
    /// A command's last page has crossed the link.
    End(u32),
}

#[derive(Debug, Default)]
struct Channel {
    /// The command of the page being served, and those of the waiting pages.
    serving: Option<u32>,
    until_ns: u64,
    waiting: VecDeque<u32>,
}

/// A sync that waits for `writes` writes.
#[derive(Debug)]
struct WaitingSync {
    number: u32,
    sequence: u64,
    writes: usize,
}

/// A drive in virtual time.
#[derive(Debug)]
pub struct Timing {
    drive: Drive,
    now_ns: u64,
    channels: Vec<Channel>,
    commands: Vec<Option<Command>>,
    free: Vec<u32>,
    /// The future events; the number orders simultaneous ones.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    ticket: u64,
    sequence: u64,
    link_free_ns: u64,
    noise: u64,
    /// Bytes of the write buffer in use.
    buffered_bytes: u64,
    /// Writes that wait for room in the buffer, in order.
    buffer_waiters: VecDeque<u32>,
    /// Writes that have begun and are not completely on the channels.
    writes: usize,
    waiting_syncs: VecDeque<WaitingSync>,
    finished: VecDeque<CommandId>,
}

impl Timing {
    /// Makes an idle drive.
    pub fn new(drive: Drive) -> Timing {
        let channels = (0..drive.channels.max(1))
            .map(|_| Channel::default())
            .collect();
        Timing {
            noise: drive.seed,
            drive,
            now_ns: 0,
            channels,
            commands: Vec::new(),
            free: Vec::new(),
            events: BinaryHeap::new(),
            ticket: 0,
            sequence: 0,
            link_free_ns: 0,
            buffered_bytes: 0,
            buffer_waiters: VecDeque::new(),
            writes: 0,
            waiting_syncs: VecDeque::new(),
            finished: VecDeque::new(),
        }
    }

    /// Changes the parameters from the next page on, as if the drive aged or were throttled. Its geometry
    /// (channels, page, seed) stays, because commands in flight were cut by it.
    pub fn change(&mut self, drive: Drive) {
        self.drive = Drive {
            channels: self.drive.channels,
            page_bytes: self.drive.page_bytes,
            seed: self.drive.seed,
            ..drive
        };
    }

    /// Returns the drive's parameters.
    pub fn drive(&self) -> &Drive {
        &self.drive
    }

    /// Submits a command at `now_ns`; [`Timing::finished`] returns `token`.
    pub fn submit(
        &mut self,
        now_ns: u64,
        token: u32,
        work: DriveWork,
        offset_bytes: u64,
        len_bytes: u64,
    ) {
        let id = CommandId { owner: 0, token };
        self.submit_for(now_ns, id, work, offset_bytes, len_bytes);
    }

    /// Returns the time of the next event; `None`: the drive is idle.
    pub fn next_ns(&self) -> Option<u64> {
        self.events.peek().map(|Reverse((at, ..))| *at)
    }

    /// Advances the time. An earlier time than before has no effect.
    pub fn advance(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns.min(LATEST_NS));
        while let Some(&Reverse((at, _, event))) = self.events.peek() {
            if at > self.now_ns {
                break;
            }
            self.events.pop();
            match event {
                Event::Begin(number) => self.begin(at, number),
                Event::Arrived(channel, number) => self.enqueue(at, channel, number),
                Event::Served(channel) => self.served(at, channel),
                Event::End(number) => self.end(number),
            }
        }
    }

    /// Returns the next completed command, in order of completion.
    pub fn finished(&mut self) -> Option<u32> {
        self.finished_for_any().map(|id| id.token)
    }

    pub(crate) fn finished_for_any(&mut self) -> Option<CommandId> {
        self.finished.pop_front()
    }

    /// Submits like `submit`, for one of several owners. Returns the number that `floor_ns` accepts.
    pub(crate) fn submit_for(
        &mut self,
        now_ns: u64,
        id: CommandId,
        work: DriveWork,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> u32 {
        self.advance(now_ns);
        let begin_ns = self.now_ns.saturating_add(self.drive.command_ns);
        let page_bytes = u64::from(self.drive.page_bytes.max(1));
        let first_page = offset_bytes / page_bytes;
        let end_page = offset_bytes.saturating_add(len_bytes).div_ceil(page_bytes);
        let pages = match work {
            DriveWork::Read | DriveWork::Write { .. } => end_page.saturating_sub(first_page).max(1),
            DriveWork::Sync | DriveWork::Map => 0,
        };
        let number = self.insert(Command {
            id,
            work,
            sequence: 0,
            first_page,
            pages,
            issued: 0,
            done: 0,
            floor_ns: begin_ns,
            reported: false,
        });
        self.schedule(begin_ns, Event::Begin(number));
        number
    }

    /// Returns a lower bound for the command's completion time. Later submissions can only delay the command, so it is safe to
    /// sleep until then; only `change` can make the bound too late.
    pub(crate) fn floor_ns(&self, number: u32) -> Option<u64> {
        let next_ns = self.next_ns()?;
        let command = self.commands.get(number as usize)?.as_ref()?;
        let page_ns = self.drive.least_ns(self.drive.page_ns(command.is_read()));
        // Each page that has not been issued follows another of the same command.
        let rounds = match command.work {
            DriveWork::Read | DriveWork::Write { buffered: false } => command
                .unissued()
                .div_ceil(u64::from(self.drive.window.max(1))),
            DriveWork::Write { buffered: true } | DriveWork::Sync | DriveWork::Map => 0,
        };
        let issued_ns = next_ns.saturating_add(rounds.saturating_mul(page_ns));
        Some(command.floor_ns.max(issued_ns))
    }

    fn insert(&mut self, command: Command) -> u32 {
        let number = self.free.pop().unwrap_or_else(|| {
            self.commands.push(None);
            // At most the commands in flight, which are far below 2^32.
            (self.commands.len() - 1) as u32
        });
        if let Some(place) = self.commands.get_mut(number as usize) {
            *place = Some(command);
        }
        number
    }

    fn schedule(&mut self, at_ns: u64, event: Event) {
        self.ticket += 1;
        self.events
            .push(Reverse((at_ns.min(LATEST_NS), self.ticket, event)));
    }

    fn command(&mut self, number: u32) -> Option<&mut Command> {
        self.commands.get_mut(number as usize)?.as_mut()
    }

    fn begin(&mut self, now_ns: u64, number: u32) {
        self.sequence += 1;
        let (sequence, writes) = (self.sequence, self.writes);
        let buffer_bytes = self.drive.write_buffer_bytes;
        let page_bytes = u64::from(self.drive.page_bytes);
        let Some(command) = self.command(number) else {
            return;
        };
        command.sequence = sequence;
        match &mut command.work {
            DriveWork::Read => self.issue_window(now_ns, number),
            DriveWork::Write { buffered } => {
                *buffered &= command.pages.saturating_mul(page_bytes) <= buffer_bytes;
                let is_buffered = *buffered;
                self.writes += 1;
                if is_buffered {
                    self.buffer_waiters.push_back(number);
                    self.admit_writes(now_ns);
                } else {
                    self.issue_window(now_ns, number);
                }
            }
            DriveWork::Map => self.end(number),
            DriveWork::Sync if writes == 0 => self.end(number),
            DriveWork::Sync => self.waiting_syncs.push_back(WaitingSync {
                number,
                sequence,
                writes,
            }),
        }
    }

    /// Moves writes into the buffer, in order, while there is room. Each fitted into an empty buffer when it
    /// began. If `change` has made the buffer smaller since, an empty one accepts it nevertheless.
    fn admit_writes(&mut self, now_ns: u64) {
        let page_bytes = u64::from(self.drive.page_bytes);
        while let Some(&number) = self.buffer_waiters.front() {
            let Some(command) = self.command(number) else {
                self.buffer_waiters.pop_front();
                continue;
            };
            let (pages, bytes) = (command.pages, command.pages.saturating_mul(page_bytes));
            let full_bytes = self.buffered_bytes.saturating_add(bytes);
            if self.buffered_bytes > 0 && full_bytes > self.drive.write_buffer_bytes {
                return;
            }
            self.buffer_waiters.pop_front();
            self.buffered_bytes = full_bytes;
            let at_ns = self.cross_link(now_ns, pages);
            if let Some(command) = self.command(number) {
                command.floor_ns = at_ns;
            }
            self.schedule(at_ns, Event::End(number));
            self.issue_window(now_ns, number);
        }
    }

    /// Returns the time at which `pages` pages that are at the link now have crossed it.
    fn cross_link(&mut self, now_ns: u64, pages: u64) -> u64 {
        let link_ns = self.drive.link_ns.saturating_mul(pages);
        self.link_free_ns = self.link_free_ns.max(now_ns).saturating_add(link_ns);
        self.link_free_ns
    }

    fn issue_window(&mut self, now_ns: u64, number: u32) {
        let pages = self.command(number).map_or(0, |command| command.pages);
        for _ in 0..pages.min(u64::from(self.drive.window.max(1))) {
            self.issue_page(now_ns, number);
        }
    }

    /// Sends the next page of a command, if it has one left.
    fn issue_page(&mut self, now_ns: u64, number: u32) {
        let Some(command) = self.command(number) else {
            return;
        };
        if command.unissued() == 0 {
            return;
        }
        let page = command.first_page.saturating_add(command.issued);
        let work = command.work;
        command.issued += 1;
        let channel = self.channel_of(page);
        if work == (DriveWork::Write { buffered: false }) {
            let at_ns = self.cross_link(now_ns, 1);
            self.schedule(at_ns, Event::Arrived(channel, number));
        } else {
            self.enqueue(now_ns, channel, number);
        }
    }

    /// Returns the channel of a page. Adjacent pages are on adjacent channels; each group of 256 pages begins at another channel.
    fn channel_of(&self, page: u64) -> u32 {
        let shift = mix(self.drive.seed ^ mix(page >> 8));
        (page.wrapping_add(shift) % self.channels.len() as u64) as u32
    }

    fn enqueue(&mut self, now_ns: u64, channel: u32, number: u32) {
        let Some(is_read) = self.command(number).map(|command| command.is_read()) else {
            return;
        };
        let own_ns = self.drive.page_ns(is_read);
        let any_ns = own_ns.min(self.drive.page_ns(!is_read));
        let (own_ns, any_ns) = (self.drive.least_ns(own_ns), self.drive.least_ns(any_ns));
        let Some(entry) = self.channels.get_mut(channel as usize) else {
            return;
        };
        if entry.serving.is_none() {
            return self.serve(now_ns, channel, number);
        }
        let ahead_ns = any_ns.saturating_mul(entry.waiting.len() as u64);
        entry.waiting.push_back(number);
        let floor_ns = entry
            .until_ns
            .saturating_add(ahead_ns)
            .saturating_add(own_ns);
        self.raise_floor(number, floor_ns);
    }

    fn serve(&mut self, now_ns: u64, channel: u32, number: u32) {
        let is_read = self.command(number).is_none_or(|command| command.is_read());
        let ns = self.jittered(self.drive.page_ns(is_read));
        let until_ns = now_ns.saturating_add(ns);
        if let Some(entry) = self.channels.get_mut(channel as usize) {
            entry.serving = Some(number);
            entry.until_ns = until_ns;
        }
        self.raise_floor(number, until_ns);
        self.schedule(until_ns, Event::Served(channel));
    }

    /// Notes that a page of the command is on a channel until `floor_ns`. A buffered write ends without its pages.
    fn raise_floor(&mut self, number: u32, floor_ns: u64) {
        if let Some(command) = self.command(number)
            && command.work != (DriveWork::Write { buffered: true })
        {
            command.floor_ns = command.floor_ns.max(floor_ns);
        }
    }

    fn jittered(&mut self, ns: u64) -> u64 {
        self.noise = self.noise.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let spread = i128::from(mix(self.noise) % 2001) - 1000;
        let jitter = i128::from(ns) * spread * i128::from(self.drive.jitter_per_mille) / 1_000_000;
        (i128::from(ns) + jitter).max(0) as u64
    }

    fn served(&mut self, now_ns: u64, channel: u32) {
        let Some(entry) = self.channels.get_mut(channel as usize) else {
            return;
        };
        let (served, next) = (entry.serving.take(), entry.waiting.pop_front());
        if let Some(next) = next {
            self.serve(now_ns, channel, next);
        }
        if let Some(number) = served {
            self.issue_page(now_ns, number);
            self.page_done(now_ns, number);
        }
    }

    fn page_done(&mut self, now_ns: u64, number: u32) {
        let Some(command) = self.command(number) else {
            return;
        };
        command.done += 1;
        let is_last = command.done == command.pages;
        match command.work {
            DriveWork::Read => {
                let at_ns = self.cross_link(now_ns, 1);
                self.raise_floor(number, at_ns);
                if is_last {
                    self.schedule(at_ns, Event::End(number));
                }
            }
            DriveWork::Write { buffered: false } if is_last => {
                self.write_done(number);
                self.end(number);
            }
            DriveWork::Write { buffered: true } => self.drained(now_ns, number, is_last),
            DriveWork::Write { .. } | DriveWork::Sync | DriveWork::Map => {}
        }
    }

    /// Handles a page of a buffered write that has left the buffer.
    fn drained(&mut self, now_ns: u64, number: u32, is_last: bool) {
        let page_bytes = u64::from(self.drive.page_bytes);
        self.buffered_bytes = self.buffered_bytes.saturating_sub(page_bytes);
        if is_last {
            self.write_done(number);
            if self.command(number).is_some_and(|command| command.reported) {
                self.forget(number);
            }
        }
        self.admit_writes(now_ns);
    }

    /// Handles a write that is completely on the channels: the syncs that began after it wait for one write less.
    fn write_done(&mut self, number: u32) {
        let Some(sequence) = self.command(number).map(|command| command.sequence) else {
            return;
        };
        self.writes = self.writes.saturating_sub(1);
        for sync in &mut self.waiting_syncs {
            if sequence < sync.sequence {
                sync.writes = sync.writes.saturating_sub(1);
            }
        }
        // An earlier sync waits for fewer writes, so syncs end in order.
        while let Some(sync) = self.waiting_syncs.front()
            && sync.writes == 0
        {
            let number = sync.number;
            self.waiting_syncs.pop_front();
            self.end(number);
        }
    }

    /// Reports the end to the owner. A buffered write that still drains is kept.
    fn end(&mut self, number: u32) {
        let Some(command) = self.command(number) else {
            return;
        };
        command.reported = true;
        let (id, drains) = (command.id, command.done < command.pages);
        self.finished.push_back(id);
        if !drains {
            self.forget(number);
        }
    }

    fn forget(&mut self, number: u32) {
        if let Some(place) = self.commands.get_mut(number as usize)
            && place.take().is_some()
        {
            self.free.push(number);
        }
    }
}

/// Returns the final step of SplitMix64, which spreads adjacent values far apart.
fn mix(value: u64) -> u64 {
    let z = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests;
