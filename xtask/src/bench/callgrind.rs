//! Reads callgrind's output: how many instructions each place of the program cost by itself.

use std::collections::BTreeMap;

/// A place in the program.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    /// Program or library.
    pub(super) object: String,
    /// The function of the machine code; what was inlined into it counts for it.
    pub(super) function: String,
    /// The source file that the instructions were made from, also where that was inlined.
    pub(super) file: String,
    pub(super) line: u32,
}

/// Instructions by place, those of callees not included.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Profile(BTreeMap<Place, u64>);

impl Profile {
    /// Reads a profile written with `--compress-strings=no --compress-pos=no` and one event.
    pub(super) fn parse(text: &str) -> Result<Profile, String> {
        let mut profile = Profile::default();
        let mut here = Place {
            object: String::new(),
            function: String::new(),
            file: String::new(),
            line: 0,
        };
        let mut summary: Option<u64> = None;
        let mut is_call = false;
        for line in text.lines() {
            let is_callees = std::mem::take(&mut is_call);
            if line.starts_with(|first: char| first.is_ascii_digit()) {
                // The line below `calls=` is what the callee cost, which stands at its own place too.
                if !is_callees {
                    profile.add(&mut here, line)?;
                }
                continue;
            }
            match line.split_once('=') {
                Some(("ob", name)) => name.clone_into(&mut here.object),
                Some(("fl" | "fi" | "fe", name)) => name.clone_into(&mut here.file),
                Some(("fn", name)) => name.clone_into(&mut here.function),
                Some(("calls", _)) => is_call = true,
                _ => {}
            }
            if let Some(sum) = line.strip_prefix("summary: ") {
                summary = sum.trim().parse().ok();
            }
        }
        let total = profile.total(|_| true);
        match summary {
            Some(sum) if sum == total && sum > 0 => Ok(profile),
            _ => Err(format!(
                "callgrind's sum is {summary:?}, that of its lines {total}"
            )),
        }
    }

    fn add(&mut self, here: &mut Place, line: &str) -> Result<(), String> {
        let mut words = line.split(' ').map(str::parse::<u64>);
        let (Some(Ok(number)), Some(Ok(cost)), None) = (words.next(), words.next(), words.next())
        else {
            return Err(format!("callgrind wrote `{line}`"));
        };
        here.line = u32::try_from(number).unwrap_or(0);
        *self.0.entry(here.clone()).or_default() += cost;
        Ok(())
    }

    /// Instructions of the places that are asked for.
    pub(super) fn total(&self, is_asked: impl Fn(&Place) -> bool) -> u64 {
        let asked = self.0.iter().filter(|(place, _)| is_asked(place));
        asked.map(|(_, cost)| cost).sum()
    }

    /// Sums under names, the largest first.
    pub(super) fn by(&self, name: impl Fn(&Place) -> String) -> Vec<(String, u64)> {
        let mut sums: BTreeMap<String, u64> = BTreeMap::new();
        for (place, cost) in &self.0 {
            *sums.entry(name(place)).or_default() += cost;
        }
        let mut sums: Vec<(String, u64)> = sums.into_iter().collect();
        sums.sort_by_key(|(_, cost)| std::cmp::Reverse(*cost));
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
positions: line
events: Ir
summary: 130

ob=/bin/program
fl=src/main.rs
fn=main
3 10
cob=/lib/c.so
cfi=string.c
cfn=copy
calls=2 7
4 100
fi=src/inlined.rs
8 15
fe=src/main.rs
5 5

ob=/lib/c.so
fl=string.c
fn=copy
7 60
8 40
";

    #[test]
    fn costs_are_a_places_own() {
        let profile = Profile::parse(TEXT).unwrap();
        assert_eq!(
            profile.by(|place| place.function.clone()),
            [("copy".to_owned(), 100), ("main".to_owned(), 30)]
        );
        let files = profile.by(|place| place.file.clone());
        assert_eq!(
            files[1..],
            [("inlined.rs", 15), ("main.rs", 15)].map(in_src)
        );
        assert_eq!(profile.total(|place| place.object == "/bin/program"), 30);
    }

    fn in_src((file, cost): (&str, u64)) -> (String, u64) {
        (format!("src/{file}"), cost)
    }

    #[test]
    fn what_does_not_add_up_is_no_profile() {
        for (from, to) in [
            ("summary: 130", "summary: 131"),
            ("summary: 130", ""),
            ("8 40", "8 40 1"),
            ("8 40", "8 x"),
            ("calls=2 7", ""),
        ] {
            let text = TEXT.replace(from, to);
            assert!(Profile::parse(&text).is_err(), "{from:?} became {to:?}");
        }
        assert!(Profile::parse("summary: 0\n").is_err());
    }
}
