//! A load, and the case of a subject under it.

use serde::Serialize;
use serde_json::Value;

/// How the driving side waits for completions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(super) enum LoadWait {
    /// Waits in the kernel, as a guest does.
    Sleep,
    /// Spins on the used ring. fio waits in the kernel in any case, because that is how a bare disk is used.
    Poll,
}

/// Random requests for some time. A raw line has the fields that tell it from others of its suite.
#[derive(Clone, Debug, Serialize)]
pub(super) struct RandomLoad {
    pub(super) block_bytes: u32,
    /// In flight on each vring.
    pub(super) depth: u32,
    pub(super) queues: u32,
    pub(super) wait: LoadWait,
    pub(super) read_percent: u32,
    #[serde(skip)]
    pub(super) seconds: f64,
    /// Driven before it counts: until the worker runs, memory is touched and caches are warm.
    #[serde(skip)]
    pub(super) warm_up: f64,
    /// Further options of the driver.
    #[serde(skip)]
    pub(super) more: String,
}

/// One bar of a figure: a subject at a point.
#[derive(Clone)]
pub(super) struct Case {
    pub(super) point: String,
    pub(super) subject: String,
    /// The daemons' command lines, with [`SOCKET`](super::subject::SOCKET) for the path; of
    /// [`BARE`](super::subject::BARE) that of fio.
    pub(super) daemons: Vec<Vec<String>>,
    pub(super) load: RandomLoad,
    /// Driven once before the rounds, for so many seconds.
    pub(super) learns: f64,
    /// Further facts for a reader of the raw line.
    pub(super) facts: Value,
}

impl RandomLoad {
    /// 4 KiB reads on one vring.
    pub(super) fn reads(depth: u32, wait: LoadWait, seconds: f64) -> RandomLoad {
        RandomLoad {
            block_bytes: 4096,
            depth,
            queues: 1,
            wait,
            read_percent: 100,
            seconds,
            warm_up: seconds / 10.0,
            more: String::new(),
        }
    }

    /// Returns the driver's options.
    pub(super) fn words(&self) -> String {
        let wait = format!("{:?}", self.wait).to_lowercase();
        let (seconds, warm_up, more) = (self.seconds, self.warm_up, &self.more);
        let (depth, queues, bytes) = (self.depth, self.queues, self.block_bytes);
        let options = format!("--depth {depth} --queues {queues} --bs {bytes}");
        let mix = self.read_percent;
        format!("--{wait} --seconds {seconds} --warm-up {warm_up} {options} --mix {mix}{more}")
    }
}

impl Case {
    /// A case without facts.
    pub(super) fn new(
        point: String,
        subject: String,
        daemons: Vec<Vec<String>>,
        load: RandomLoad,
    ) -> Case {
        Case {
            point,
            subject,
            daemons,
            load,
            learns: 0.0,
            facts: Value::Null,
        }
    }

    /// Adds words to its daemons' command lines.
    pub(super) fn extend(&mut self, words: &[&str]) {
        let words = words.iter().map(|word| (*word).to_owned());
        for daemon in &mut self.daemons {
            daemon.extend(words.clone());
        }
    }
}
