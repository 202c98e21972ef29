//! CPUs, as an operator lists them.

use std::fmt;
use std::str::FromStr;

use super::text::Text;

/// Most CPUs that a list may name, which is what the kernel's interface to them has room for. A longer list is a typing error.
const LIST_MAX: usize = 1024;

/// CPUs as they are listed: `0,2-3`. Order is kept: workers take them in turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuList(pub Vec<usize>);

impl FromStr for CpuList {
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

/// Parses `3` or `2-5`.
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
        // `+3` is a number to Rust and a typing error to an operator.
        Ok(cpu) if cpu < LIST_MAX && !text.starts_with('+') => Ok(cpu),
        Ok(cpu) if cpu >= LIST_MAX => Err(format!("there is no CPU {cpu}")),
        _ => Err(format!(
            "'{part}' is neither a CPU nor a range of CPUs: write a list such as 0,2-3"
        )),
    }
}

/// `[0, 1, 2, 5]` as `0-2,5`.
impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.0.chunk_by(|a, b| a + 1 == *b);
        let parts: Vec<String> = runs
            .filter_map(|run| match run {
                [] => None,
                [only] => Some(only.to_string()),
                [first, .., last] => Some(format!("{first}-{last}")),
            })
            .collect();
        f.write_str(&parts.join(","))
    }
}

impl Text for CpuList {
    const EXPECTED: &'static str = "a list of CPUs as a text, such as \"0,2-3\"";
    const TAKES_NUMBERS: bool = true;
}

as_text!([] CpuList);

described!([] CpuList, "CpuList", {"anyOf": [{"type": "string"}, {"type": "integer"}]});

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
    fn cpus_are_shown_as_ranges() {
        let cases: &[(&[usize], &str)] = &[
            (&[], ""),
            (&[3], "3"),
            (&[0, 1, 2, 5, 7, 8], "0-2,5,7-8"),
            (&[3, 1], "3,1"),
        ];
        for (cpus, text) in cases {
            assert_eq!(CpuList(cpus.to_vec()).to_string(), *text);
        }
    }
}
