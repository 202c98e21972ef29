//! The command line.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use cleave_blk::spec::feature;
use cleave_client::message::protocol;
use cleave_client::{
    DeviceOptions, Layout, Offered, OffsetOrder, Pulse, ReapWait, Stop, Verify, Workload,
};

/// True once a load without an end of its own is to end.
pub(crate) static IS_OVER: AtomicBool = AtomicBool::new(false);

/// The words that say what is asked for. The others set devices up, or end or follow the whole run.
const LOAD: [&str; 12] = [
    "--seconds",
    "--depth",
    "--bs",
    "--write",
    "--mix",
    "--sequential",
    "--indirect",
    "--rate",
    "--burst",
    "--pulse",
    "--seed",
    "--span",
];

#[derive(Clone)]
pub(crate) struct Args {
    pub(crate) sockets: Vec<PathBuf>,
    pub(crate) seconds: f64,
    pub(crate) warm_up: f64,
    pub(crate) idle: Option<f64>,
    pub(crate) until_eof: bool,
    pub(crate) reconnect: Option<Duration>,
    pub(crate) each: bool,
    /// The words of each phase.
    phases: Vec<String>,
    pub(crate) laps: u32,
    pub(crate) depth: u16,
    pub(crate) block_bytes: u32,
    read_percent: u8,
    sequential: bool,
    indirect: bool,
    pub(crate) verify: bool,
    rate: Option<f64>,
    burst: u32,
    pulse: Option<Pulse>,
    seed: u64,
    span_bytes: Option<u64>,
    pub(crate) pid: Option<u32>,
    pub(crate) json: bool,
    pub(crate) options: DeviceOptions,
}

impl Args {
    pub(crate) fn parse() -> Result<Args, String> {
        let mut args = Args {
            sockets: Vec::new(),
            seconds: 3.0,
            warm_up: 0.0,
            idle: None,
            until_eof: false,
            reconnect: None,
            each: false,
            phases: Vec::new(),
            laps: 1,
            depth: 32,
            block_bytes: 4096,
            read_percent: 100,
            sequential: false,
            indirect: false,
            verify: false,
            rate: None,
            burst: 1,
            pulse: None,
            seed: 1,
            span_bytes: None,
            pid: None,
            json: false,
            options: DeviceOptions::default(),
        };
        args.take(std::env::args().skip(1))?;
        if args.sockets.is_empty() {
            return Err("--socket PATH is missing".into());
        }
        // Only touched pages use memory; the data of all requests in flight must fit.
        args.options.data_bytes = args.data_bytes();
        Ok(args)
    }

    /// Returns the arguments of each phase, in their order.
    pub(crate) fn phases(&self) -> Result<Vec<Args>, String> {
        let phase = |words: &String| {
            let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
            let is_set_up = |word: &&String| word.starts_with("--") && !LOAD.contains(&&***word);
            if let Some(word) = words.iter().find(is_set_up) {
                return Err(format!("a phase cannot change {word}"));
            }
            let mut args = self.clone();
            args.take(words.into_iter())?;
            match args.data_bytes() > self.options.data_bytes {
                true => Err("a phase needs more memory than the load before it".to_owned()),
                false => Ok(args),
            }
        };
        self.phases.iter().map(phase).collect()
    }

    /// Returns the bytes of the data of all requests in flight.
    fn data_bytes(&self) -> u64 {
        let data = u64::from(self.block_bytes).next_multiple_of(4096) * u64::from(self.depth);
        data.max(4096)
    }

    fn take(&mut self, mut words: impl Iterator<Item = String>) -> Result<(), String> {
        while let Some(word) = words.next() {
            if !self.take_flag(&word) {
                let value = words.next().ok_or(format!("{word} needs a value"))?;
                self.take_value(&word, &value)?;
            }
        }
        Ok(())
    }

    fn take_flag(&mut self, word: &str) -> bool {
        match word {
            "--poll" => self.options.wait = ReapWait::Poll,
            "--sleep" => self.options.wait = ReapWait::Sleep,
            "--write" => self.read_percent = 0,
            "--sequential" => self.sequential = true,
            "--indirect" => self.indirect = true,
            "--inflight" => self.options.protocol_features |= protocol::INFLIGHT_SHMFD,
            "--no-event-idx" => self.options.features &= !feature::EVENT_IDX,
            "--verify" => self.verify = true,
            "--until-eof" => self.until_eof = true,
            "--each" => self.each = true,
            "--json" => self.json = true,
            _ => return false,
        }
        true
    }

    fn take_value(&mut self, word: &str, value: &str) -> Result<(), String> {
        match word {
            "--socket" => self.sockets.push(value.into()),
            "--seconds" => self.seconds = number(value)?,
            "--warm-up" => self.warm_up = number(value)?,
            "--idle" => self.idle = Some(number(value)?),
            "--reconnect" => self.reconnect = Some(Duration::from_millis(number(value)?)),
            "--phase" => self.phases.push(value.to_owned()),
            "--laps" => self.laps = number(value)?,
            "--depth" => self.depth = number(value)?,
            "--bs" => self.block_bytes = number(value)?,
            "--queues" => self.options.queues = number(value)?,
            "--queue-size" => self.options.queue_size = number(value)?,
            "--mix" => self.read_percent = number(value)?,
            "--rate" => self.rate = Some(number(value)?),
            "--burst" => self.burst = number(value)?,
            "--pulse" => self.pulse = Some(pulse(value)?),
            "--seed" => self.seed = number(value)?,
            "--span" => self.span_bytes = Some(number(value)?),
            "--pid" => self.pid = Some(number(value)?),
            other => return Err(format!("unknown option {other}; see the head of main.rs")),
        }
        Ok(())
    }

    /// Returns the workload for a disk of this size and some time.
    pub(crate) fn workload(&self, capacity_bytes: u64, seconds: f64) -> Workload<'static> {
        let span_bytes = self.span_bytes.unwrap_or(u64::MAX).min(capacity_bytes);
        Workload {
            read_percent: self.read_percent,
            order: if self.sequential {
                OffsetOrder::Sequential
            } else {
                OffsetOrder::Random
            },
            layout: if self.indirect {
                Layout::Indirect
            } else {
                Layout::Auto
            },
            verify: if self.verify {
                Verify::Pattern(1)
            } else {
                Verify::Off
            },
            offered: self.rate.map(|per_second| Offered {
                per_second,
                burst: self.burst,
            }),
            pulse: self.pulse,
            seed: self.seed,
            stop: match self.until_eof {
                true => Stop::Requests(u64::MAX),
                false => Stop::After(Duration::from_secs_f64(seconds)),
            },
            abort: self.until_eof.then_some(&IS_OVER),
            ..Workload::reads(self.block_bytes, self.depth, span_bytes, Duration::ZERO)
        }
    }
}

/// Parses `ON:OFF`, in milliseconds.
fn pulse(text: &str) -> Result<Pulse, String> {
    let (on, off) = text.split_once(':').ok_or("a pulse is ON:OFF")?;
    let time = |text: &str| Ok::<_, String>(Duration::from_secs_f64(number::<f64>(text)? / 1e3));
    Ok(Pulse {
        on: time(on)?,
        off: time(off)?,
    })
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("{text} is not a valid number"))
}
