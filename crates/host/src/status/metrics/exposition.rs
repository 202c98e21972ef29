//! The text format in which Prometheus reads metrics.

use std::fmt::{Display, Write as _};

use cleave_worker::record::Distribution;

/// Declares families of metrics whose samples are written from a `$of`: the help, the type and the name of each, and the function that
/// writes its samples.
macro_rules! families {
    ($of:ty: $(#[doc = $help:literal] $kind:ident $name:ident = $write:expr;)+) => {
        &[$(Family::<$of> {
            kind: stringify!($kind),
            name: stringify!($name),
            help: $help,
            write: $write,
        }),+]
    };
}
pub(super) use families;

/// A family of metrics: what they have in common, and how the samples of one `T` are written.
#[derive(Debug)]
pub(super) struct Family<T> {
    /// `gauge`, `counter` or `histogram`.
    pub(super) kind: &'static str,
    pub(super) name: &'static str,
    /// One line, which begins with a space, as the comment does from which it comes.
    pub(super) help: &'static str,
    pub(super) write: fn(&T, &mut Samples<'_>),
}

impl<T> Family<T> {
    /// Adds the samples of one `T` to those of the family. Those that belong to a disk have its id as a label.
    pub(super) fn write(&self, samples: &mut String, disk: Option<&str>, of: &T) {
        let disk = disk.map(|id| format!("disk=\"{}\"", escaped(id)));
        let mut samples = Samples {
            out: samples,
            name: self.name,
            disk: disk.as_deref(),
        };
        (self.write)(of, &mut samples);
    }

    /// Puts the family with all of its samples into a text. One without samples is left out.
    pub(super) fn put(&self, out: &mut String, samples: &str) {
        if samples.is_empty() {
            return;
        }
        let (name, kind, help) = (self.name, self.kind, self.help);
        // Writing to a string does not fail.
        let _ = writeln!(out, "# HELP {name}{help}\n# TYPE {name} {kind}");
        out.push_str(samples);
    }
}

/// Names and values of the labels of a sample, beside its disk.
pub(super) type SampleLabels<'a> = &'a [(&'a str, &'a dyn Display)];

/// The place to which the samples of a family are written.
#[derive(Debug)]
pub(super) struct Samples<'a> {
    out: &'a mut String,
    name: &'static str,
    /// The label of the disk to which they belong.
    disk: Option<&'a str>,
}

impl Samples<'_> {
    /// Writes the only sample of its kind.
    pub(super) fn one(&mut self, value: impl Display) {
        self.sample(&[], value);
    }

    /// Writes the only sample of its kind, if it has a value.
    pub(super) fn maybe(&mut self, value: Option<impl Display>) {
        if let Some(value) = value {
            self.one(value);
        }
    }

    /// Writes samples that differ in one label.
    pub(super) fn by<L: Display, V: Display>(
        &mut self,
        label: &str,
        samples: impl IntoIterator<Item = (L, V)>,
    ) {
        for (of, value) in samples {
            self.sample(&[(label, &of)], value);
        }
    }

    pub(super) fn sample(&mut self, labels: SampleLabels<'_>, value: impl Display) {
        self.line("", labels, value);
    }

    pub(super) fn histogram(
        &mut self,
        labels: SampleLabels<'_>,
        all: &Distribution,
        bounds: &Bounds,
    ) {
        let mut bucket = |bound: &dyn Display, count| {
            self.line("_bucket", &[labels, &[("le", bound)]].concat(), count);
        };
        for power in (bounds.first..=bounds.last).step_by(bounds.step) {
            bucket(&((1u64 << power) as f64 / 1e9), all.below_ns(power));
        }
        bucket(&"+Inf", all.count());
        self.line("_sum", labels, all.sum_ns() as f64 / 1e9);
        self.line("_count", labels, all.count());
    }

    fn line(&mut self, suffix: &str, labels: SampleLabels<'_>, value: impl Display) {
        let _ = write!(self.out, "{}{suffix}", self.name);
        let mut before = '{';
        if let Some(disk) = self.disk {
            let _ = write!(self.out, "{before}{disk}");
            before = ',';
        }
        for (name, value) in labels {
            let value = escaped(&value.to_string());
            let _ = write!(self.out, "{before}{name}=\"{value}\"");
            before = ',';
        }
        if before == ',' {
            self.out.push('}');
        }
        let _ = writeln!(self.out, " {value}");
    }
}

/// Bounds of histograms are powers of two of nanoseconds, from the first by a factor to the last: those
/// at which buckets of ours begin, so that nothing is interpolated.
#[derive(Debug)]
pub(super) struct Bounds {
    first: u32,
    step: usize,
    last: u32,
}

impl Bounds {
    /// 1 µs to 4.3 s, doubling.
    pub(super) const DEVICE: Bounds = Bounds {
        first: 10,
        step: 1,
        last: 32,
    };
    /// 256 ns to 4.3 s by factors of four, for the stages that are short.
    pub(super) const SHORT: Bounds = Bounds {
        first: 8,
        step: 2,
        last: 32,
    };
}

/// Escapes the value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}
