//! The ratios that pages quote, each computed again from the raw lines of the recorded run that it is of. The list of them is
//! `benchmarks/quoted.toml`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use cleave_chart::Spread;
use cleave_rig::{At, Result, quietly};
use itertools::Itertools;
use serde::Deserialize;

use super::rounds::Rounds;
use super::view::base;
use crate::run_folder::RecordedRun;

const LIST: &str = "benchmarks/quoted.toml";

/// The list as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct QuotedRatios {
    /// `SAID | PAGE | WHY`: ratios with a spread of which no recorded run has the raw lines.
    unrecorded: Vec<String>,
    suite: Vec<QuotedSuite>,
}

/// What is quoted of a suite of a run.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct QuotedSuite {
    /// Folder of the run, below that of the list.
    run: String,
    suite: String,
    /// Conditions as in `views.toml`; a ratio is of the lines for which they hold.
    #[serde(default, rename = "where")]
    conditions: Vec<String>,
    /// `SAID | OF | OWN | BASE | POINT | PAGES`: what the pages say, which is a median with or without its spread; an expression and two
    /// subjects as `views.toml` has them; the point; and the pages, with blanks between them.
    ratios: Vec<String>,
}

/// A ratio of the list.
#[derive(Debug, PartialEq)]
struct Quote {
    said: String,
    /// What it is by the raw lines; as it is said, if there are none.
    is: String,
    pages: Vec<String>,
}

/// Compares the pages of a checkout with the list, and the list with the recorded runs.
///
/// # Errors
/// Returns each ratio that the run does not have, that a page named lacks, and that a page has beside the list.
pub(crate) fn check(root: &Path) -> Result {
    let quotes = read(root)?;
    let mut faults = Vec::new();
    for Quote { said, is, pages } in quotes.iter().filter(|quote| quote.said != quote.is) {
        faults.push(format!(
            "{LIST}: {said} of {} is {is} by its run",
            pages.join(", ")
        ));
    }
    let listed = by_page(&quotes);
    let tracked = quietly(root, "git ls-files README.md docs/*.md", &[])?;
    for page in tracked.lines() {
        let own = listed.get(page).map_or(&[][..], Vec::as_slice);
        let text = fs::read_to_string(root.join(page)).at(page)?;
        faults.extend(faults_of(page, &text, own));
    }
    match faults.is_empty() {
        true => Ok(()),
        false => Err(faults.join("\n")),
    }
}

/// Puts what the runs say into the list and the pages. Words around a ratio stay as they are.
///
/// # Errors
/// Fails if two ratios of a page that are said alike have become different.
pub(crate) fn write(root: &Path) -> Result {
    let quotes = read(root)?;
    for (page, own) in by_page(&quotes) {
        rewrite(root, page, &own)?;
    }
    rewrite(root, LIST, &quotes.iter().collect_vec())
}

fn by_page(quotes: &[Quote]) -> BTreeMap<&str, Vec<&Quote>> {
    let pairs = quotes
        .iter()
        .flat_map(|quote| quote.pages.iter().map(move |page| (page.as_str(), quote)));
    pairs.into_group_map().into_iter().collect()
}

fn rewrite(root: &Path, file: &str, quotes: &[&Quote]) -> Result {
    let path = root.join(file);
    let text = fs::read_to_string(&path).at(&path)?;
    let now = replaced(&text, quotes).at(file)?;
    fs::write(&path, now).at(&path)
}

/// Returns the list with what each ratio is by its run.
fn read(root: &Path) -> Result<Vec<Quote>> {
    let text = fs::read_to_string(root.join(LIST)).at(LIST)?;
    let list: QuotedRatios = toml::from_str(&text).at(LIST)?;
    let mut quotes = Vec::new();
    for line in &list.unrecorded {
        let [said, page, _] = fields(line)?;
        quotes.push(Quote {
            said: said.to_owned(),
            is: said.to_owned(),
            pages: vec![page.to_owned()],
        });
    }
    for suite in &list.suite {
        let run = RecordedRun::read(&root.join("benchmarks").join(&suite.run))?;
        let rounds = Rounds::of(&run, &suite.suite);
        let rounds =
            rounds.ok_or_else(|| format!("{LIST}: {} has no {}", suite.run, suite.suite))?;
        let rounds = rounds.only(&suite.conditions);
        for line in &suite.ratios {
            quotes.push(quote(&rounds, line)?);
        }
    }
    Ok(quotes)
}

fn quote(rounds: &Rounds<'_>, line: &str) -> Result<Quote> {
    let [said, of, own, asked, point, pages] = fields(line)?;
    let at = |asked: &str| Some(rounds.at(point, &base(asked, rounds, point)?));
    let ratio = at(own)
        .zip(at(asked))
        .and_then(|(own, base)| own.ratio(&base, of));
    let ratio = ratio.ok_or_else(|| format!("{LIST}: the run has no such ratio: {line}"))?;
    Ok(Quote {
        said: said.to_owned(),
        is: as_said(said, &ratio),
        pages: pages.split(' ').map(str::to_owned).collect(),
    })
}

fn fields<const COUNT: usize>(line: &str) -> Result<[&str; COUNT]> {
    let fields = line.split(" | ").collect_vec();
    fields
        .try_into()
        .map_err(|_| format!("{LIST}: not {COUNT} fields: {line}"))
}

/// Returns a ratio in the form of another one.
fn as_said(form: &str, ratio: &Spread) -> String {
    match form.contains('(') {
        true => format!("{:.2} ({:.2} to {:.2})", ratio.median, ratio.min, ratio.max),
        false => format!("{:.2}", ratio.median),
    }
}

/// Returns a fault for each ratio that a page lacks, or has with a spread beside those of the list.
fn faults_of(page: &str, text: &str, quotes: &[&Quote]) -> Vec<String> {
    // One may be broken between lines.
    let text = text.split_whitespace().join(" ");
    let lacking = quotes.iter().filter(|quote| !text.contains(&quote.said));
    let lacking = lacking.map(|quote| format!("{page}: {LIST} says that it has {}", quote.said));
    let unlisted = spreads(&text).into_iter();
    let unlisted = unlisted.filter(|said| quotes.iter().all(|quote| quote.said != *said));
    let unlisted = unlisted.map(|said| format!("{page}: {said} is not in {LIST}"));
    lacking.chain(unlisted).collect()
}

/// Returns each `1.29 (1.18 to 2.18)` of a text.
fn spreads(text: &str) -> Vec<&str> {
    let is_number = |word: &str| word.parse::<f64>().is_ok();
    let found = text.match_indices(" (").filter_map(|(at, _)| {
        let median = text[..at]
            .rsplit(|c: char| !c.is_ascii_digit() && c != '.')
            .next()?;
        let (spread, _) = text[at + 2..].split_once(')')?;
        let (min, max) = spread.split_once(" to ")?;
        let is_one = [median, min, max].into_iter().all(is_number);
        is_one.then(|| &text[at - median.len()..at + 3 + spread.len()])
    });
    found.collect()
}

/// Returns a text with what each ratio is in place of what was said.
fn replaced(text: &str, quotes: &[&Quote]) -> Result<String> {
    let mut changes = BTreeMap::new();
    for quote in quotes {
        let before = changes.insert(quote.said.as_str(), quote.is.as_str());
        if before.is_some_and(|before| before != quote.is) {
            let Quote { said, is, .. } = quote;
            return Err(format!(
                "one {said} is {is} now, and another is not: change them by hand"
            ));
        }
    }
    // A median alone may be the beginning of another ratio.
    let longest = changes
        .into_iter()
        .sorted_by_key(|(said, _)| std::cmp::Reverse(said.len()))
        .collect_vec();
    let (mut now, mut rest) = (String::new(), text);
    while let Some(next) = rest.chars().next() {
        let is_inside = now.ends_with(|c: char| c.is_ascii_digit() || c == '.');
        let change = longest
            .iter()
            .find(|(said, _)| !is_inside && rest.starts_with(said));
        let (taken, put) = change
            .map_or((next.len_utf8(), &rest[..next.len_utf8()]), |(said, is)| {
                (said.len(), *is)
            });
        now += put;
        rest = &rest[taken..];
    }
    Ok(now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn the_pages_quote_what_the_recorded_runs_say() {
        check(&cleave_rig::root()).unwrap();
    }

    fn one(said: &str, is: &str) -> Quote {
        Quote {
            said: said.to_owned(),
            is: is.to_owned(),
            pages: vec!["a.md".to_owned()],
        }
    }

    #[test]
    fn a_quote_is_computed_in_the_form_in_which_it_is_said() {
        let line = |subject: &str, round: u64, iops: f64| -> Value {
            json!({"point": "depth 1", "subject": subject, "round": round, "result": {"iops": iops}})
        };
        let lines = [
            line("ours", 1, 3.0),
            line("theirs", 1, 2.0),
            line("ours", 2, 5.0),
            line("theirs", 2, 2.0),
        ];
        let rounds = Rounds {
            lines: lines.iter().collect(),
        };
        let computed = |text: &str| quote(&rounds, text).map(|quote| quote.is);
        let full = "9.99 (1.00 to 2.00) | iops | ours | most iops of th* | depth 1 | a.md b.md";
        assert_eq!(computed(full).unwrap(), "2.00 (1.50 to 2.50)");
        assert_eq!(
            computed("9.99 | iops | ours | theirs | depth 1 | a.md").unwrap(),
            "2.00"
        );
        assert!(
            computed("9.99 | iops | ours | absent | depth 1 | a.md")
                .unwrap_err()
                .contains("no such ratio")
        );
        assert!(
            computed("9.99 | iops | ours | depth 1 | a.md")
                .unwrap_err()
                .contains("not 6 fields")
        );
    }

    #[test]
    fn a_page_has_the_ratios_of_the_list_and_no_other_with_a_spread() {
        let listed = [one("1.29 (1.18 to 2.18)", ""), one("0.45", "")];
        let listed = listed.iter().collect_vec();
        let faults = |text: &str| faults_of("a.md", text, &listed).len();
        assert_eq!(
            faults("| 8 | **1.29 (1.18 to 2.18)** | 0.45 (of nine) |"),
            0
        );
        assert_eq!(faults("1.29 (1.18 to 2.18)"), 1);
        assert_eq!(faults("1.29 (1.18 to 2.18), 0.45\nor 1.3 (1.1 to 2)"), 1);
        assert_eq!(
            spreads("6.1 ms (4.4 to 22.9) 2.5 (see below) 1.0 (0.9 to 1.1)"),
            ["1.0 (0.9 to 1.1)"]
        );
    }

    #[test]
    fn a_changed_ratio_is_changed_alone_and_where_it_stands_by_itself() {
        let quotes = [
            one("2.00", "3.00"),
            one("2.00 (1.00 to 3.00)", "2.00 (1.50 to 3.00)"),
            one("3.00", "4.00"),
        ];
        let put = |text: &str| replaced(text, &quotes.iter().collect_vec());
        let text = "2.00, 12.00, 2.00 (1.00 to 3.00), 3.00";
        assert_eq!(put(text).unwrap(), "3.00, 12.00, 2.00 (1.50 to 3.00), 4.00");
        let apart = [one("2.00", "3.00"), one("2.00", "4.00")];
        assert!(
            replaced("", &apart.iter().collect_vec())
                .unwrap_err()
                .contains("by hand")
        );
    }
}
