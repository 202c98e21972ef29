//! CPUs: which are at hand, and how an operator lists them.

use std::num::NonZero;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Most CPUs that a list may name; a longer one is a slip of the keyboard.
const LIST_MAX: usize = CpuSet::MAX_CPU;

/// CPUs as written on the command line: `0,2-3`. Order is kept: workers take them in turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CpuList(pub(crate) Vec<usize>);

impl std::str::FromStr for CpuList {
    type Err = String;

    fn from_str(text: &str) -> Result<CpuList, String> {
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = range(part.trim())?;
            for cpu in first..=last {
                if cpus.contains(&cpu) {
                    return Err(format!("CPU {cpu} is listed twice"));
                }
                cpus.push(cpu);
            }
        }
        Ok(CpuList(cpus))
    }
}

/// `3` or `2-5`.
fn range(part: &str) -> Result<(usize, usize), String> {
    let (first, last) = part.split_once('-').unwrap_or((part, part));
    let (first, last) = (number(first, part)?, number(last, part)?);
    if first > last {
        return Err(format!(
            "'{part}' runs backwards: write the lower CPU first"
        ));
    }
    Ok((first, last))
}

fn number(text: &str, part: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        // `+3` is a number to Rust and a slip to an operator.
        Ok(cpu) if cpu < LIST_MAX && !text.starts_with('+') => Ok(cpu),
        Ok(cpu) if cpu >= LIST_MAX => Err(format!("there is no CPU {cpu}")),
        _ => Err(format!(
            "'{part}' is no CPU and no range of CPUs: write a list such as 0,2-3"
        )),
    }
}

/// Keeps this thread, and those that it starts, off these CPUs, unless no other is left.
pub(crate) fn stay_off(taken: &[usize]) {
    if taken.is_empty() {
        return;
    }
    let left = allowed().unwrap_or_default();
    let left = left.into_iter().filter(|cpu| !taken.contains(cpu));
    let mut set = CpuSet::new();
    left.for_each(|cpu| set.set(cpu));
    if set.count() > 0
        && let Err(error) = sched_setaffinity(None, &set)
    {
        tracing::warn!("cannot keep control threads off the CPUs of pools: {error}");
    }
}

/// The CPUs that this process may run on; `None` where the kernel does not say (more of them than a
/// CPU set holds).
pub(crate) fn allowed() -> Option<Vec<usize>> {
    let set = sched_getaffinity(None).ok()?;
    Some(
        (0..CpuSet::MAX_CPU)
            .filter(|&cpu| set.is_set(cpu))
            .collect(),
    )
}

/// How many CPUs are at hand, at least one.
pub(crate) fn count() -> usize {
    match allowed() {
        Some(cpus) => cpus.len().max(1),
        None => std::thread::available_parallelism().map_or(1, NonZero::get),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_parse_as_written_or_are_refused() {
        let cases: &[(&str, Result<&[usize], &str>)] = &[
            ("0", Ok(&[0])),
            ("0,2-3", Ok(&[0, 2, 3])),
            ("3,1", Ok(&[3, 1])),
            ("0-0", Ok(&[0])),
            ("0, 1", Ok(&[0, 1])),
            ("1023", Ok(&[1023])),
            ("1024", Err("no CPU 1024")),
            ("0-4294967295", Err("no CPU 4294967295")),
            ("", Err("write a list")),
            ("0,", Err("write a list")),
            ("-1", Err("write a list")),
            ("+1", Err("write a list")),
            ("1-", Err("write a list")),
            ("1-2-3", Err("write a list")),
            ("a", Err("write a list")),
            ("3-1", Err("runs backwards")),
            ("1,0-2", Err("listed twice")),
            ("99999999999999999999999", Err("write a list")),
        ];
        for (text, expected) in cases {
            match (text.parse::<CpuList>(), expected) {
                (Ok(list), Ok(cpus)) => assert_eq!(list.0, *cpus, "{text}"),
                (Err(why), Err(part)) => assert!(why.contains(part), "{text}: {why}"),
                (got, _) => panic!("{text}: {got:?}"),
            }
        }
    }

    #[test]
    fn this_process_has_a_cpu() {
        assert!(count() >= 1);
        assert_eq!(allowed().map(|cpus| cpus.is_empty()), Some(false));
    }
}
