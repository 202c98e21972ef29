//! The result of a bench: raw lines, the machine they were measured on, figures, and a page that
//! shows them. Everything that is drawn is drawn from the raw lines alone, so that `cargo xtask report`
//! can draw it again.

pub(crate) mod environment;
mod page;
mod recorded;
pub(crate) mod rounds;
mod run;
pub(crate) mod section;

use std::path::{Path, PathBuf};

use crate::step::At as _;

pub(crate) use cleave_chart::{self as chart, Spread};

pub(crate) use recorded::{DISTURBED, Recorded};
pub(crate) use rounds::Rounds;
pub(crate) use run::Run;
pub(crate) use section::{Bar, Section, Table, Verdict};

/// Turns the raw lines of one suite into what the page shows of it.
pub(crate) type Draw = fn(&Recorded) -> Option<Section>;

/// The functions that draw each section, in the order of the page. A suite without lines has no section.
const DRAWN: &[&[Draw]] = &[crate::bench::DRAWN, &[crate::guest_bench::draw::section]];

fn sections(run: &Recorded) -> Vec<Section> {
    let all = DRAWN.iter().flat_map(|draws| draws.iter());
    let mut sections: Vec<Section> = all.filter_map(|draw| draw(run)).collect();
    for section in &mut sections {
        let timed = section.verdicts.iter_mut().filter(|row| !row.is_count);
        for verdict in timed.filter(|_| run.is_disturbed(section.id)) {
            verdict.must = Bar::Published;
            verdict.note = format!("disturbed: not judged. {}", verdict.note);
        }
    }
    sections
}

/// Draws recorded runs side by side: the figures as files beside each run's raw data, and one page in
/// `to`, which is returned.
pub(crate) fn draw(folders: &[PathBuf], to: &Path) -> Result<PathBuf, String> {
    let runs: Vec<Recorded> = folders
        .iter()
        .map(|folder| Recorded::read(folder))
        .collect::<Result<_, _>>()?;
    let mut drawn = Vec::new();
    for run in &runs {
        let sections = sections(run);
        keep_figures(run, &sections)?;
        drawn.push(sections);
    }
    let page = to.join("report.html");
    std::fs::write(&page, page::html(&runs, &drawn))
        .map_err(|error| format!("{}: {error}", page.display()))?;
    Ok(page)
}

/// The rows T1 to T12 of a run, for the terminal.
pub(crate) fn print_verdicts(folder: &Path) -> Result<(), String> {
    let run = Recorded::read(folder)?;
    for verdict in sections(&run).iter().flat_map(|section| &section.verdicts) {
        println!("{verdict}");
    }
    Ok(())
}

/// `cargo xtask report DIR…`
pub(crate) fn again(words: &[&str]) -> Result<(), String> {
    let folders: Vec<PathBuf> = words.iter().map(PathBuf::from).collect();
    let Some(first) = folders.first() else {
        return Err("name the folder of a run, or several: cargo xtask report DIR…".to_owned());
    };
    let page = draw(&folders, first)?;
    println!("{}", page.display());
    Ok(())
}

/// Writes the figures as files. One of an earlier run does not stay where the suite was disturbed.
fn keep_figures(run: &Recorded, sections: &[Section]) -> Result<(), String> {
    let folder = run.folder.join("figures");
    std::fs::create_dir_all(&folder).at(&folder)?;
    for section in sections {
        for figure in &section.figures {
            let path = folder.join(format!("{}.svg", figure.name));
            match run.is_disturbed(section.id) {
                false => std::fs::write(&path, chart::svg(figure)).at(&path)?,
                true if path.exists() => std::fs::remove_file(&path).at(&path)?,
                true => {}
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::section::Standing;
    use super::*;

    #[test]
    fn a_disturbed_suite_is_not_judged_and_leaves_no_figure() {
        let folder = std::env::temp_dir().join(format!("xtask-report-{}", std::process::id()));
        let figure = folder.join("figures/t1-transport.svg");
        for is_disturbed in [false, true] {
            let mut run = Run::create(&folder, &json!({}), &json!({})).unwrap();
            for round in 1..=5 {
                for (subject, iops) in [("qemu-storage-daemon", 1.0), ("cleave adaptive", 9.0)] {
                    let line = json!({
                        "round": round, "point": "depth 1, driver sleeps", "subject": subject,
                        "result": { "iops": iops, "daemon_cpu_us": 1.0 },
                    });
                    run.note("transport", &line).unwrap();
                }
            }
            if is_disturbed {
                let text = format!("{DISTURBED}: by others");
                run.warn("transport", &text).unwrap();
            }
            run.finish().unwrap();
            draw(std::slice::from_ref(&folder), &folder).unwrap();
            let sections = sections(&Recorded::read(&folder).unwrap());
            let passed = sections.iter().flat_map(|section| &section.verdicts);
            let passed = passed
                .filter(|row| row.standing() == Standing::Pass)
                .count();
            assert_eq!(passed > 0, !is_disturbed);
            assert_eq!(figure.exists(), !is_disturbed);
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
