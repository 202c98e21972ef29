//! A worker's command queue. A session sends commands to each of its workers, and the registry sends those of the operator to all
//! workers of a disk. The tuning, and that the disk is quiesced, are not commands: they hold for later workers too, so they are a
//! state of the registry.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use cleave_engine::BellFd;
use cleave_guest::{Memory, VringError, VringLog};
use rustix::event::{EventfdFlags, eventfd};

use crate::command::{Command, Handed, StopWaiter, VringDescriptor};
use crate::wake::signal;
use crate::{Stopped, VringStart};

/// Maximum number of commands in the queue. A session waits for most answers, and an operator orders seldom, so the queue is rarely
/// long.
const COMMANDS_MAX: usize = 64;

/// The answer to a command, sent when the command has taken effect.
#[derive(Debug)]
pub struct Pending<T>(Receiver<T>);

impl<T> Pending<T> {
    /// Waits for the answer. `None`: the worker is gone.
    pub fn wait(self) -> Option<T> {
        self.0.recv().ok()
    }

    /// Waits for the answer until a time-out. `Err(self)`: the time-out has passed; `Ok(None)`: the worker is
    /// gone.
    pub fn wait_for(self, time: Duration) -> Result<Option<T>, Pending<T>> {
        match self.0.recv_timeout(time) {
            Ok(answer) => Ok(Some(answer)),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => Err(self),
        }
    }
}

/// A worker's end of its command queue.
#[derive(Debug)]
pub struct Commands {
    pub(crate) queue: Receiver<Command>,
    /// The other end, for the registry.
    pub(crate) control: Control,
}

impl Commands {
    /// Drops the queue: those that wait for an answer, now or later, learn that there will be none.
    pub(crate) fn close(&mut self) {
        self.queue = sync_channel(0).1;
    }
}

/// Sends commands to one worker.
#[derive(Debug, Clone)]
pub struct Control {
    queue: SyncSender<Command>,
    /// An eventfd that signals a new command.
    pub(crate) bell: Arc<OwnedFd>,
    /// The worker's thread has other disks too.
    pub(crate) is_shared: bool,
}

impl Control {
    /// Makes both ends of the command queue of a worker that has a thread of its own.
    pub fn channel() -> io::Result<(Control, Commands)> {
        Control::channel_of(false)
    }

    /// Makes both ends of the command queue of a worker.
    pub(crate) fn channel_of(is_shared: bool) -> io::Result<(Control, Commands)> {
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (queue, inbox) = sync_channel(COMMANDS_MAX);
        let control = Control {
            queue,
            bell,
            is_shared,
        };
        let commands = Commands {
            queue: inbox,
            control: control.clone(),
        };
        Ok((control, commands))
    }

    /// Hands a vring over. Answered when it is served, or when it turns out that it cannot be.
    pub fn start(&self, start: VringStart) -> Pending<Result<(), VringError>> {
        self.ask(|done| Command::Start(Box::new(Handed::new(start, self.is_shared)), done))
    }

    /// Drains a vring and takes it back. Answered when none of its requests is in flight.
    pub fn stop(&self, index: u16) -> Pending<Stopped> {
        self.ask(|done| Command::Stop(index, StopWaiter::new(done, None)))
    }

    /// Drains a vring and takes it back as [`stop`](Control::stop) does, but leaves no stalled request behind: the answer waits until
    /// the last one was repeated or failed, however long that takes. `bell`: an eventfd that is written after the answer. A later
    /// `stop` takes the vring back at once.
    pub fn finish(&self, index: u16, bell: Arc<OwnedFd>) -> Pending<Stopped> {
        self.ask(|done| Command::Stop(index, StopWaiter::new(done, Some(bell))))
    }

    /// Asks for an answer when every completion that was decided before this call has been published: at the end of a lap, or of a
    /// later one while the guest moves and its answers take long to mark.
    pub fn pass(&self) -> Pending<()> {
        self.ask(Command::Pass)
    }

    /// Enables or disables a vring. Answered when the worker has done so. The ring of an enabled vring is
    /// checked without a kick, since the kick may have arrived before.
    pub fn enable(&self, index: u16, enabled: bool) -> Pending<()> {
        self.ask(|done| Command::Enable(index, enabled, done))
    }

    /// Changes the kick eventfd of a running vring.
    pub fn set_kick(&self, index: u16, kick: Option<OwnedFd>) -> Pending<()> {
        self.ask(|done| Command::Signal(index, VringDescriptor::Kick(kick), done))
    }

    /// Changes the call eventfd of a running vring, and writes it once.
    pub fn set_call(&self, index: u16, call: Option<OwnedFd>) -> Pending<()> {
        let call = call.map(|fd| BellFd::new(fd, self.is_shared));
        self.ask(|done| Command::Signal(index, VringDescriptor::Call(call), done))
    }

    /// Changes the err eventfd of a running vring.
    pub fn set_err(&self, index: u16, err: Option<OwnedFd>) -> Pending<()> {
        let err = err.map(|fd| BellFd::new(fd, self.is_shared));
        self.ask(|done| Command::Signal(index, VringDescriptor::Err(err), done))
    }

    /// Changes what a running vring marks in a dirty log. Answered when it writes to no earlier log any more.
    pub fn set_log(&self, index: u16, log: Option<Box<VringLog>>) -> Pending<()> {
        self.ask(|done| Command::Log(index, log, done))
    }

    /// Puts a new memory table in force. Answered when requests are taken in it. The old table is released when
    /// the last request that was taken in it is complete; [`Memory::departing`] reports that. A vring that is
    /// not in the new table rests until a later table has it.
    pub fn bind(&self, memory: Arc<Memory>) -> Pending<()> {
        self.ask(|done| Command::Bind(memory, done))
    }

    /// Drains every vring, then ends the worker.
    pub fn exit(&self) {
        let _ = self.queue.send(Command::Exit);
        self.ring();
    }

    /// Has the store flushed. Answered when that has succeeded or failed; a worker that cannot do it, or not now, gives no answer.
    pub(crate) fn sync(&self) -> Pending<Result<(), i32>> {
        let (done, answer) = sync_channel(1);
        self.order(Command::Sync(done));
        Pending(answer)
    }

    /// Gives an order of the operator, without waiting for room: the registry is locked meanwhile, and a worker needs that lock to
    /// end. Returns false if there is none, which means that the worker hangs: the order is dropped.
    pub(crate) fn order(&self, command: Command) -> bool {
        // A worker that has ended needs no order.
        let is_full = matches!(self.queue.try_send(command), Err(TrySendError::Full(_)));
        self.ring();
        !is_full
    }

    /// Wakes the worker, which then looks for commands and for a changed state.
    pub(crate) fn ring(&self) {
        signal(&self.bell);
    }

    fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Pending<T> {
        let (done, answer) = sync_channel(1);
        // If the worker is gone, the command is dropped together with `done`, and the answer is `None`.
        let _ = self.queue.send(command(done));
        self.ring();
        Pending(answer)
    }
}
