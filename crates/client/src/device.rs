//! A whole device: handshake, memory, vrings.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cleave_blk::spec::feature;

use crate::message::{VRING_LOG, VringAddr, protocol};
use crate::queue::{Arena, CONTROL_BYTES, VringSetup};
use crate::{
    DeviceConfig, DriverRing, Error, Frontend, GuestMemory, InflightRegion, Notifier, Queue,
    ReapWait, RegionOptions, RingLayout,
};

/// The messages that describe memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryMessages {
    /// SET_MEM_TABLE.
    Whole,
    /// ADD_MEM_REG, one for each region.
    Slots,
}

/// The region for requests in flight that a frontend gives to the daemon, if it takes that protocol feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InflightKind {
    /// The daemon makes it, for vrings of the size that they have.
    Fitting,
    /// The daemon makes it, for vrings of this size, which may not be the size that they have.
    For(u16),
    /// The frontend makes it, with room for vrings of this size and no more.
    Own(u16),
}

/// Options for setting a device up.
#[derive(Debug, Clone)]
pub struct DeviceOptions {
    /// Number of vrings to start.
    pub queues: u16,
    /// Entries of each vring.
    pub queue_size: u16,
    /// The region for requests in flight.
    pub region: InflightKind,
    /// Features to accept if they are offered.
    pub features: u64,
    /// Protocol features to accept if they are offered.
    pub protocol_features: u64,
    /// How to wait for completions.
    pub wait: ReapWait,
    /// Kind of kick descriptors.
    pub kick: Notifier,
    /// Kind of call descriptors.
    pub call: Notifier,
    /// Messages that describe memory.
    pub table: MemoryMessages,
    /// Feature messages before protocol feature messages, as some frontends send them.
    pub features_first: bool,
    /// Data area of each vring, in bytes (only touched pages use memory).
    pub data_bytes: u64,
    /// Initial position of each vring.
    pub base: u16,
    /// Time limit for each reply and each request.
    pub timeout: Duration,
}

impl Default for DeviceOptions {
    fn default() -> DeviceOptions {
        DeviceOptions {
            queues: 1,
            queue_size: 256,
            region: InflightKind::Fitting,
            features: u64::MAX,
            protocol_features: protocol::MQ
                | protocol::REPLY_ACK
                | protocol::CONFIG
                | protocol::CONFIGURE_MEM_SLOTS
                | protocol::RESET_DEVICE
                | protocol::STATUS
                | protocol::BACKEND_REQ,
            wait: ReapWait::Sleep,
            kick: Notifier::NonBlocking,
            call: Notifier::NonBlocking,
            table: MemoryMessages::Whole,
            features_first: false,
            data_bytes: 64 << 20,
            base: 0,
            timeout: Duration::from_secs(120),
        }
    }
}

/// Features that this driver implements, and so may accept.
const UNDERSTOOD: u64 = feature::SIZE_MAX
    | feature::SEG_MAX
    | feature::RO
    | feature::BLK_SIZE
    | feature::FLUSH
    | feature::TOPOLOGY
    | feature::CONFIG_WCE
    | feature::MQ
    | feature::DISCARD
    | feature::WRITE_ZEROES
    | feature::INDIRECT_DESC
    | feature::EVENT_IDX
    | feature::VHOST_USER_PROTOCOL
    | feature::VERSION_1;

/// Start of the simulated guest's RAM: neither 0 nor its address in this process, so that a daemon which mixes up
/// address spaces is noticed.
const RAM_AT: u64 = 0x1_0000_0000;

/// A running device.
#[derive(Debug)]
pub struct Client {
    pub(crate) frontend: Frontend,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) queues: Vec<Queue>,
    config: DeviceConfig,
    offered: u64,
    pub(crate) features: u64,
    protocol_features: u64,
    table: MemoryMessages,
    /// Kept for the next daemon.
    pub(crate) inflight: Option<InflightRegion>,
}

/// The position that the frontend sends for a vring after its daemon died.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Base {
    /// The used index, like QEMU.
    Used,
    /// The available index, like Cloud Hypervisor.
    Avail,
    /// Any number.
    At(u16),
}

impl Client {
    /// Connects and sets a device up.
    pub fn open(path: &Path, options: &DeviceOptions) -> Result<Client, Error> {
        Client::start(Frontend::connect(path, options.timeout)?, options)
    }

    /// Sets a device up with new memory.
    pub fn start(frontend: Frontend, options: &DeviceOptions) -> Result<Client, Error> {
        let entries = u64::from(options.queue_size);
        let ring_bytes =
            (entries * (16 + 2 + 8 + CONTROL_BYTES) + (4 << 12)).next_multiple_of(4096);
        let each = ring_bytes + options.data_bytes.next_multiple_of(4096) + 4096;
        let bytes = (each * u64::from(options.queues.max(1))).next_multiple_of(2 << 20) + (2 << 20);
        let memory = GuestMemory::new(&[RegionOptions::new(RAM_AT, bytes)])?;
        Client::start_in(frontend, memory, options)
    }

    /// Sets a device up in existing memory; rings and data areas are allocated in its region 0.
    pub fn start_in(
        frontend: Frontend,
        memory: Arc<GuestMemory>,
        options: &DeviceOptions,
    ) -> Result<Client, Error> {
        let mut client = Client::handshake(frontend, memory, options)?;
        if client.protocol_features & protocol::INFLIGHT_SHMFD != 0 {
            let queues = options.queues.max(1);
            client.inflight = match options.region {
                InflightKind::Fitting => client.frontend.inflight(queues, options.queue_size)?,
                InflightKind::For(size) => client.frontend.inflight(queues, size)?,
                InflightKind::Own(size) => Some(InflightRegion::own(queues, size)?),
            };
            if let Some(region) = &client.inflight {
                client.frontend.set_inflight(region)?;
            }
        }
        client.send_memory()?;
        for index in 0..options.queues {
            let queue = client.start_queue(index, options)?;
            client.queues.push(queue);
        }
        if client.protocol_features & protocol::STATUS != 0 {
            // ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK (virtio 1.3 §2.1).
            client.frontend.set_status(1 | 2 | 8 | 4)?;
        }
        Ok(client)
    }

    /// Exchanges the feature messages and reads the configuration; no memory, no vring.
    pub fn handshake(
        mut frontend: Frontend,
        memory: Arc<GuestMemory>,
        options: &DeviceOptions,
    ) -> Result<Client, Error> {
        let offered = frontend.features()?;
        let features = offered & options.features & UNDERSTOOD;
        frontend.set_owner()?;
        if options.features_first {
            frontend.set_features(features)?;
        }
        let mut protocol_features = 0;
        if offered & feature::VHOST_USER_PROTOCOL != 0 {
            protocol_features = frontend.protocol_features()? & options.protocol_features;
            frontend.set_protocol_features(protocol_features)?;
        }
        if !options.features_first {
            frontend.set_features(features)?;
        }
        let mut client = Client {
            frontend,
            memory,
            queues: Vec::new(),
            config: DeviceConfig::default(),
            offered,
            features,
            protocol_features,
            table: options.table,
            inflight: None,
        };
        if protocol_features & protocol::CONFIG != 0 {
            client.refresh_config()?;
        }
        Ok(client)
    }

    /// Connects to the successor of a daemon that died, with the same guest memory, vrings and requests in flight.
    pub fn reconnect(
        &mut self,
        path: &Path,
        options: &DeviceOptions,
        base: Base,
    ) -> Result<(), Error> {
        self.connect_again(path, options)?;
        for queue in &self.queues {
            let base = match base {
                Base::Used => queue.ring.used_index(),
                Base::Avail => queue.ring.position(),
                Base::At(position) => position,
            };
            self.announce(&queue.vring, queue.ring.layout(), base)?;
        }
        Ok(())
    }

    /// Connects to the successor, up to the vrings.
    pub(crate) fn connect_again(
        &mut self,
        path: &Path,
        options: &DeviceOptions,
    ) -> Result<(), Error> {
        let frontend = Frontend::connect(path, options.timeout)?;
        let before = std::mem::replace(
            self,
            Client::handshake(frontend, Arc::clone(&self.memory), options)?,
        );
        self.queues = before.queues;
        self.inflight = before.inflight;
        if let Some(region) = &self.inflight {
            self.frontend.set_inflight(region)?;
        }
        self.send_memory()
    }

    /// Returns true if the daemon records the requests in flight.
    pub fn keeps_inflight(&self) -> bool {
        self.inflight.is_some()
    }

    /// Returns the configuration as it was last read.
    pub fn config(&self) -> &DeviceConfig {
        &self.config
    }

    /// Reads the configuration again.
    pub fn refresh_config(&mut self) -> Result<&DeviceConfig, Error> {
        self.config = DeviceConfig::parse(&self.frontend.config(0, DeviceConfig::BYTES)?);
        Ok(&self.config)
    }

    /// Features that the daemon offers.
    pub fn offered(&self) -> u64 {
        self.offered
    }

    /// Features that were accepted.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Returns the connection, for single messages.
    pub fn frontend(&mut self) -> &mut Frontend {
        &mut self.frontend
    }

    /// Returns the guest's memory.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Returns one vring.
    ///
    /// # Panics
    /// Panics if it was not started.
    pub fn queue(&mut self, index: usize) -> &mut Queue {
        &mut self.queues[index]
    }

    /// Returns the number of vrings.
    pub fn queue_count(&self) -> usize {
        self.queues.len()
    }

    /// Returns all vrings, for use by several threads.
    pub fn queues(&mut self) -> &mut [Queue] {
        &mut self.queues
    }

    /// Returns connection and vrings separately, to send messages while vrings run.
    pub fn parts(&mut self) -> (&mut Frontend, &mut [Queue]) {
        (&mut self.frontend, &mut self.queues)
    }

    /// Sends the memory table.
    pub fn send_memory(&self) -> Result<(), Error> {
        let count = self.memory.len();
        match self.table {
            MemoryMessages::Whole => {
                let regions: Vec<_> = (0..count).map(|index| self.memory.region(index)).collect();
                let fds: Vec<_> = (0..count).map(|index| self.memory.fd(index)).collect();
                self.frontend.set_mem_table(&regions, &fds)
            }
            MemoryMessages::Slots => (0..count).try_for_each(|index| {
                self.frontend
                    .add_mem_reg(self.memory.region(index), self.memory.fd(index))
            }),
        }
    }

    /// Initializes a vring and starts it.
    pub fn start_queue(&self, index: u16, options: &DeviceOptions) -> Result<Queue, Error> {
        let layout = RingLayout::alloc(&self.memory, 0, options.queue_size)?;
        let event_idx = self.features & feature::EVENT_IDX != 0;
        let ring = DriverRing::new(&self.memory, layout, event_idx, options.base)?;
        let control = self
            .memory
            .alloc(CONTROL_BYTES * u64::from(options.queue_size), 128)?;
        let addr = self.memory.alloc(options.data_bytes, 4096)?;
        let vring = VringSetup {
            index,
            kick: options.kick.make()?,
            call: options.call.make()?,
            err: err_descriptor()?,
        };
        let queue = Queue {
            vring: Arc::new(vring),
            ring,
            wait: options.wait,
            timeout: options.timeout,
            arena: Arena {
                addr,
                len: options.data_bytes,
                control,
            },
            indirect: self.features & feature::INDIRECT_DESC != 0,
        };
        self.announce(&queue.vring, layout, options.base)?;
        Ok(queue)
    }

    /// Sends the set-up of a stopped vring again; `base`: its position.
    pub fn resume_queue(&mut self, index: usize, base: u16) -> Result<(), Error> {
        let queue = &self.queues[index];
        self.announce(&queue.vring, queue.ring.layout(), base)
    }

    /// Sends the set-up of a vring in QEMU's order, and enables it.
    pub(crate) fn announce(
        &self,
        vring: &VringSetup,
        layout: RingLayout,
        base: u16,
    ) -> Result<(), Error> {
        let (index, size) = (u32::from(vring.index), layout.size);
        self.frontend.set_vring_num(index, size.into())?;
        self.frontend.set_vring_base(index, base.into())?;
        self.frontend
            .set_vring_addr(self.addr_of(vring.index, layout)?)?;
        self.frontend
            .set_vring_err(index, Some(vring.err.as_fd()))?;
        self.frontend
            .set_vring_call(index, vring.call.as_ref().map(|call| call.writer().as_fd()))?;
        self.frontend
            .set_vring_kick(index, vring.kick.as_ref().map(|kick| kick.reader.as_fd()))?;
        if self.features & feature::VHOST_USER_PROTOCOL != 0 {
            self.frontend.set_vring_enable(index, true)?;
        }
        Ok(())
    }
}

/// Addresses of vrings, with and without the dirty log.
impl Client {
    /// Returns the addresses of a vring, as SET_VRING_ADDR has them.
    pub fn vring_addr(&self, index: usize) -> Result<VringAddr, Error> {
        let queue = &self.queues[index];
        self.addr_of(queue.index(), queue.ring.layout())
    }

    /// Returns the addresses of a vring whose used ring is in the dirty log.
    pub fn logged_vring_addr(&self, index: usize) -> Result<VringAddr, Error> {
        Ok(VringAddr {
            flags: VRING_LOG,
            log: self.queues[index].ring.layout().used,
            ..self.vring_addr(index)?
        })
    }

    fn addr_of(&self, index: u16, layout: RingLayout) -> Result<VringAddr, Error> {
        let user = |addr| {
            let found = self.memory.user_addr(addr);
            found.ok_or_else(|| Error::Memory(format!("no ring at {addr:#x}")))
        };
        Ok(VringAddr {
            index: index.into(),
            flags: 0,
            desc: user(layout.desc)?,
            used: user(layout.used)?,
            avail: user(layout.avail)?,
            log: 0,
        })
    }
}

fn err_descriptor() -> Result<OwnedFd, Error> {
    let made = Notifier::NonBlocking.make()?;
    made.map(|ends| ends.reader)
        .ok_or_else(|| Error::Protocol("no err descriptor".into()))
}
